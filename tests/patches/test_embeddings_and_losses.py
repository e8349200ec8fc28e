"""The parts of a language model around its layers have fewer operators and the same results."""

from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from fairseq.criterions.adaptive_loss import AdaptiveLoss
from fairseq.modules import AdaptiveInput, AdaptiveSoftmax, SinusoidalPositionalEmbedding
from fairseq.utils import make_positions
from torch.profiler import ProfilerActivity, profile

pytestmark = pytest.mark.usefixtures("our_fairseq")
PAD = 1


def count(operator: str, call) -> int:
    with profile(activities=[ProfilerActivity.CPU]) as found:
        call()
    return sum(event.name == f"aten::{operator}" for event in found.events())


@pytest.mark.parametrize("length", [5, 9])  # longer than the table, too
def test_positions_without_padding_are_rows_that_follow_each_other(length: int) -> None:
    positions = SinusoidalPositionalEmbedding(8, PAD, init_size=8)
    words = torch.full((3, length), 7)
    padded = words.clone()
    padded[1, 0] = PAD
    for tokens in (words, padded, words):
        wanted = positions.get_embedding(20, 8, PAD)[make_positions(tokens, PAD)]
        assert torch.equal(positions(tokens), wanted)
    assert count("index_select", lambda: positions(words)) == 0
    assert positions.half()(words).dtype == torch.float16


def test_the_first_cluster_of_many_tokens_is_one_product() -> None:
    embed = AdaptiveInput(30, PAD, 8, 1, 8, [10, 20])
    head = AdaptiveSoftmax(30, 8, [10, 20], 0.0, 1, adaptive_inputs=embed).head
    for rows in (16, 15):  # twice the width, and fewer
        x = torch.randn(rows, 8, requires_grad=True)
        inputs = [x, head.word_proj.weight, head.class_proj.weight]
        wanted = torch.cat([head.word_proj(x), head.class_proj(x)], dim=1)
        weights = torch.randn_like(wanted)
        assert count("linear", lambda x=x: head(x)) == (1 if rows == 16 else 2)
        torch.testing.assert_close(head(x), wanted)
        torch.testing.assert_close(
            torch.autograd.grad(head(x), inputs, weights), torch.autograd.grad(wanted, inputs, weights)
        )


ENDS = [4, 6, 9, 12]
BATCHES = [[[0, 11, 4], [4, 1, 3]], [[8, 8, 8]]]


@pytest.mark.parametrize("tokens", [*BATCHES, [[0, 1, 3]], [[]]], ids=str)
def test_every_token_is_in_its_cluster(tokens):
    from fairseq.modules import clusters

    flat = torch.tensor(tokens, dtype=torch.long).view(-1)
    found, starts, joined = clusters.find(flat.view(len(tokens), -1), ENDS), [0, *ENDS[:-1]], []
    for number, (places, ids) in enumerate(zip(found.places, found.ids, strict=True)):
        inside = [i for i, token in enumerate(flat.tolist()) if starts[number] <= token < ENDS[number]]
        assert (places is None and ids is None and not inside) or (
            places.tolist() == inside and (ids + starts[number]).tolist() == flat[inside].tolist()
        )
        joined += inside
        assert all(found.heads[i] == (flat[i] if number == 0 else 3 + number) for i in inside)
    assert [joined[i] for i in found.back] == list(range(flat.numel()))
    with pytest.raises(ValueError, match="token ids range from 0 to 12; they must be from 0 to 11"):
        clusters.find(torch.tensor([0, 12]), ENDS)


@pytest.mark.parametrize("tokens", BATCHES, ids=str)
def test_adaptive_input_and_loss_are_those_of_every_token(tokens):
    tokens = torch.tensor(tokens, dtype=torch.long)
    torch.manual_seed(0)
    embed = AdaptiveInput(12, PAD, 8, 2, 8, ENDS[:-1])
    softmax = AdaptiveSoftmax(12, 8, ENDS[:-1], 0.0, factor=2, adaptive_inputs=embed, tie_proj=True)
    x = embed(tokens)
    for position, token in enumerate(tokens.view(-1).tolist()):
        cluster = next(i for i, end in enumerate(ENDS) if token < end)
        expected = embed.embeddings[cluster](torch.tensor(token - [0, *ENDS][cluster]))
        assert torch.allclose(x.view(-1, 8)[position], expected, atol=1e-6)
    model = Mock(decoder=SimpleNamespace(adaptive_softmax=softmax), return_value=(x,), get_targets=lambda *_: tokens)
    criterion = AdaptiveLoss(SimpleNamespace(target_dictionary=SimpleNamespace(pad=lambda: PAD)), False)
    loss, size, _ = criterion(model, {"net_input": {}, "target": tokens})
    wanted = torch.zeros(())
    for vector, token in zip(x.view(-1, 1, 8), tokens.view(-1).tolist(), strict=True):
        if token == PAD:
            continue
        cluster, head = next(i for i, end in enumerate(ENDS) if token < end), softmax.head(vector).log_softmax(-1)
        wanted = wanted - head[0, token if cluster == 0 else ENDS[0] + cluster - 1]
        if cluster:
            wanted = wanted - softmax.tail[cluster - 1](vector).log_softmax(-1)[0, token - ENDS[cluster - 1]]
    scores = softmax.get_log_prob(x, None).gather(-1, tokens[..., None]).squeeze(-1)
    torch.testing.assert_close(wanted, -scores[tokens != PAD].sum())
    assert loss.shape == (1,) and size == int((tokens != PAD).sum())
    torch.testing.assert_close(loss[0], wanted)
    leaves = list({*embed.parameters(), *softmax.parameters()})
    gradients = (
        torch.autograd.grad(y, leaves, retain_graph=True, allow_unused=True, materialize_grads=True)
        for y in (loss[0], wanted)
    )
    torch.testing.assert_close(*gradients)
