"""Table 3 of Schlag et al. 2021: WikiText-103, position encoding and attention normalisation."""

from papers.language_models import MEDIUM
from papers.rows import Row, Table
from papers.schlag_table2 import DELTA

# For the delta rule the paper's attention normalisation is both of its equations, 27 and 28.
_BOTH = "--update-rule delta --feature-map elu --normalization sum,attention,removal"
_WITHOUT = "--no-token-positional-embeddings"

TABLE = Table(
    title="Schlag et al. 2021, Table 3: perplexity on WikiText-103, the medium Delta Network with and without",
    folder="wikitext103",
    measures=("valid", "test"),
    rows={
        "positions-yes-normalization-yes": Row("positions, attention normalisation", MEDIUM, _BOTH, ("30.4", "32.1")),
        "positions-no-normalization-yes": Row(
            "attention normalisation", MEDIUM, f"{_BOTH} {_WITHOUT}", ("29.2", "31.2")
        ),
        "positions-yes-normalization-no": Row("positions", MEDIUM, DELTA, ("29.7", "31.5")),
        "positions-no-normalization-no": Row("neither", MEDIUM, f"{DELTA} {_WITHOUT}", ("28.1", "31.1")),
    },
)
