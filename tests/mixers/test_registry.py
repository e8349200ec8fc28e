"""Mixers are made by name, patterns say which layer has which, and all of them keep what `Mixer` promises."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
import torch

from fairseq_fastweights.mixers.mixer import Mixer, Option
from fairseq_fastweights.mixers.registry import MIXERS, SOURCE_MIXERS, Kind, build_mixer, option_name, parse_pattern
from tests.conftest import ROOT

WIDTH, TIME, BATCH = 16, 9, 3
HEADS = {"num_heads": 4, "fast_weight_heads": 2, "max_positions": 24}
MEMORIES = ("sum", "gated", "decay", "delta", "retention")

# Rounding of float32 (6e-8) over some dozens of operations, as the norm of the difference over the norm.
FLOAT32 = 1e-5


def build(name: str, **settings) -> Mixer:
    torch.manual_seed(0)
    return build_mixer(name, WIDTH, {**HEADS, **settings}).eval()


def draw(time: int = TIME, batch: int = BATCH, seed: int = 1) -> torch.Tensor:
    return torch.randn(time, batch, WIDTH, generator=torch.Generator().manual_seed(seed))


def error(actual: torch.Tensor, expected: torch.Tensor) -> float:
    assert actual.shape == expected.shape
    return ((actual - expected).norm() / expected.norm()).item()


# ----------------------------------------------------------------------------------- patterns


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("delta", "delta delta delta delta"),
        ("delta:1-3,softmax:4", "delta delta delta softmax"),
        ("delta,softmax:2,4", "delta softmax delta softmax"),
        ("softmax:2,4,delta", "delta softmax delta softmax"),
        ("softmax:1,3-4,retention:2", "softmax retention softmax softmax"),
        ("delta:1,softmax:2-3,delta:4", "delta softmax softmax delta"),
        ("sum,gated:2-2,decay:3", "sum gated decay sum"),
        (" delta: 1-3 , softmax:4 ", "delta delta delta softmax"),
        ("delta ,softmax: 2 , 4", "delta softmax delta softmax"),
    ],
)
def test_patterns_are_read(text, expected):
    assert parse_pattern(text, 4) == tuple(expected.split())


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "in which '' names no layers"),
        ("hebb", "in which 'hebb' is no mixer"),
        ("delta:1-3,hebb:4", "in which 'hebb' is no mixer"),
        ("Delta", "in which 'Delta' names no layers"),
        ("delta:1-2", "which leaves layers without a mixer: 3, 4"),
        ("delta:2,softmax:4", "which leaves layers without a mixer: 1, 3"),
        ("delta:1-3,softmax:3-4", "which gives layer 3 both 'delta' and 'softmax'"),
        ("delta,softmax:2,softmax:2", "which gives layer 2 both 'softmax' and 'softmax'"),
        ("delta,softmax", "in which both 'delta' and 'softmax' have the layers that are left"),
        ("delta,softmax:5", "in which '5' is not within 1 to 4"),
        ("delta,softmax:0", "in which '0' is not within 1 to 4"),
        ("delta,softmax:3-5", "in which '3-5' is not within 1 to 4"),
        ("delta,softmax:3-2", "in which '3-2' is not within 1 to 4"),
        ("1-2", "in which '1-2' names no layers"),
        ("delta,2", "in which '2' names no layers"),
        ("delta:", "in which 'delta:' names no layers"),
        ("delta,softmax:2-", "in which '2-' names no layers"),
        ("delta,,softmax:2", "in which '' names no layers"),
    ],
)
def test_other_patterns_are_refused_with_the_reason(text, why):
    with pytest.raises(ValueError) as raised:
        parse_pattern(text, 4)
    assert str(raised.value) == (
        f"mixers is {text!r}, {why}; it must be comma-separated names, each with its layers from 1 to 4, as in "
        f"'delta:1-4' or 'delta,softmax:4'. The names are {', '.join(MIXERS)}"
    )


# ------------------------------------------------------------------------------------ building


def other(row: Option):
    """A value that an option has not by default."""
    return {int: row.default + 2, float: row.default + 2, bool: not row.default}[row.type]


@pytest.mark.parametrize("name", MIXERS)
def test_every_mixer_is_made_by_its_name_and_its_options_reach_it(name):
    kind = MIXERS[name]
    # A divisor of the heads, which that is by itself.
    others = {option: 1 if option == "key_heads" else other(row) for option, row in kind.options.items()}
    settings = {option_name(name, option): value for option, value in others.items()}
    mixer, default = build_mixer(name, 16, {**HEADS, **settings}), build_mixer(name, 16, HEADS)
    assert mixer.num_heads == {None: 1, **HEADS}[kind.heads]
    for option, value in others.items():
        assert getattr(mixer, option) == value != getattr(default, option), option


def test_settings_reach_the_mixers_that_take_them():
    shared = {"dropout": 0.25, "feature_map": "elu", "feature_dim": 6, "scale_read_out": True, "bias": False}
    for name in MEMORIES:
        mixer = build(name, **shared, normalization=frozenset(), backend="reference", rotary_dim=2, source_dim=24)
        assert mixer.num_heads == 2 and mixer.scale == 8**-0.5 and mixer.backend == "reference"
        assert mixer.feature_map_name == "elu" and mixer.feature_map.output_dim == 6
        assert mixer.q_proj.bias is None and not mixer.normalization and mixer.dropout_module.p == 0.25
        assert getattr(mixer, "update_rule", "retention") == name
    softmax = build("softmax", **shared, rotary_dim=2, rotary_base=500.0)
    assert (softmax.num_heads, softmax.rotary_dim, softmax.rotary_base) == (4, 2, 500.0)
    assert build("sum", feature_map="dpfp", dpfp_nu=2).feature_map.output_dim == 32
    assert build("sum", feature_map="favor", favor_features=5).feature_map.output_dim == 10


def test_a_source_is_read_by_what_needs_no_order():
    assert list(SOURCE_MIXERS) == ["sum"]
    settings = {**HEADS, "feature_dim": 6, "source_dim": 24, "dropout": 0.25, "scale_read_out": True}
    mixer = build_mixer("sum", WIDTH, settings, SOURCE_MIXERS)
    out, state = mixer(draw(), source=torch.randn(5, BATCH, 24))
    assert out.shape == (TIME, BATCH, WIDTH) and state["state"].shape == (BATCH, 4, 6, 4)
    assert mixer.dropout_module.p == 0.25 and mixer.scale == 0.5


class Summary(Mixer):
    """With an option of its own, and no heads."""

    options = {"size": Option(int, 3, "how much it keeps")}

    def __init__(self, embed_dim: int, *, kept: str, size: int = 3) -> None:
        super().__init__(embed_dim)
        self.size, self.kept = size, kept


def test_a_mixers_own_options_have_its_name():
    kinds = {"running-mean": Kind(partial(Summary, kept="mean"), (), heads=None)}
    assert kinds["running-mean"].options == Summary.options
    for settings, size in (({}, 3), ({"running_mean_size": 5, "size": 7, "num_heads": 2}, 5)):
        mixer = build_mixer("running-mean", WIDTH, settings, kinds)
        assert (mixer.size, mixer.num_heads, mixer.settings()) == (size, 1, {"size": size})


@pytest.mark.parametrize("kinds", [MIXERS, SOURCE_MIXERS])
def test_unknown_names_are_refused(kinds):
    with pytest.raises(ValueError, match=f"^mixers is 'hebb'; it must be one of {', '.join(kinds)}$"):
        build_mixer("hebb", WIDTH, HEADS, kinds)


# ------------------------------------------------------------------------- what all promise


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_a_state_is_a_value_unless_it_may_be_overwritten(name, padded):
    mixer, x = build(name), draw()
    padding = torch.zeros(BATCH, TIME, dtype=torch.bool)
    if padded:
        padding[0, :2] = padding[1, 6:] = True
    real = ~padding.t()
    whole, end = mixer(x, padding=padding if padded else None)
    states = []
    for overwrite in (False, True):
        outputs, state = [], None
        for piece, mask in zip(x.split([4, 1, 4]), padding.split([4, 1, 4], dim=1), strict=True):
            before, kept = state, {n: value.clone() for n, value in (state or {}).items()}
            out, state = mixer(piece, state, mask if padded else None, overwrite=overwrite)
            outputs.append(out)
            if before is not None and not overwrite:
                assert all(torch.equal(value, kept[n]) for n, value in before.items())
        assert all(len(value) == BATCH for value in state.values())
        assert error(torch.cat(outputs)[real], whole[real]) <= FLOAT32
        states.append(state)
    assert all(torch.equal(value, states[1][n]) for n, value in states[0].items()), name
    assert {n: value.shape for n, value in states[0].items()} == {n: value.shape for n, value in end.items()}


@pytest.mark.parametrize("name", MIXERS)
@torch.no_grad()
def test_rows_can_be_taken_in_any_order(name):
    mixer, x = build(name), draw()
    _, state = mixer(x[:5])
    assert mixer.reorder(state, torch.arange(BATCH)) is state
    for order in ([2, 0, 1], [1, 1, 1], [2, 0], [0, 0, 1, 1, 2, 2]):
        after = draw(4, len(order), seed=2)
        out, _ = mixer(after, mixer.reorder(state, torch.tensor(order)))
        assert error(out, mixer(torch.cat([x[:5, order], after]))[0][5:]) <= FLOAT32


@pytest.mark.parametrize("name", [name for name in MIXERS if build(name).carries])
def test_a_row_of_zeros_is_the_state_before_the_first_step(name):
    mixer, x = build(name), draw()
    _, state = mixer(draw(seed=2))
    state = {n: value.index_fill(0, torch.tensor([1]), 0) for n, value in state.items()}
    assert error(mixer(x, state)[0][:, 1], mixer(x)[0][:, 1]) <= FLOAT32


@pytest.mark.parametrize("shape", [(0, 2), (3, 0)], ids=["no-steps", "no-rows"])
@pytest.mark.parametrize("name", MIXERS)
def test_nothing_comes_of_nothing(name, shape):
    mixer = build(name)
    out, state = mixer(torch.zeros(*shape, WIDTH))
    assert out.shape == (*shape, WIDTH)
    assert mixer(torch.zeros(1, shape[1], WIDTH), state)[0].shape == (1, shape[1], WIDTH)


@pytest.mark.parametrize("name", MIXERS)
def test_states_that_are_carried_have_one_size(name):
    mixer = build(name)
    _, state = mixer(draw())
    _, longer = mixer(draw(), state)
    grows = any(value.shape != longer[n].shape for n, value in state.items())
    assert (name == "softmax") == grows and not (grows and mixer.carries)
    assert (name in ("softmax", "linformer")) == mixer.bounded == (not mixer.carries)


@pytest.mark.slow
def test_mixers_need_torch_alone():
    code = "import sys, fairseq_fastweights.mixers.registry; sys.exit('fairseq' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0
