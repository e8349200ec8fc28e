"""Table 2 of Schlag et al. 2021: WikiText-103, the update rule in two sizes."""

from papers.language_models import MEDIUM, SMALL
from papers.rows import Row, Table

_SOFTMAX = "--softmax-attention-layers all"
_SUM = "--update-rule sum --feature-map elu --normalization attention"
DELTA = "--update-rule delta --feature-map elu --normalization sum"
PERFORMER_SUM = "--update-rule sum --feature-map favor --normalization attention --favor-features"
PERFORMER_DELTA = "--update-rule delta --feature-map favor --normalization sum --favor-features"

TABLE = Table(
    title="Schlag et al. 2021, Table 2: perplexity on WikiText-103, the update rule in two sizes",
    folder="wikitext103",
    measures=("valid", "test"),
    rows={
        "small-transformer": Row("Transformer", SMALL, _SOFTMAX, ("33.0", "34.1")),
        "small-linear-transformer": Row("Linear Transformer", SMALL, _SUM, ("37.1", "38.3")),
        "small-delta-network": Row("Delta Network", SMALL, DELTA, ("34.1", "35.5")),
        "small-performer-sum": Row("Performer, m = 8, sum", SMALL, f"{PERFORMER_SUM} 8", ("39.0", "39.6")),
        "small-performer-delta": Row("Performer, m = 8, delta", SMALL, f"{PERFORMER_DELTA} 8", ("36.1", "37.2")),
        "medium-transformer": Row("Transformer", MEDIUM, _SOFTMAX, ("27.9", "29.6")),
        "medium-linear-transformer": Row("Linear Transformer", MEDIUM, _SUM, ("31.1", "33.0")),
        "medium-delta-network": Row("Delta Network", MEDIUM, DELTA, ("29.7", "31.5")),
        "medium-performer-sum": Row("Performer, m = 16, sum", MEDIUM, f"{PERFORMER_SUM} 16", ("32.2", "33.8")),
        "medium-performer-delta": Row("Performer, m = 16, delta", MEDIUM, f"{PERFORMER_DELTA} 16", ("30.0", "31.8")),
    },
)
