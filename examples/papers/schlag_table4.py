"""Table 4 of Schlag et al. 2021: WikiText-103, trained and scored without truncating the context."""

from papers.language_models import MEDIUM_CARRIED, transformer_xl
from papers.rows import Row, Table

_SUM = "--update-rule sum --feature-map elu --no-token-positional-embeddings --normalization"
_DELTA = "--update-rule delta --feature-map elu --no-token-positional-embeddings --normalization"


def _xl(size: str, memory: int, target: int, *numbers: str) -> Row:
    options = "--mixers transformer-xl --transformer-xl-memory 384 --no-token-positional-embeddings"
    return Row(f"Transformer-XL, {size} M", transformer_xl(memory, target), options, numbers)


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
        # One and the same training: with OUT the same, it is scored four times.
        "transformer-xl-15": _xl("0.13", 15, 1, "65.7", "65.5"),
        "transformer-xl-64": _xl("1.05", 64, 64, "29.3", "30.1"),
        "transformer-xl-128": _xl("2.10", 128, 128, "26.4", "27.4"),
        "transformer-xl-384": _xl("6.29", 384, 384, "24.6", "25.5"),
    },
)
