"""Table 4 of Schlag et al. 2021: WikiText-103, trained and scored without truncating the context."""

from papers.language_models import MEDIUM_CARRIED
from papers.rows import Row, Table

_SUM = "--update-rule sum --feature-map elu --no-token-positional-embeddings --normalization"
_DELTA = "--update-rule delta --feature-map elu --no-token-positional-embeddings --normalization"

TABLE = Table(
    title="Schlag et al. 2021, Table 4: perplexity on WikiText-103, the context not truncated",
    folder="wikitext103",
    measures=("valid", "test"),
    rows={
        "linear-transformer": Row(
            "Linear Transformer, 0.13 M", MEDIUM_CARRIED, f"{_SUM} attention", ("> 260", "> 260")
        ),
        "delta-network": Row("Delta Network, 0.13 M", MEDIUM_CARRIED, f"{_DELTA} sum", ("27.8", "29.4")),
        # Of the paper's first version.
        "linear-transformer-no-normalization": Row(
            "Linear Transformer, sum normalisation, 0.13 M", MEDIUM_CARRIED, f"{_SUM} sum", ("1600", "1600")
        ),
    },
    others=(
        ("Transformer-XL, 0.13 M", "65.7", "65.5"),
        ("Transformer-XL, 1.05 M", "29.3", "30.1"),
        ("Transformer-XL, 2.10 M", "26.4", "27.4"),
        ("Transformer-XL, 6.29 M", "24.6", "25.5"),
    ),
)
