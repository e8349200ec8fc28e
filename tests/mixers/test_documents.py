"""Several documents in a row are as each by itself: of every mixer that takes `starts`."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fairseq_fastweights.mixers.fast_weight_attention import FastWeightAttention
from fairseq_fastweights.mixers.mixer import Mixer, State
from fairseq_fastweights.mixers.registry import MIXERS, build_mixer
from fairseq_fastweights.mixers.update_rules import UPDATE_RULES, parse_normalization
from fairseq_fastweights.ops import RULES, Rule
from tests.mixers.contract import FLOAT64, HALF, assert_gradients, draw, error, spread

WIDTH, ROWS = 8, 4
FLOAT32_ANGLES = 1e-7  # by which a text without documents is turned: some 50 positions, in float32
OPTIONS: dict[str, list[dict[str, object]]] = {
    "sum": [{}, {"normalization": "none", "feature_map": "tanh"}, {"normalization": "sum,attention"}],
    "gated": [{}, {"normalization": "attention", "feature_map": "elu"}],
    "decay": [{}, {"normalization": "sum,attention", "feature_map": "dpfp"}],
    "delta": [{}, {"normalization": "sum,attention"}, {"normalization": "attention,removal", "feature_map": "relu"}],
    "softmax": [{}, {"rotary_dim": 2}],
    "local": [{"local_window": n} for n in (1, 4, 50)],
    "window-sum": [{"window_sum_window": n} for n in (1, 4)] + [{"window_sum_window": 3, "rotary_dim": 2}],
    "transformer-xl": [
        {"transformer_xl_memory": 60},
        {"transformer_xl_memory": 3, "transformer_xl_clamp_len": 5, "transformer_xl_same_length": True},
        {"transformer_xl_memory": 0},
    ],
    "mamba": [{"mamba_state": 3}, {"mamba_conv": 1}],
    "delta-mao": [{}, {"normalization": "sum,attention"}],
    "gated-delta": [{}, {"gated_delta_conv": 2, "gated_delta_key_heads": 1}],
    "delta-product": [{"delta_product_writes": 3}],
}
CASES = [(name, options) for name, kind in MIXERS.items() if kind.takes_starts for options in OPTIONS.get(name, [{}])]
every_mixer = pytest.mark.parametrize(("name", "options"), CASES, ids=str)


def make(name: str, options: dict[str, object]) -> Mixer:
    torch.manual_seed(0)
    settings = {"num_heads": 2, "fast_weight_heads": 2, "bias": True, **options}
    if "normalization" in options:
        settings["normalization"] = parse_normalization(str(options["normalization"]))
    return spread(build_mixer(name, WIDTH, settings), 0.1)


def mark(time: int, *rows: list[int]) -> Tensor:
    """(batch, time), true at these steps, of those that there are."""
    marks = torch.zeros(len(rows), time, dtype=torch.bool)
    for row, steps in zip(marks, rows, strict=True):
        row[[t for t in steps if t < time]] = True
    return marks


def starts_of(time: int) -> Tensor:
    """Nowhere; at the first step and side by side; at the last step; where kernels and blocks have chunks."""
    return mark(time, [], [0, 2, 3, 4, 20, 37], [1, time - 1], [16, 31, 32, 35, 64])


def padding_of(time: int) -> Tensor:
    """Before, within and behind, at documents' edges too, and a row of nothing else."""
    return mark(time, [0, 1, time - 1], [1, 19, 21], list(range(time)), [17, 30, 33, *range(time - 3, time)])


def rows_of(state: State, row: int) -> State:
    return {name: x[row : row + 1] for name, x in state.items()}


def apart(mixer: Mixer, x: Tensor, state: State | None, padding: Tensor, starts: Tensor, row: int):
    """The outputs for a row's documents, each in a call of its own and without padding, and the last one's state."""
    outs, left = [x[:0, row]], None if state is None else rows_of(state, row)
    real = (~padding[row]).nonzero().flatten().tolist()
    begins = [i for i, t in enumerate(real) if starts[row, t]]
    for begin, end in zip([0, *begins], [*begins, len(real)], strict=True):
        if begin in begins:
            left = None
        if end > begin:
            out, left = mixer(x[real[begin:end], row : row + 1], left)
            outs.append(out[:, 0])
    if not real:  # a call that reads nothing, at which gradients of Transformer-XL's memory end
        left = mixer(x[:1, row : row + 1], left, padding[row : row + 1, :1])[1]
    return real, torch.cat(outs), left


