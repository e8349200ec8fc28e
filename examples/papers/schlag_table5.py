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
    },
)
