"""Table 1 of Mao 2022: GPT-2 small on The Pile, update rules, keys of 4."""

from papers.language_models import GPT2
from papers.rows import Row, Table


def _row(model: str, rule: str, feature_map: str, normalization: str, number: str) -> Row:
    memory = f"--update-rule {rule} --feature-map {feature_map} --normalization {normalization} --feature-dim 4"
    return Row(model, GPT2, memory, (number,))


TABLE = Table(
    title="Mao 2022, Table 1: perplexity on The Pile, GPT-2 small fine-tuned, m = 4",
    folder="gpt2",
    measures=("valid",),
    rows={
        "add-baseline": _row("Add", "sum", "relu", "attention", "22.6"),
        "add-no-normalization": _row("Add, no normalisation", "sum", "relu", "none", "diverges"),
        "add-no-feature-map": _row("Add, neither", "sum", "identity", "none", "20.0"),
        # The delta rule has sum normalisation besides; without it it diverges (footnote 3).
        "delta-baseline": _row("Delta", "delta", "relu", "sum,attention", "21.6"),
        "delta-no-normalization": _row("Delta, no normalisation", "delta", "relu", "sum", "20.1"),
        "delta-no-feature-map": _row("Delta, neither", "delta", "identity", "sum", "diverges"),
        "gated-baseline": _row("Gated", "gated", "relu", "attention", "diverges"),
        "gated-no-normalization": _row("Gated, no normalisation", "gated", "relu", "none", "19.7"),
        "gated-no-feature-map": _row("Gated, neither", "gated", "identity", "none", "17.1"),
        # No such run in the paper. The normaliser decays as the keys of the memory do, z_t = f_t * z_{t-1} + k_t.
        "decay-baseline": _row("Decay", "decay", "relu", "attention", "N/A"),
        "decay-no-normalization": _row("Decay, no normalisation", "decay", "relu", "none", "18.8"),
        "decay-no-feature-map": _row("Decay, neither", "decay", "identity", "none", "17.1"),
    },
)
