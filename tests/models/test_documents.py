"""A language model reads each document of a row as if it stood alone: what `starts` of the decoder's `forward` does."""

from __future__ import annotations

import itertools

import pytest
import torch

from fairseq_fastweights.mixers.registry import MIXERS
from tests.models.conftest import WORDS, Fairseq

MODELS = [f"--mixers {name}" for name, kind in MIXERS.items() if kind.takes_starts]
MODELS += ["--mixers delta,softmax:2 --rotary-dim 4"]
MODELS += ["--mixers mamba,local:2 --local-window 7 --parallel-residual --decoder-normalize-before"]
MODELS += [f"--mixers delta,softmax:2 {flags}" for flags in ("--decoder-learned-pos", "--layernorm-embedding")]
PAD, EOS = 1, 2
BEGINS = [0, 11, 12, 29, 40]
STARTS = torch.zeros(1, 40, dtype=torch.bool)
STARTS[0, BEGINS[:-1]] = True
ROUNDING = 2e-5
"""Of float32, where a document's place changes the order of sums."""


def trained(model) -> list[torch.Tensor]:
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


@pytest.mark.parametrize("flags", MODELS)
def test_nothing_passes_from_one_document_to_another(fairseq: Fairseq, flags):
    """Each word stands once: its embedding has a gradient from its own document, and none at all from others."""
    model = fairseq.build(flags)
    tokens = torch.arange(4, 4 + len(WORDS))[None]
    logits = model(tokens, starts=STARTS)[0]
    for begin, end in itertools.pairwise(BEGINS):
        target = logits[0, end - 1].square().sum()
        (gradient,) = torch.autograd.grad(target, model.decoder.embed_tokens.weight, retain_graph=True)
        touched = gradient[4:].abs().sum(dim=1) > 0
        assert touched[end - 1] and not touched[:begin].any() and not touched[end:].any()
        assert "local" in flags or touched[begin:end].all()


@pytest.mark.parametrize("flags", MODELS)
def test_documents_are_read_as_if_each_stood_alone(fairseq: Fairseq, text, flags):
    """With their positions, and padding behind one and before another; and so are the gradients of what they give."""
    model = fairseq.build(flags)
    tokens, starts = text(2, 40), torch.zeros(2, 40, dtype=torch.bool)
    tokens[0, 35:] = tokens[1, :3] = PAD
    starts[0, [0, 11, 12, 29]] = starts[1, [3, 20]] = True
    logits = model(tokens, starts=starts)[0]
    assert (model(tokens)[0] - logits)[0, 20].abs().max() > 1e-3  # what would be read otherwise
    packed = logits[~tokens.eq(PAD)].logsumexp(-1).sum()
    apart = torch.zeros(())
    for row, begin, end in ((0, 0, 11), (0, 11, 12), (0, 12, 29), (0, 29, 35), (1, 3, 20), (1, 20, 40)):
        alone = model(tokens[row : row + 1, begin:end])[0][0]
        torch.testing.assert_close(logits[row, begin:end], alone, rtol=ROUNDING, atol=ROUNDING)
        apart = apart + alone.logsumexp(-1).sum()
    for one, other in zip(*(torch.autograd.grad(loss, trained(model)) for loss in (packed, apart)), strict=True):
        assert (one - other).norm() <= ROUNDING * other.norm() + 1e-6


CARRIED = [name for name, kind in MIXERS.items() if kind.takes_starts and name != "softmax"]


@pytest.mark.parametrize("name", CARRIED)
def test_a_document_goes_on_in_the_next_segment_and_a_new_one_starts_empty(fairseq: Fairseq, text, name):
    model = fairseq.build(f"--mixers {name} --no-token-positional-embeddings")
    tokens, starts = text(2, 40), torch.zeros(2, 40, dtype=torch.bool)
    # The first document of row 0 ends at a segment's edge; both rows have one over two edges.
    starts[0, [8, 30]] = starts[1, [3, 5, 33]] = True
    with torch.no_grad():
        parts = []
        for first in range(0, 40, 8):
            part = slice(first, first + 8)
            options = {"continues": torch.full((2,), first > 0), "starts": starts[:, part]}
            parts.append(model(tokens[:, part], **options)[0])
        parts = torch.cat(parts, dim=1)
        for row, begins in enumerate(([0, 8, 30, 40], [0, 3, 5, 33, 40])):
            for begin, end in itertools.pairwise(begins):
                alone = model(tokens[row : row + 1, begin:end])[0][0]
                torch.testing.assert_close(parts[row, begin:end], alone, rtol=ROUNDING, atol=ROUNDING)


@pytest.mark.parametrize(
    "flags", ["--mixers delta,softmax:2", "--mixers mamba --parallel-residual --decoder-normalize-before"]
)
def test_activation_checkpointing_hands_starts_on(fairseq: Fairseq, text, flags):
    tokens, results = text(1, 40), []
    for more in ("", " --checkpoint-activations"):
        model = fairseq.build(flags + " --dropout 0" + more).train()
        logits = model(tokens, starts=STARTS)[0]
        logits.square().sum().backward()
        results.append([logits, *(p.grad for p in trained(model))])
    for one, other in zip(*results, strict=True):
        torch.testing.assert_close(one, other)


def test_layers_that_cannot_keep_documents_apart_are_named(fairseq: Fairseq, text):
    model = fairseq.build("--mixers delta:1,abc:2")
    wanted = (
        r"separate_documents is set, .* in layers 2 \(abc\); it must not be set, .* of sum, gated, .* delta-product"
    )
    with pytest.raises(ValueError, match=wanted) as raised:
        model(text(1, 40), starts=STARTS)
    assert "linformer" not in str(raised.value)
    for mixer in model.decoder.mixers:
        mixer.takes_starts = False  # as with a rule of one's own
    with pytest.raises(ValueError, match=r"layers 1 \(delta\); layers 2 \(abc\); .* of sum, gated, decay, retention, "):
        model.decoder.check_takes_starts()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"starts": STARTS.t()}, r"starts has shape \(40, 1\) .* must be \(1, 40\)"),
        ({"starts": STARTS, "incremental_state": {}}, "starts is given; in generation it must be None"),
    ],
)
def test_starts_that_cannot_be_are_refused(fairseq: Fairseq, text, options, message):
    with pytest.raises(ValueError, match=message):
        fairseq.build()(text(1, 40), **options)
