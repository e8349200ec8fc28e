"""Table 5 of Schlag et al. 2021 (App. D.3): WikiText-103, more features than capacity needs."""

from papers.language_models import SMALL
from papers.rows import Row, Table
from papers.schlag_table2 import PERFORMER_DELTA, PERFORMER_SUM

_DPFP_SUM = "--update-rule sum --feature-map dpfp --dpfp-nu 1 --normalization attention"
_DPFP_DELTA = "--update-rule delta --feature-map dpfp --dpfp-nu 1 --normalization sum"

TABLE = Table(
    title="Schlag et al. 2021, Table 5: perplexity on WikiText-103, small, more features than capacity needs",
    folder="wikitext103",
    measures=("valid", "test"),
    rows={
        "performer-sum": Row("Performer, m = 16, sum", SMALL, f"{PERFORMER_SUM} 16", ("38.0", "38.8")),
        "performer-delta": Row("Performer, m = 16, delta", SMALL, f"{PERFORMER_DELTA} 16", ("36.0", "37.0")),
        "dpfp-sum": Row("DPFP, nu = 1, sum", SMALL, _DPFP_SUM, ("37.7", "38.8")),
        "dpfp-delta": Row("DPFP, nu = 1, delta", SMALL, _DPFP_DELTA, ("33.9", "35.0")),
        # Of which the paper says that they were "not beneficial", without numbers.
        **{
            f"{name}-{size}": Row(f"{model}, {size}, {rule}", SMALL, options, ("–", "–"))
            for name, model, size, rule, options in (
                ("performer-sum", "Performer", "m-32", "sum", f"{PERFORMER_SUM} 32"),
                ("performer-delta", "Performer", "m-32", "delta", f"{PERFORMER_DELTA} 32"),
                ("dpfp-sum", "DPFP", "nu-2", "sum", _DPFP_SUM.replace("nu 1", "nu 2")),
                ("dpfp-delta", "DPFP", "nu-2", "delta", _DPFP_DELTA.replace("nu 1", "nu 2")),
            )
        },
    },
)
