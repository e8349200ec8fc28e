"""The promises of `Mixer`, for every mixer: parts, padding, states, types. Each mixer's own test has its equations."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fairseq_fastweights.mixers.mixer import Mixer
from fairseq_fastweights.mixers.registry import MIXERS, build_mixer
from tests.mixers import contract

WIDTH, TIME = 16, 13
SHARED = {"num_heads": 4, "fast_weight_heads": 2, "max_positions": 40}


def memory(rule: str, feature_map: str, *normalization: str, **sizes: Any) -> tuple[str, dict[str, Any]]:
    return rule, {"feature_map": feature_map, "normalization": frozenset(normalization), **sizes}


OPTIONS = [
    memory("sum", "identity"),
    memory("gated", "dpfp", "attention"),
    memory("sum", "relu", "sum", "attention"),
    memory("decay", "elu", "attention"),
    memory("delta", "dpfp", "sum", "attention"),
    memory("delta", "favor", "sum", "removal"),
    memory("delta", "relu", "sum", "attention", "removal"),
    memory("delta", "elu", "attention", "removal"),
    memory("delta-mao", "dpfp", "sum", "attention", "removal"),
    memory("retention", "elu", feature_dim=6),
    memory("retention", "identity", feature_dim=4, retention_value_dim=6, retention_rms_norm=True),
    ("softmax", {"rotary_dim": 4}),
    ("local", {"local_window": 3}),
    *(("window-sum", {"window_sum_window": window, "rotary_dim": dim}) for window, dim in ((1, 0), (5, 2))),
    ("window-sum", {"window_sum_window": 3, "feature_map": "elu", "normalization": frozenset({"attention"})}),
    *((name, {f"{name}_slots": 1}) for name in ("linformer", "abc")),
    ("transformer-xl", {"transformer_xl_memory": 16}),
    ("transformer-xl", {"transformer_xl_memory": 4, "transformer_xl_same_length": True}),
    *(("mamba", options) for options in ({"mamba_conv": 1, "mamba_state": 1}, {"mamba_conv": 7, "mamba_bias": True})),
    ("gated-delta", {"gated_delta_key_heads": 1, "gated_delta_bias": True, "gated_delta_negative_eigenvalues": True}),
    ("gated-delta", {"gated_delta_kv_heads": 1, "gated_delta_gate_rank": 2}),
    ("kimi-delta", {"kimi_delta_conv": 1}),
    ("kimi-delta", {"kimi_delta_key_heads": 1, "kimi_delta_key_dim": 6}),
    ("delta-product", {"delta_product_key_heads": 1, "delta_product_value_dim": 5}),
    ("delta-product", {"delta_product_writes": 3, "delta_product_negative_eigenvalues": True}),
    ("delta-net", {"delta_net_gate": True, "delta_net_negative_eigenvalues": True}),
    ("gla", {"gla_key_dim": 3, "gla_value_dim": 5, "gla_rank": 2}),
]
CASES = [*((name, {}) for name in MIXERS), *OPTIONS]
STATELESS = [  # keeps nothing of a text
    ("local", {"local_window": 1}),
    ("transformer-xl", {"transformer_xl_memory": 0, "transformer_xl_same_length": True}),
]
GROWING = ("softmax",)
SET_ASIDE = (
    "mamba",
    "gated-delta",
    "kimi-delta",
    "delta-product",
    "delta-net",
)  # which never read what stands at padding
# What a rule of `ops` computes of a state, by mixer; "state" where nothing is said.
MEMORIES = {
    **dict.fromkeys(("abc", "linformer"), ("keys", "values")),
    **dict.fromkeys(("gated-delta", "kimi-delta", "delta-product", "delta-net"), ("memory",)),
    **dict.fromkeys(("softmax", "local", "transformer-xl"), ()),
    "mamba": ("scan",),
}


cases = pytest.mark.parametrize(("name", "settings"), CASES)


def build(name: str, settings: dict[str, Any], **others: Any) -> Mixer:
    torch.manual_seed(0)
    return contract.spread(build_mixer(name, WIDTH, {**SHARED, **settings, **others}))


def draw(time: int = TIME, seed: int = 1) -> Tensor:
    return contract.draw(time, WIDTH, seed)


@pytest.mark.parametrize("name", MIXERS)
def test_an_input_of_another_shape_and_a_state_that_is_none_are_named(name):
    mixer = build_mixer(name, WIDTH, SHARED)
    first = build_mixer(name, WIDTH, {**SHARED, "batch_first": True})
    for shape in ((TIME, 2, WIDTH + 1), (TIME, WIDTH)):
        for layer, order in ((mixer, "time, batch"), (first, "batch, time")):
            with pytest.raises(ValueError, match=rf"x has shape \({TIME}, .*; it must be \({order}, embed_dim = 16\)"):
                layer(torch.zeros(shape))
    with pytest.raises(ValueError, match="state is a Tensor; it must be None or the dict that a call returned"):
        mixer(torch.zeros(TIME, 2, WIDTH), torch.zeros(2, 4))


@pytest.mark.parametrize(("name", "settings"), [*CASES, *STATELESS])
def test_parts_give_what_the_whole_gives_and_padding_takes_no_place(name, settings):
    mixer, x = build(name, settings), draw()
    for padding in contract.paddings(TIME).values():
        contract.check_parts(mixer, x, padding)
        if padding is not None:  # in which large numbers stand, or none, so that a trace of them would be seen
            given = x.masked_fill(padding.t()[..., None], torch.nan if name in SET_ASIDE else 50.0)
            contract.check_definition(mixer, contract.alone, given, padding)


@cases
def test_batch_first_is_a_transposed_input_and_output(name, settings):
    mixer, first, x = build(name, settings), build(name, settings, batch_first=True), draw()
    padding, starts = contract.paddings(TIME)["within"], None
    if mixer.takes_starts:
        starts = torch.zeros_like(padding)
        starts[0, 4] = starts[1, 9] = True
    results = []
    for layer, flip in ((mixer, False), (first, True)):
        parameters, state, outs = list(layer.parameters()), None, []
        rows = x.transpose(0, 1).contiguous().requires_grad_() if flip else x.clone().requires_grad_()
        for part in (slice(0, 7), slice(7, 8), slice(8, TIME)):
            given = rows[:, part] if flip else rows[part]
            masks = (
                (None, None) if part.stop == 8 else (padding[:, part], starts if starts is None else starts[:, part])
            )
            out, state = layer(given, state, masks[0], starts=masks[1])
            assert out.shape == given.shape
            outs.append(out.transpose(0, 1) if flip else out)
        real = torch.cat(outs)[~padding.t()]
        grads = torch.autograd.grad(real.square().sum(), [rows, *parameters])
        grads = [grads[0].transpose(0, 1) if flip else grads[0], *grads[1:]]
        with torch.no_grad():  # a decode step in place
            step = x[:1].transpose(0, 1) if flip else x[:1]
            last, state = layer(step, {n: s.detach().clone() for n, s in state.items()}, overwrite=True)
        results.append([real, *grads, last.transpose(0, 1) if flip else last, *state.values()])
    for plain, flipped in zip(*results, strict=True):
        assert torch.equal(plain, flipped)


@pytest.mark.parametrize("name", ["gated-delta", "delta", "softmax"])
def test_batch_first_is_compiled_without_a_break(name):
    layer, x = build(name, {}, batch_first=True), draw().transpose(0, 1)
    mask = contract.paddings(TIME)["within"]
    compiled, state = torch.compile(layer, backend="eager", fullgraph=True), None
    with torch.no_grad():
        for time in (TIME, 1):
            given = {"state": state} if state else {"padding": mask, "starts": mask}
            (out, after), (expected, state) = compiled(x[:, :time], **given), layer(x[:, :time], **given)
            for found, wanted in zip(
                (out[~mask[:, :time]], *after.values()), (expected[~mask[:, :time]], *state.values()), strict=True
            ):
                assert contract.error(found.double(), wanted.double()) <= contract.FLOAT64


@pytest.mark.parametrize("name", MIXERS)
def test_exchanged_time_and_batch_are_named_with_the_cure(name):
    layer, first = (build_mixer(name, WIDTH, {**SHARED, "batch_first": given}) for given in (False, True))
    mask = torch.zeros(2, TIME, dtype=torch.bool)
    for mixer, time_first, cure in ((layer, True, True), (first, False, False)):
        text = torch.zeros(TIME, 2, WIDTH) if time_first else torch.zeros(2, TIME, WIDTH)
        _, state = mixer(text, None, mask, starts=mask if mixer.takes_starts else None)
        swapped = text.transpose(0, 1)
        reads = ("time, batch", "batch, time") if time_first else ("batch, time", "time, batch")
        end = (
            rf"x has shape \({swapped.shape[0]}, {swapped.shape[1]}, 16\), read as \({reads[0]}, embed_dim\); if it is "
            rf"\({reads[1]}, embed_dim\), give the layer batch_first={cure}$"
        )
        where = next(iter(state))
        with pytest.raises(ValueError, match=rf"state\['{where}'\] has shape \(2, .* a batch of {TIME}, .*{end}"):
            mixer(swapped, state)
        arguments = ["padding", "starts"] if mixer.takes_starts else ["padding"]
        for argument in arguments:
            what = (
                rf"^{argument} has shape \(2, {TIME}\) and dtype torch.bool; it must be \({TIME}, 2\), \(batch, time\)"
            )
            with pytest.raises(ValueError, match=what + f".*{end}"):
                mixer(swapped, **{argument: mask})
        with pytest.raises(ValueError, match=r"^padding has .* dtype torch.uint8; it must be .* of torch.bool"):
            mixer(text, None, mask.byte())


@pytest.mark.parametrize("name", ["retention", "mamba", "kimi-delta", "delta-product", "delta-net"])
def test_an_empty_state_is_that_of_the_start_even_if_overwritten(name):
    mixer = build(name, {})
    for time in (1, 5):
        with torch.no_grad():
            assert torch.equal(mixer(draw(time), {}, overwrite=True)[0], mixer(draw(time))[0])


@cases
def test_states_are_values_with_rows(name, settings):
    mixer, x = build(name, settings), draw(9)
    contract.check_state(mixer, x, starts_at_zero=name not in GROWING)
    if name != "transformer-xl":  # whose gradients end at its memory
        contract.check_gradients_through_the_state(mixer, x)
    ends = [mixer(draw(time))[1] for time in (1, 5, 30)]
    grows = len({tuple(tensor.shape for tensor in end.values()) for end in ends}) > 1
    assert grows == (name in GROWING) and mixer.carries == (not mixer.bounded)
    with torch.no_grad():  # a memory is overwritten where it lies, if that is said
        before, step = mixer(x[:2])[1], x[2:3]
        (again, after), kept = mixer(step, before), {n: tensor.data_ptr() for n, tensor in before.items()}
        same, state = mixer(step, before, overwrite=True)
        assert torch.equal(same, again) and all(torch.equal(state[n], after[n]) for n in after)
        for n in MEMORIES.get(name, ("state",)):
            assert state[n].data_ptr() == kept[n] != after[n].data_ptr()
    if name not in GROWING:  # nor does it keep the text alive that it was taken from
        assert len({tuple(tensor.untyped_storage().nbytes() for tensor in end.values()) for end in ends}) == 1


@cases
def test_no_output_depends_on_a_later_input_and_nothing_comes_of_nothing(name, settings):
    mixer, x, other = build(name, settings), draw(), draw(seed=4)
    out, changed = mixer(x)[0], mixer(torch.cat([x[:6], other[6:]]))[0]
    assert contract.error(changed[:6], out[:6]) <= contract.FLOAT64 and contract.error(changed[6:], out[6:]) > 0.1
    for time, batch in ((0, 2), (3, 0)):
        out, state = mixer(x.new_zeros(time, batch, WIDTH))
        assert out.shape == (time, batch, WIDTH)
        assert mixer(x.new_zeros(1, batch, WIDTH), state)[0].shape == (1, batch, WIDTH)


@cases
def test_types_autocast_and_meta(name, settings):
    for dtype in contract.HALF:
        contract.check_half(build(name, settings), contract.alone, draw(), dtype)
        _, low = build(name, settings).to(dtype)(draw().to(dtype))
        assert all(low[n].dtype == torch.float32 for n in MEMORIES.get(name, ("state",)))
    mixer, x = build(name, settings).float(), draw().float()
    expected, _ = contract.in_parts(mixer, x, [8, 5], None)
    assert contract.error(expected, build(name, settings)(draw())[0]) <= 1e-5
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, low = contract.in_parts(mixer, x, [8, 5], None)
    assert contract.error(out.float(), expected) <= 2 * contract.HALF[torch.bfloat16]  # weights are rounded too
    grads = torch.autograd.grad(out.float().square().mean(), list(mixer.parameters()))
    assert all(grad.isfinite().all() for grad in grads)
    assert all(low[n].dtype == torch.float32 for n in MEMORIES.get(name, ("state",)))
    mixer, x = mixer.to("meta"), x.to("meta")
    out, state = contract.in_parts(mixer, x, [1, 12], None)
    assert out.is_meta and out.shape == x.shape and all(tensor.is_meta for tensor in state.values())
    assert all(grad.is_meta for grad in torch.autograd.grad(out.sum(), list(mixer.parameters())))


@pytest.mark.parametrize("name", [name for name, kind in MIXERS.items() if "dropout" in kind.shared])
def test_dropout_is_of_training_only(name):
    plain, dropping, x = build(name, {}), build(name, {}, dropout=0.5), draw()
    assert torch.equal(dropping(x)[0], plain(x)[0])
    dropping.train()
    assert not torch.equal(dropping(x)[0], dropping(x)[0])
