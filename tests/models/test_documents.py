"""A language model reads each document of a row as if it stood alone: `starts` of the decoder's `forward`."""

from __future__ import annotations

import itertools

import pytest
import torch

from fairseq_fastweights.mixers.registry import MIXERS
from tests.models.conftest import Fairseq

MODELS = [f"--mixers {name}" for name, kind in MIXERS.items() if kind.takes_starts]
MODELS += ["--mixers delta,softmax:2 --rotary-dim 4", "--mixers delta,softmax:2 --checkpoint-activations"]
PARALLEL = "--mixers mamba,local:2 --local-window 7 --parallel-residual --decoder-normalize-before"
MODELS += [PARALLEL, f"{PARALLEL} --checkpoint-activations"]
MODELS += [f"--mixers delta,softmax:2 {flags}" for flags in ("--decoder-learned-pos", "--layernorm-embedding")]
PAD = 1
STARTS = torch.zeros(1, 40, dtype=torch.bool)
STARTS[0, [0, 11, 12, 29]] = True
ROUNDING = 2e-5  # of float32, where a document's place changes the order of sums


@pytest.mark.parametrize("flags", MODELS)
def test_documents_are_read_as_if_each_stood_alone(fairseq: Fairseq, text, flags):
    """With their positions, and padding behind one and before another; and so are the gradients of the outputs."""
    model = fairseq.build(flags)
    tokens, starts = text(2, 40), torch.zeros(2, 40, dtype=torch.bool)
    tokens[0, 35:] = tokens[1, :3] = PAD
    starts[0, [0, 11, 12, 29]] = starts[1, [3, 20]] = True
    logits = model(tokens, starts=starts)[0]
    assert (model(tokens)[0] - logits)[0, 20].abs().max() > 1e-3  # read as one text
    packed = logits[~tokens.eq(PAD)].logsumexp(-1).sum()
    apart = torch.zeros(())
    for row, begin, end in ((0, 0, 11), (0, 11, 12), (0, 12, 29), (0, 29, 35), (1, 3, 20), (1, 20, 40)):
        alone = model(tokens[row : row + 1, begin:end])[0][0]
        torch.testing.assert_close(logits[row, begin:end], alone, rtol=ROUNDING, atol=ROUNDING)
        apart = apart + alone.logsumexp(-1).sum()
    grads = []
    for loss in (packed, apart):
        model.zero_grad()
        loss.backward()
        grads.append([p.grad.clone() for p in model.parameters() if p.requires_grad])
    for one, other in zip(*grads, strict=True):
        assert (one - other).norm() <= ROUNDING * other.norm() + 1e-6


@pytest.mark.parametrize("name", [name for name, kind in MIXERS.items() if kind.takes_starts and name != "softmax"])
@torch.no_grad()
def test_a_document_goes_on_in_the_next_segment_and_a_new_one_starts_empty(fairseq: Fairseq, text, name):
    model = fairseq.build(f"--mixers {name} --no-token-positional-embeddings")
    tokens, starts = text(2, 40), torch.zeros(2, 40, dtype=torch.bool)
    # The first document of row 0 ends at a segment's edge; both rows have one over two edges.
    starts[0, [8, 30]] = starts[1, [3, 5, 33]] = True
    segments = enumerate(zip(tokens.split(8, dim=1), starts.split(8, dim=1), strict=True))
    parts = [model(x, continues=torch.full((2,), i > 0), starts=begins)[0] for i, (x, begins) in segments]
    parts = torch.cat(parts, dim=1)
    for row, begins in enumerate(([0, 8, 30, 40], [0, 3, 5, 33, 40])):
        for begin, end in itertools.pairwise(begins):
            alone = model(tokens[row : row + 1, begin:end])[0][0]
            torch.testing.assert_close(parts[row, begin:end], alone, rtol=ROUNDING, atol=ROUNDING)


def test_impossible_starts_are_refused_and_unable_layers_named(fairseq: Fairseq, text):
    with pytest.raises(ValueError, match=r"starts has shape \(40, 1\) .* must be \(1, 40\)"):
        fairseq.build()(text(1, 40), starts=STARTS.t())
    with pytest.raises(ValueError, match="starts is given; in generation it must be None"):
        fairseq.build()(text(1, 40), starts=STARTS, incremental_state={})
    model = fairseq.build("--mixers delta:1,abc:2")
    wanted = r"separate_documents is set, .* in layers 2 \(abc\); it must not be set, .* of sum, gated, .*delta-product"
    with pytest.raises(ValueError, match=wanted) as raised:
        model(text(1, 40), starts=STARTS)
    assert "linformer" not in str(raised.value)
    for mixer in model.decoder.mixers:
        mixer.takes_starts = False  # as with a rule of one's own
    with pytest.raises(
        ValueError, match=r"layers 1 \(delta\); layers 2 \(abc\); .* of sum, (?!.* delta,).*delta-mao, "
    ):
        model.decoder.check_takes_starts()
