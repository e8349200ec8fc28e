"""Table 3 of Mao 2022: the model of Baevski and Auli on WikiText-103, fine-tuned or (Linformer, ABC) from scratch."""

from papers.language_models import BAEVSKI, BAEVSKI_SCRATCH
from papers.rows import Row, Table


def _decay(size: int, *numbers: str) -> Row:
    memory = f"--update-rule decay --feature-map identity --normalization none --feature-dim {size}"
    schedule = "--lr 0.0001 --lr-scheduler cosine --min-lr 2e-06 --warmup-updates 4000 --max-update 100000"
    return Row(f"Decay, m = {size}", BAEVSKI, f"{memory} {schedule}", numbers)


TABLE = Table(
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
        "decay-32": _decay(32, "22.1", "20.7"),
        "decay-64": _decay(64, "21.9", "20.5"),
        "linformer-64": Row(
            "Linformer, 2 x 64", BAEVSKI_SCRATCH, "--mixers linformer --linformer-slots 64", ("27.2", "30.7")
        ),
        "abc-32": Row("ABC-MLP, 2 x 32", BAEVSKI_SCRATCH, "--mixers abc --abc-slots 32", ("21.9", "20.5")),
    },
)
