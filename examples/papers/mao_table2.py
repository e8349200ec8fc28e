"""Table 2 of Mao 2022: GPT-2 small on The Pile, larger keys."""

from papers.language_models import GPT2
from papers.rows import Row, Table


def _row(rule: str, size: int, number: str) -> Row:
    memory = f"--update-rule {rule} --feature-map identity --normalization none --feature-dim {size}"
    return Row(f"{rule.capitalize()}, m = {size}", GPT2, memory, (number,))


TABLE = Table(
    title="Mao 2022, Table 2: perplexity on The Pile, GPT-2 small fine-tuned, larger keys",
    folder="gpt2",
    measures=("valid",),
    rows={
        # The target, from which all other rows of Tables 1 and 2 start.
        "gpt2": Row("GPT-2", GPT2, "--softmax-attention-layers all", ("14.5",)),
        "gated-16": _row("gated", 16, "16.8"),
        "decay-16": _row("decay", 16, "16.1"),
        "gated-32": _row("gated", 32, "16.4"),
        "decay-32": _row("decay", 32, "14.6"),
        "local-32": Row("Local attention, window 32", GPT2, "--mixers local --local-window 32", ("19.4",)),
    },
)
