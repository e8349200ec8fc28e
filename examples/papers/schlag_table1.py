"""Table 1 of Schlag et al. 2021: WMT14 English-German."""

from papers.rows import Row, Table
from papers.translation import TRANSLATION

_FAST = "--fast-weight-attention encoder,decoder,cross --update-rule sum --normalization attention"


def _row(model: str, options: str, valid: str, test: str) -> Row:
    arch = "--arch fast_weight_transformer_wmt_en_de_big --share-all-embeddings"
    return Row(model, TRANSLATION, f"{arch} {options}", (valid, test))


TABLE = Table(
    title="Schlag et al. 2021, Table 1: BLEU on WMT14 English-German",
    folder="wmt14",
    measures=("valid", "test"),
    rows={
        # Features: d_dot = 2 m or 2 nu d_key, with d_key = 64.
        "standard": _row("Transformer", "--fast-weight-attention none", "26.6", "27.7"),
        "linear": _row("Linear Transformer", f"{_FAST} --feature-map elu", "25.5", "26.8"),
        "performer-64": _row("Performer, m = 32", f"{_FAST} --feature-map favor --favor-features 32", "24.2", "24.4"),
        "performer-256": _row(
            "Performer, m = 128", f"{_FAST} --feature-map favor --favor-features 128", "24.9", "25.3"
        ),
        "performer-512": _row(
            "Performer, m = 256", f"{_FAST} --feature-map favor --favor-features 256", "26.7", "27.7"
        ),
        "dpfp-256": _row("DPFP, nu = 2", f"{_FAST} --feature-map dpfp --dpfp-nu 2", "26.2", "26.9"),
        "dpfp-512": _row("DPFP, nu = 4", f"{_FAST} --feature-map dpfp --dpfp-nu 4", "26.2", "27.1"),
    },
)
