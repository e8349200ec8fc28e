"""Adaptive input and softmax in the form of Transformer-XL's program, which the models of Schlag et al. (2021) have."""

from __future__ import annotations

import pytest
import torch

BANDS = """--adaptive-input --adaptive-input-cutoff 10,25 --adaptive-softmax-cutoff 10,25 --adaptive-input-factor 1
    --adaptive-softmax-factor 1 --tie-adaptive-weights"""
ENDS = [0, 10, 25, 44]


@pytest.mark.parametrize("tied", ["", "--tie-adaptive-proj"])
@torch.no_grad()
def test_without_square_projections_all_bands_are_one_shared_table(fairseq, text, tied):
    """log p(w) = log_softmax over the first band's words and the other bands, plus one over the words of a band."""
    model = fairseq.build(f"{BANDS} {tied} --square-projections none --adaptive-softmax-bias").eval()
    decoder, tokens = model.decoder, text(2, 6)
    table = torch.cat([band[0].weight for band in decoder.embed_tokens.embeddings])
    torch.testing.assert_close(decoder.embed_tokens(tokens), table[tokens], rtol=0, atol=0)
    names = [name for name, x in model.named_parameters() if name.endswith("bias") and "softmax" in name]
    assert [decoder.get_parameter(name.removeprefix("decoder.")).numel() for name in names] == [10 + 2, 15, 19]
    biases = [decoder.get_parameter(name.removeprefix("decoder.")).normal_() for name in names]
    bias, of_bands = torch.cat([biases[0][:10], *biases[1:]]), biases[0][10:]
    h = model(tokens, features_only=True)[0]
    logits = h @ table.t() + bias
    first = torch.cat([logits[..., :10], h @ decoder.adaptive_softmax.head.class_proj.weight.t() + of_bands], -1)
    first = first.log_softmax(-1)
    others = [
        first[..., 10 + i, None] + logits[..., ENDS[i + 1] : ENDS[i + 2]].log_softmax(-1) for i in range(len(ENDS) - 2)
    ]
    expected = torch.cat([first[..., :10], *others], -1)
    torch.testing.assert_close(model.get_normalized_probs((h, None), log_probs=True), expected)
    # The sum that is trained, of targets in all bands.
    target = 4 + 3 * torch.arange(12).view(2, 6)
    scores, places = decoder.adaptive_softmax(h, target)
    loss = sum(torch.nn.functional.cross_entropy(x, y, reduction="sum") for x, y in zip(scores, places, strict=True))
    torch.testing.assert_close(loss, -expected.gather(-1, target[..., None]).sum())


def test_dropout_is_once_before_the_softmax_which_then_has_its_biases(fairseq, text):
    flags = f"{BANDS} --square-projections none --adaptive-softmax-bias --adaptive-softmax-dropout 1"
    softmax = fairseq.build(flags).train().decoder.adaptive_softmax
    biases = [x.data.normal_() for name, x in softmax.named_parameters() if name.endswith("bias")]
    scores, _ = softmax(torch.randn(1, 3, 16), torch.tensor([[4, 12, 30]]))
    assert all((x == bias).all() for x, bias in zip(scores, biases, strict=True))
    dropouts = [x.p for x in softmax.modules() if isinstance(x, torch.nn.Dropout)]
    assert dropouts == []


@pytest.mark.parametrize("std", ["", "--init-std 0.02"])
def test_square_projections_start_as_identity_and_keep_the_words_variance(fairseq, std):
    """Drawn from N(0, 0.02), a projection would leave words a 0.02 sqrt(16)-th of their size."""
    flags = f"{BANDS} --tie-adaptive-proj {std} --square-projections"
    kept, identity = (fairseq.build(f"{flags} {choice}").decoder for choice in ("keep", "identity"))
    eye = torch.eye(16)
    for decoder, same in ((kept, False), (identity, True)):
        squares = [band[1].weight for band in decoder.embed_tokens.embeddings]
        squares += [band[0].weight for band in decoder.adaptive_softmax.tail]
        assert all(torch.equal(weight, eye) == same for weight in squares)
    words = torch.arange(4, 44)
    assert torch.equal(
        identity.embed_tokens(words), torch.cat([b[0].weight for b in identity.embed_tokens.embeddings])[4:]
    )
    # Of other sizes they are drawn as before.
    other = fairseq.build(f"{BANDS.replace('factor 1', 'factor 2')} --square-projections identity").decoder.embed_tokens
    assert torch.equal(other.embeddings[0][1].weight, eye) and other.embeddings[1][1].weight.shape == (16, 8)
    none = fairseq.build(f"{BANDS.replace('factor 1', 'factor 2')} --square-projections none").decoder.embed_tokens
    assert not list(none.embeddings[0][1].parameters()) and none.embeddings[2][1].weight.shape == (16, 4)
