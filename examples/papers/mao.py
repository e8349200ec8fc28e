"""The tables of Mao 2022: GPT-2 small on The Pile, and the model of Baevski and Auli on WikiText-103."""

from papers.language_models import BAEVSKI, BAEVSKI_SCRATCH, GPT2, LanguageModel
from papers.rows import Row, Table


def _row(model: str, rule: str, feature_map: str, normalization: str, number: str) -> Row:
    memory = f"--update-rule {rule} --feature-map {feature_map} --normalization {normalization} --feature-dim 4"
    return Row(model, GPT2, memory, (number,))


def _larger(rule: str, size: int, *numbers: str, recipe: LanguageModel = GPT2, schedule: str = "") -> Row:
    memory = f"--update-rule {rule} --feature-map identity --normalization none --feature-dim {size}"
    return Row(f"{rule.capitalize()}, m = {size}", recipe, f"{memory} {schedule}", numbers)


def _tuned(size: int, *numbers: str) -> Row:
    schedule = "--lr 0.0001 --lr-scheduler cosine --min-lr 2e-06 --warmup-updates 4000 --max-update 100000"
    return _larger("decay", size, *numbers, recipe=BAEVSKI, schedule=schedule)


TABLES = {
    "mao-table1": Table(
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
            # As the published kernel computes it, not as Eq. 6 says. Which one the paper's numbers are of is not known.
            "delta-baseline-kernel": _row("Delta, the published kernel", "delta-mao", "relu", "sum,attention", "21.6"),
            "delta-no-normalization-kernel": _row(
                "Delta, no normalisation, the published kernel", "delta-mao", "relu", "sum", "20.1"
            ),
            "gated-baseline": _row("Gated", "gated", "relu", "attention", "diverges"),
            "gated-no-normalization": _row("Gated, no normalisation", "gated", "relu", "none", "19.7"),
            "gated-no-feature-map": _row("Gated, neither", "gated", "identity", "none", "17.1"),
            # No such run in the paper. The normaliser decays as the keys of the memory do, z_t = f_t * z_{t-1} + k_t.
            "decay-baseline": _row("Decay", "decay", "relu", "attention", "N/A"),
            "decay-no-normalization": _row("Decay, no normalisation", "decay", "relu", "none", "18.8"),
            "decay-no-feature-map": _row("Decay, neither", "decay", "identity", "none", "17.1"),
        },
    ),
    "mao-table2": Table(
        title="Mao 2022, Table 2: perplexity on The Pile, GPT-2 small fine-tuned, larger keys",
        folder="gpt2",
        measures=("valid",),
        rows={
            # The target, from which all other rows of Tables 1 and 2 start.
            "gpt2": Row("GPT-2", GPT2, "--softmax-attention-layers all", ("14.5",)),
            "gated-16": _larger("gated", 16, "16.8"),
            "decay-16": _larger("decay", 16, "16.1"),
            "gated-32": _larger("gated", 32, "16.4"),
            "decay-32": _larger("decay", 32, "14.6"),
            "local-32": Row("Local attention, window 32", GPT2, "--mixers local --local-window 32", ("19.4",)),
        },
    ),
    # Fine-tuned, or (Linformer, ABC) from scratch.
    "mao-table3": Table(
        title="Mao 2022, Table 3: test perplexity on WikiText-103, Baevski and Auli's model fine-tuned",
        folder="wikitext103",
        measures=("context 0", "context 480"),
        rows={
            # An update that changes nothing leaves the checkpoint in OUT, in today's format.
            "base": Row(
                "Base, the checkpoint",
                BAEVSKI,
                "--softmax-attention-layers all --lr 0 --max-update 1 --no-save-optimizer-state",
                ("20.5", "19.0"),
            ),
            "decay-32": _tuned(32, "22.1", "20.7"),
            "decay-64": _tuned(64, "21.9", "20.5"),
            "linformer-64": Row(
                "Linformer, 2 x 64", BAEVSKI_SCRATCH, "--mixers linformer --linformer-slots 64", ("27.2", "30.7")
            ),
            "abc-32": Row("ABC-MLP, 2 x 32", BAEVSKI_SCRATCH, "--mixers abc --abc-slots 32", ("21.9", "20.5")),
        },
    ),
}
