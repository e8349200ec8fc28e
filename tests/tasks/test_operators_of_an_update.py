"""An update of the paper's small language model starts few operators, and waits for a GPU once at most."""

from collections import Counter
from pathlib import Path

import pytest
import torch
from harness.updates import stand_in_graphs, watched

from fairseq_fastweights.models import mixer_layers
from tests.conftest import train
from tests.tasks.conftest import train_translation

# As many layers and parameters as the paper's model; of options that are given twice the last one counts.
SMALL = """--arch fast_weight_lm_wiki103_small --criterion adaptive_loss --ddp-backend legacy_ddp --dropout 0.1
    --decoder-layers 16 --decoder-embed-dim 16 --decoder-input-dim 16 --decoder-output-dim 16 --decoder-ffn-embed-dim 32
    --adaptive-input-cutoff 8,16,32 --adaptive-softmax-cutoff 8,16,32 --clip-norm 0.25 --no-save
    --max-update 6 --log-interval 100""".split()
DELTA, SOFTMAX = "--update-rule delta", "--softmax-attention-layers all"


@pytest.mark.parametrize(
    ("model", "most"),
    [
        (f"{DELTA} --bf16", 920),
        (f"{DELTA} --fp16 --fp16-init-scale 4", 920),
        (SOFTMAX, 860),
        (f"{SOFTMAX} --optimizer nag --momentum 0.99", 860),
    ],
)
def test_an_update_starts_few_operators(model, most, our_fairseq, corpus: Path, tmp_path: Path) -> None:
    with watched(after=3) as update:
        train(corpus, tmp_path, *SMALL, *model.split())
    assert update.total <= most, update.operators
    # Nothing for every parameter, of which there are more than 200.
    assert sum(sum(update.operators[part].values()) for part in ("clip-grads", "optimizer", "other")) <= 30
    assert len(update.waits) == 1 and update.waits[0].startswith("cpu at "), update.waits


@pytest.mark.slow
def test_compiled_layers_start_fewer_operators(our_fairseq, corpus: Path, tmp_path: Path) -> None:
    """190 of the 400 that are no kernels of the compiler are matrix products of the layers, and 32 are the rule."""
    torch.compiler.reset()
    with watched(after=3) as update:
        train(corpus, tmp_path, *SMALL, "--compile", "--no-cuda-graphs", *DELTA.split(), "--bf16")
    assert update.compiled and update.total - update.compiled <= 360, update.operators
    assert update.total <= 550, update.operators
    assert len(update.waits) == 1, update.waits
    assert_replayed(corpus, tmp_path, "--compile", *DELTA.split(), "--bf16")
    torch.compiler.reset()


@pytest.mark.parametrize("way", ["--cuda-graphs", "--compile"])
@pytest.mark.parametrize("model", [f"{DELTA} --bf16", SOFTMAX])
def test_layers_that_are_replayed_are_two_operators(
    model, way, our_fairseq, corpus: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiled = torch.compile(mixer_layers._run_with_states, backend="aot_eager")  # the compiler takes a minute
    monkeypatch.setattr(mixer_layers, "_compiled", lambda: compiled)
    assert_replayed(corpus, tmp_path, way, *model.split())
    torch.compiler.reset()


def assert_replayed(corpus: Path, folder: Path, *flags: str) -> None:
    """An update starts two operators for all layers, and 120 in all."""
    with stand_in_graphs(), watched(after=5) as update:
        train(corpus, folder, *SMALL, *flags, "--max-update", "8")
    assert sum(update.operators.values(), Counter())["replay"] == 2
    assert update.total <= 120, update.operators
    assert len(update.waits) == 1, update.waits


# Operators of one layer: its mixer, two norms, a feed-forward network, residual connections and dropout.
LAYERS = {
    "--update-rule delta --feature-map dpfp --dpfp-nu 3": 52,
    "--update-rule delta --feature-map favor --favor-features 4": 68,
    "--mixers retention": 104,
    "--mixers gated-delta": 59,
    "--mixers kimi-delta": 65,
    "--mixers mamba": 67,
}


@pytest.mark.parametrize("mixer", LAYERS)
def test_a_layer_starts_few_operators(mixer, our_fairseq, corpus: Path, tmp_path: Path) -> None:
    counts = []
    for layers in ("1", "3"):
        with watched(after=1) as update:
            more = f"--no-token-positional-embeddings --bf16 {mixer} --max-update 2 --decoder-layers {layers}"
            train(corpus, tmp_path, *SMALL, *more.split())
        counts.append(update.total)
    assert counts[1] - counts[0] <= 2 * LAYERS[mixer], update.operators


OTHERS = {
    "carried states": "--carry-over-state --no-token-positional-embeddings",
    "documents": "--sample-break-mode complete --no-token-positional-embeddings --separate-documents",
    "softmax": "--mixers softmax",
    "moving average": "--store-ema --ema-fp32",
    "updates of two batches": "--update-freq 2",
    "amp": "--amp",
    "weights in 16 bits": "--memory-efficient-fp16 --fp16-init-scale 4",
    "sgd": "--optimizer sgd --momentum 0.9",
}


@pytest.mark.parametrize("case", OTHERS)
def test_an_update_of_a_language_model_waits_once(case, our_fairseq, corpus: Path, tmp_path: Path) -> None:
    flags = OTHERS[case].split()
    with watched(after=1) as update:
        train(corpus, tmp_path, "--max-update", "4", "--log-interval", "100", "--no-save", *flags)
    assert len(update.waits) == 1, update.waits


@pytest.mark.parametrize("flags", ["", "--fast-weight-attention encoder,decoder,cross"])
def test_an_update_of_a_translation_model_waits_once(flags, our_fairseq, pairs: Path, tmp_path: Path) -> None:
    with watched(after=1) as update:
        train_translation(pairs, tmp_path, "--log-interval", "100", "--no-save", *flags.split())
    assert len(update.waits) == 1, update.waits