@pytest.mark.parametrize("how", ["plain", "with a state", "with padding", "with both"])
@every_mixer
def test_documents_in_a_row_are_as_each_by_itself(name, options, how):
    """Outputs, the gradients of everything, and what the final state leads to."""
    mixer, more, state = make(name, options), draw(3, WIDTH, seed=4, batch=ROWS), None
    bound = FLOAT32_ANGLES if options.get("rotary_dim") else FLOAT64
    if how in ("with a state", "with both"):
        with torch.no_grad():
            state = mixer(draw(7, WIDTH, seed=3, batch=ROWS))[1]
        state = {n: s.requires_grad_() if s.is_floating_point() else s for n, s in state.items()}
    for time in (1, 6, 41, 70) if how == "plain" else (6, 41):
        starts = starts_of(time)
        padding = torch.zeros_like(starts)
        if how in ("with padding", "with both") and not options.get("rotary_dim"):  # for which padding has positions
            padding = padding_of(time)
        x = draw(time, WIDTH, batch=ROWS).requires_grad_()
        weights = draw(time + 3, WIDTH, seed=2, batch=ROWS)
        out, end = mixer(x, state, padding if padding.any() else None, starts=starts)
        if how == "plain" and time == 41 and options.get("transformer_xl_memory") != 0:  # then steps see but themselves
            left, steps = None, []
            for step, begins in zip(x.detach().split(1), starts.split(1, dim=1), strict=True):
                with torch.no_grad():
                    y, left = mixer(step, left, starts=begins, overwrite=True)
                steps.append(y)
            assert error(torch.cat(steps), out) <= bound
            low, rounded = make(name, options).bfloat16(), x.detach().bfloat16()
            y, _ = low(rounded, starts=starts)
            expected, _ = low.double()(rounded.double(), starts=starts)
            assert y.dtype == torch.bfloat16 and error(y, expected) <= HALF[torch.bfloat16]
        ours, theirs = torch.zeros(()), torch.zeros(())
        for row in range(ROWS):
            real, expected, left = apart(mixer, x, state, padding, starts, row)
            mine, its = (
                torch.cat([mixer(more[:, row : row + 1], last)[0][:, 0], y])
                for y, last in ((out[real, row], rows_of(end, row)), (expected, left))
            )
            assert error(mine, its) <= bound
            ours = ours + (mine * weights[: len(mine), row]).sum()
            theirs = theirs + (its * weights[: len(its), row]).sum()
        wanted = [x, *mixer.parameters(), *(s for s in (state or {}).values() if s.requires_grad)]
        grads = [torch.autograd.grad(y, wanted, allow_unused=True, materialize_grads=True) for y in (ours, theirs)]
        assert_gradients(*grads, bound)
        for of_state in grads[0][1 + len(list(mixer.parameters())) :] if not padding.any() else ():
            assert not of_state[1].any()  # the row whose first step starts a document


@pytest.mark.parametrize("name", ["sum", "softmax", "local", "mamba"])
def test_starts_that_are_none_are_refused(name):
    mixer, message = make(name, {}), r"starts has shape .* it must be \(2, 5\), \(batch, time\), of torch.bool"
    for starts in (torch.zeros(5, 2, dtype=torch.bool), torch.zeros(2, 5)):
        with pytest.raises(ValueError, match=message):
            mixer(draw(5, WIDTH, batch=2), starts=starts)


def test_mixers_say_whether_they_take_starts(monkeypatch):
    monkeypatch.setitem(UPDATE_RULES, "own", Rule("own", (), RULES["sum"].reference, feature_map="elu"))
    assert [FastWeightAttention(8, 2, update_rule=rule).takes_starts for rule in ("own", "sum")] == [False, True]


SOFTMAX = ("softmax", "local", "window-sum", "transformer-xl")  # which multiplies values by weights of 0


@pytest.mark.parametrize("backend", ["auto", "reference", "chunkwise"])
@pytest.mark.parametrize(("name", "options"), [case for case in CASES if case[0] not in SOFTMAX], ids=str)
def test_what_is_not_finite_stays_in_its_document(name, options, backend):
    mixer, x, starts = make(name, {**options, "backend": backend}), draw(30, WIDTH, batch=2), mark(30, [10, 20], [25])
    others = torch.ones(30, 2, dtype=torch.bool)
    others[10:20, 0] = others[:25, 1] = False
    outcomes = []
    for value in (0, float("nan")):
        given = x.masked_fill(~others[..., None], value).requires_grad_()
        out, state = mixer(given, starts=starts)
        loss = out[others].square().sum() + sum(kept.double().sum() for kept in state.values())
        (grad,) = torch.autograd.grad(loss, given)
        outcomes.append((out[others], grad[others], *state.values()))
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other)
