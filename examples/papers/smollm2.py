"""SmolLM2-135M-Instruct with other mixers in some of its layers, or all. `reproduce.py run` trains and scores them."""

from __future__ import annotations

from dataclasses import replace

from papers.language_models import LanguageModel
from papers.rows import Row, Table

# As from-huggingface writes it to options.txt.
SHAPE = (
    "--arch fast_weight_lm --decoder-layers 30 --decoder-embed-dim 576 --decoder-input-dim 576 --decoder-output-dim 576"
    " --decoder-ffn-embed-dim 1536 --decoder-attention-heads 9 --kv-heads 3 --decoder-normalize-before"
    " --no-scale-embedding --share-decoder-input-output-embed --max-target-positions 8192 --mask-special-symbols"
    " --no-token-positional-embeddings --dropout 0 --attention-dropout 0 --rms-norm-eps 1e-05 --swiglu"
    " --projection-bias none --rotary-dim 64 --rotary-base 100000.0"
)
"""The options of the source's shape."""
_TRANSFERRED, _TUNED = 48, 16
_RECIPE = LanguageModel(
    "",
    batch=2,
    length=512,
    modes=("context-0",),
    splits="test",
    evaluate="--cpu --batch-size 2",
    sources=True,
)
_TEST = "test, context-0"
SOURCE = "source"

_MIXERS = {
    "window-sum": ("window-sum", "", "0.003"),
    "gated-delta": (
        "gated delta",
        "--gated-delta-bias --gated-delta-kv-heads 3 --gated-delta-gate-rank 64",
        "0.003",
    ),
    "sum": ("LoLCATs's sum", "--feature-map relu --normalization attention", "0.01"),
    "gated": ("gated", "--feature-map relu --normalization attention", "0.01"),
    "delta": ("delta", "--feature-map relu --normalization sum", "0.01"),
}
"""For people, options, and the learning rate of attention transfer."""
_LAYERS = {6: "5,10,15,20,25,30", 12: "3,5,8,10,13,15,18,20,23,25,28,30", 30: "1-30"}
"""Those that get another mixer, by their number."""


def _trained(start: str, updates: int, schedule: str, becomes_source: bool = False) -> LanguageModel:
    """`start`: options that name the model it begins from. `becomes_source`: whether others begin from it."""
    schedule = f"--optimizer adam {schedule} --max-update {updates}"
    # A training of minutes is saved at its end alone, for its model.
    ends = f"--validate-interval-updates {updates} --no-last-checkpoints --no-save-optimizer-state"
    options = f"--cpu --num-workers 0 {SHAPE} {start} {schedule} {ends}"
    return replace(_RECIPE, options=options, becomes_source=becomes_source)


def _cosine(lr: str) -> str:
    return f"--lr {lr} --lr-scheduler cosine --warmup-updates 2"


_FINE_TUNING = _trained("--finetune-from-model SOURCE --clip-norm 1", _TUNED, _cosine("0.0001"))


def _converted(mixer: str, layers: int, seeds: tuple[int, ...]) -> dict[str, Row]:
    """After attention transfer alone, and fine-tuned from there."""
    words, flags, lr = _MIXERS[mixer]
    name, title = f"{mixer}-{layers}", f"{words} in {f'{layers} of' if layers < 30 else 'all'} 30 layers"
    mixers = f"--mixers softmax,{mixer}:{_LAYERS[layers]} {flags}"
    start = "--transfer-from SOURCE --criterion attention_transfer"
    transfer = _trained(start, _TRANSFERRED, _cosine(lr), becomes_source=True)
    return {
        f"{name}-transfer": Row(f"{title}, attention transfer", transfer, mixers, (), seeds),
        name: Row(f"{title}, fine-tuned", _FINE_TUNING, mixers, (), source=f"{name}-transfer"),
    }


def _rows() -> dict[str, Row]:
    # One update that changes nothing: the source, as a row that is scored like the others.
    copied = _trained("--transfer-from SOURCE", 1, "--lr 0 --lr-scheduler fixed")
    rows = {
        SOURCE: Row("the source", copied, "--mixers softmax", ()),
        "source-tuned": Row("the source, fine-tuned", _FINE_TUNING, "--mixers softmax", ()),
    }
    for layers in _LAYERS:
        for mixer in _MIXERS:
            best = layers == 6 and mixer in ("window-sum", "gated-delta")
            rows |= _converted(mixer, layers, (1, 2, 3) if best else (1,))
    return rows


SMOLLM2 = Table(
    title="SmolLM2-135M-Instruct converted: perplexity on WikiText-2",
    folder="smollm2",
    measures=(),
    rows=_rows(),
    page="convert.md",
    baseline=(SOURCE, _TEST),
)
