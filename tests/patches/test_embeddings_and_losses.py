"""The parts of a language model around its layers compute in fewer operators what they computed in more."""

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


def softmax() -> AdaptiveSoftmax:
    torch.manual_seed(0)
    return AdaptiveSoftmax(30, 8, [10, 20], 0.0, 1, adaptive_inputs=AdaptiveInput(30, PAD, 8, 1, 8, [10, 20]))


def test_the_first_band_of_many_words_is_one_product() -> None:
    head = softmax().head
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


def test_the_loss_is_the_sum_of_the_bands() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.decoder = torch.nn.Module()
            self.decoder.adaptive_softmax = softmax()

        def forward(self, x):
            return (x,)

        def get_targets(self, sample, _):
            return sample["target"]

    criterion = AdaptiveLoss.__new__(AdaptiveLoss)
    torch.nn.Module.__init__(criterion)
    criterion.padding_idx, criterion.sentence_avg = PAD, False
    model, x = Model(), torch.randn(1, 9, 8, requires_grad=True)
    for words in ([4, 5, 6, 7, 8, 9, 4, 5, PAD], [4, 12, 25, 7, 8, 29, 14, 5, PAD]):  # of one band, of all
        target = torch.tensor([words])
        loss, size, _ = criterion(model, {"net_input": {"x": x}, "target": target})
        bands = model.decoder.adaptive_softmax
        first = bands.head(x[0]).log_softmax(-1)
        tails = [tail(x[0]).log_softmax(-1) + first[:, 10 + i, None] for i, tail in enumerate(bands.tail)]
        scores = torch.cat([first[:, :10], *tails], dim=1)
        wanted = -scores.gather(1, target.t()).flatten()[target[0] != PAD].sum()
        assert loss.shape == (1,) and size == 8
        torch.testing.assert_close(loss[0], wanted)
        gradients = (torch.autograd.grad(sum_, x, retain_graph=True)[0] for sum_ in (loss, wanted))
        torch.testing.assert_close(*gradients)
