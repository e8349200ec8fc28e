"""On a GPU, models train, score and translate as they do on a CPU."""

from __future__ import annotations

import pytest

from fairseq_fastweights.mixers.registry import MIXERS
from tests.conftest import DEVICE, evaluate, train
from tests.tasks.conftest import generate, losses, train_translation

pytestmark = pytest.mark.skipif(DEVICE == ["--cpu"], reason="FASTWEIGHTS_TEST_DEVICE is not cuda")

SEGMENTS = "--tokens-per-sample 16 --batch-size 4".split()
# Of the largest loss. Errors of rounding grow from update to update.
BOUNDS = {"": 2e-3, "--bf16": 1e-1, "--fp16": 1e-1}


@pytest.mark.parametrize("mixer", MIXERS)
def test_language_models_train_and_score_as_on_a_cpu(corpus, tmp_path, mixer):
    flags = ["--mixers", mixer, "--log-interval", "1", "--seed", "1"]
    expected = losses(train(corpus, tmp_path / "cpu", *flags, "--cpu"))
    for precision, bound in BOUNDS.items():
        found = losses(train(corpus, tmp_path / f"gpu{precision}", *flags, *precision.split()))
        assert found == pytest.approx(expected, rel=bound), precision
    checkpoint = tmp_path / "cpu" / "checkpoint_last.pt"
    loss, tokens = evaluate(corpus, checkpoint, *SEGMENTS)
    assert (pytest.approx(loss, rel=1e-4), tokens) == evaluate(corpus, checkpoint, *SEGMENTS, "--cpu")


REPLAYED = "CUDA graphs were recorded"


@pytest.mark.parametrize("mixer", MIXERS)
def test_replayed_layers_train_as_those_that_are_not(corpus, tmp_path, mixer):
    flags = ["--mixers", mixer, "--no-save"]
    expected = losses(train(corpus, tmp_path, *flags))
    log = train(corpus, tmp_path, *flags, "--cuda-graphs")
    assert REPLAYED in log and losses(log) == pytest.approx(expected, rel=2e-3)


@pytest.mark.slow
@pytest.mark.parametrize("flags", ["", "--mixers softmax", "--bf16", "--fp16", "--update-freq 2", "--carry-over-state"])
def test_compiled_layers_train_as_those_that_are_not(corpus, tmp_path, flags):
    common = ["--no-save", "--no-token-positional-embeddings", *flags.split()]
    expected = losses(train(corpus, tmp_path, *common))
    for way, is_replayed in (("--compile", True), ("--compile --no-cuda-graphs", False)):
        log = train(corpus, tmp_path, *common, *way.split())
        assert (REPLAYED in log) == is_replayed
        assert losses(log) == pytest.approx(expected, rel=BOUNDS.get(flags, 2e-3))


@pytest.mark.parametrize("rule", ["delta", "decay", "gated", "gated-delta", "mamba"])
def test_states_that_are_carried_over_score_as_on_a_cpu(corpus, tmp_path, rule):
    flags = ["--mixers", rule, "--carry-over-state"]
    expected = losses(train(corpus, tmp_path / "cpu", *flags, "--cpu"))
    assert losses(train(corpus, tmp_path / "gpu", *flags)) == pytest.approx(expected, rel=2e-3)
    checkpoint = tmp_path / "cpu" / "checkpoint_last.pt"
    how = [*SEGMENTS, "--carry-over-state"]
    loss, tokens = evaluate(corpus, checkpoint, *how)
    assert (pytest.approx(loss, rel=1e-4), tokens) == evaluate(corpus, checkpoint, *how, "--cpu")


@pytest.mark.parametrize(
    "flags", ["", "--update-rule decay --feature-map dpfp", "--fast-weight-attention encoder,decoder,cross"]
)
def test_translation_models_train_and_translate_as_on_a_cpu(pairs, tmp_path, flags):
    expected = losses(train_translation(pairs, tmp_path / "cpu", *flags.split(), "--cpu"))
    assert losses(train_translation(pairs, tmp_path / "gpu", *flags.split())) == pytest.approx(expected, rel=2e-3)
    checkpoint = tmp_path / "cpu" / "checkpoint_last.pt"
    there = generate(pairs, checkpoint, tmp_path / "there", "--cpu")
    here = generate(pairs, checkpoint, tmp_path / "here")
    for line, hypotheses in there.items():
        for mine, its in zip(here[line], hypotheses, strict=True):
            assert mine.words == its.words and mine.score == pytest.approx(its.score, rel=1e-3)
