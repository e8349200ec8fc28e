"""A checkpoint loads into the model that it was made by, and into no other; tools keep its settings."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from fairseq_fastweights.models import checkpoint_settings
from tests.models.conftest import WORDS


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def assert_unchanged(model: Any, before: dict[str, torch.Tensor]) -> None:
    """NaN too: fairseq's sinusoidal positions have a buffer, `_float_tensor`, that nothing is ever written to."""
    torch.testing.assert_close(values(model), before, rtol=0, atol=0, equal_nan=True)


SUM, PRE_NORM, SOFTMAX = "--update-rule sum", "--decoder-normalize-before", "--softmax-attention-layers"
ALL, DPFP = f"{SOFTMAX} all", f"{SUM} --feature-map dpfp"
DIFFERENT = [
    ("--update-rule delta", f"{SUM} --normalization sum", r": mixers is 'delta' [^;]* 'sum' [^;]*$"),
    ("--feature-map elu", "--feature-map tanh", r"delta feature map is 'elu' .* 'tanh'"),
    ("--normalization none", "--normalization sum,attention", r"normalization is 'none' .* 'attention,sum'"),
    ("", "--scale-read-out", r"read-out scale is 1.0 .* 0.35"),
    (DPFP, f"{DPFP} --dpfp-nu 2", r"feature dim is 16 .* 32"),
    (DPFP, f"{DPFP} --dpfp-nu 2 --fast-weight-heads 4", r": sum fast weight heads is None in the .* and 4 in the"),
    (ALL, f"{ALL} --rotary-dim 4", r"rotary dim is None in the checkpoint and 4 in the model"),
    (PRE_NORM, f"{PRE_NORM} --parallel-residual", r"parallel residual is None .* True"),
    (SUM, ALL, r"mixers is 'sum' .* 'softmax'"),
    (f"{SUM} {SOFTMAX} 1", f"{SUM} {SOFTMAX} 2", r"mixers is \['softmax', 'sum'\] .* \['sum', 'softmax'\]"),
    ("--feature-dim 4", "--feature-dim 6", r"feature dim is 4 .* 6"),  # and other sizes
    # All settings that differ, of those that both models have.
    (
        "--feature-map elu --normalization sum",
        "--feature-map dpfp --normalization attention",
        r": delta feature dim is 8 [^;]*; delta feature map is [^;]*; delta normalization is 'sum' [^;]*$",
    ),
]


@pytest.mark.parametrize(("made_with", "flags", "named"), DIFFERENT)
def test_a_checkpoint_of_other_settings_is_refused_by_name(fairseq, made_with, flags, named):
    saved, model = fairseq.build(made_with), fairseq.build(flags, seed=1)
    before = values(model)
    with pytest.raises(ValueError, match=f"the checkpoint does not fit the model.*{named}"):
        model.load_state_dict(saved.state_dict())
    assert_unchanged(model, before)  # nothing was loaded before the difference was seen


def test_a_checkpoint_of_another_dictionary_is_refused_by_name(fairseq):
    for words, named in (
        (WORDS[:-1], "dictionary size is 44 in the checkpoint and 43 in the model"),
        ((*WORDS[:-2], WORDS[-1], WORDS[-2]), "dictionary digest is"),
        ((*WORDS[:-1], "other"), "dictionary digest is"),
    ):
        with pytest.raises(ValueError, match=named):
            fairseq.build(words=words).load_state_dict(fairseq.build().state_dict())


@pytest.mark.parametrize(
    ("made_with", "flags"),
    [
        *(
            (flags, flags)
            for flags in (
                f"{SUM} --feature-map favor",
                f"{SUM} --feature-map favor-schlag --favor-features 3",
                "--update-rule gated --feature-map relu --feature-dim 5",
                f"--update-rule decay --decoder-learned-pos {PRE_NORM}",
                "--adaptive-input --adaptive-input-cutoff 10,25 --adaptive-softmax-cutoff 10,25",
                "--fast-weight-heads 4 --softmax-attention-layers 2",
                f"{ALL} --rotary-dim 4 --parallel-residual {PRE_NORM}",
            )
        ),
        ("--normalization auto --feature-map auto", "--normalization sum --feature-map elu"),
        ("--softmax-attention-layers 2,1", ALL),
        ("--dropout 0.1", "--dropout 0.3 --fast-weight-backend reference"),
        # The head dim and the heads are that without.
        ("", "--feature-dim 8 --fast-weight-heads 2"),
        ("--feature-map favor --feature-dim 6", "--feature-map favor --favor-features 3"),
    ],
)
def test_a_checkpoint_loads_into_its_model_however_that_is_said(fairseq, text, made_with, flags):
    saved, model = fairseq.build(made_with), fairseq.build(flags, seed=1)
    expected = saved(text(2, 6))[0]
    assert not torch.allclose(model(text(2, 6))[0], expected, rtol=1e-5, atol=1e-5)
    model.load_state_dict(saved.state_dict(), strict=True)
    assert torch.allclose(model(text(2, 6))[0], expected, rtol=1e-5, atol=1e-5)  # backends round differently


def prune(fairseq, state_dict: dict[str, torch.Tensor], flags: str, kept: str):
    """A model that has loaded the layers `kept` of 4, as fairseq prunes for LayerDrop; numbers start at 0."""
    flags = f"--decoder-layers 4 {flags} --decoder-layers-to-keep {kept}"
    model = fairseq.build(flags, seed=1)
    model.load_state_dict(state_dict, model_cfg=fairseq.tiny("fast_weight_lm", flags))
    return model


@pytest.mark.parametrize(
    ("kept", "layers", "left", "flags"),
    [
        ("0,2", "2,4", ",", "--update-rule delta"),
        ("3,0,1", "1,2", "1,2", f"{SUM} --rotary-dim 4 --fast-weight-heads 4"),
        ("3,0,1", "all", "all", ""),
        ("0,1", "2,4", "2", f"{SUM} --rotary-dim 4 --fast-weight-heads 4"),
    ],
)
@torch.no_grad()
def test_pruned_layers_keep_their_kind(fairseq, text, kept, layers, left, flags):
    whole = fairseq.build(f"--decoder-layers 4 {flags} --softmax-attention-layers {layers}")
    pruned = prune(fairseq, whole.state_dict(), f"{flags} --softmax-attention-layers {layers}", kept)
    numbers = sorted(int(number) for number in kept.split(","))
    whole.decoder.layers = torch.nn.ModuleList([whole.decoder.layers[number] for number in numbers])
    assert torch.equal(pruned(text(2, 6))[0], whole(text(2, 6))[0])
    again = fairseq.build(f"--decoder-layers {len(numbers)} {flags} --softmax-attention-layers {left}", seed=2)
    again.load_state_dict(pruned.state_dict())
    assert torch.equal(again(text(2, 6))[0], pruned(text(2, 6))[0])


@torch.no_grad()
def test_pruned_layers_keep_the_places_of_their_norms(fairseq, text):
    flags = f"{PRE_NORM} --rms-norm-eps 0.01"
    whole = fairseq.build(f"--decoder-layers 4 {flags} --output-norm-layers 1,4")
    pruned = prune(fairseq, whole.state_dict(), f"{flags} --output-norm-layers 1,4", "1,3")
    again = fairseq.build(f"--decoder-layers 2 {flags} --output-norm-layers 2", seed=2)
    again.load_state_dict(pruned.state_dict())
    whole.decoder.layers = torch.nn.ModuleList([whole.decoder.layers[number] for number in (1, 3)])
    for model in (pruned, again):
        assert torch.equal(model(text(2, 6))[0], whole(text(2, 6))[0])


def test_a_checkpoint_of_other_settings_is_refused_where_layers_are_pruned(fairseq):
    for made_with, flags, named in (
        (f"{SOFTMAX} 1,4", f"{SOFTMAX} 3", r"mixers is \['softmax', 'delta'\].* 'softmax'"),
        (f"{SUM} --normalization none", f"{SUM} --normalization sum", "normalization is 'none'"),
        (f"--parallel-residual {PRE_NORM}", PRE_NORM, "parallel residual is True"),
        (f"--output-norm-layers 1 {PRE_NORM}", PRE_NORM, r"output norm layers is \[1\]"),
        (
            f"--zero-centered-norms --rms-norm-eps 1 {PRE_NORM}",
            f"--rms-norm-eps 1 {PRE_NORM}",
            "zero-centered norms is",
        ),
    ):
        saved = fairseq.build(f"--decoder-layers 4 {made_with}")
        before = values(saved)
        with pytest.raises(ValueError, match=named):
            prune(fairseq, saved.state_dict(), flags, "0,2")
        assert_unchanged(saved, before)


def test_transformers_checkpoints_carry_no_settings_and_load(fairseq, text):
    theirs = fairseq.build(arch="transformer_lm")
    ours = fairseq.build(ALL, seed=1)
    ours.load_state_dict(theirs.state_dict())
    assert torch.allclose(ours(text(2, 6))[0], theirs(text(2, 6))[0], rtol=1e-6, atol=1e-6)
    fairseq.build(ALL, seed=2).load_state_dict(ours.state_dict())
    fairseq.build(f"{SUM} --softmax-attention-layers 2").load_state_dict(theirs.state_dict())
    with pytest.raises(ValueError, match="mixers is 'softmax'"):
        fairseq.build(SUM).load_state_dict(ours.state_dict())
    for rule, missing in (("gated", "gate_proj"), ("delta", "beta_proj")):
        with pytest.raises(RuntimeError, match=rf"Missing key.*{missing}"):
            fairseq.build(f"--update-rule {rule}").load_state_dict(theirs.state_dict())


def test_settings_outlive_averages_half_types_and_moving_averages(fairseq):
    """fairseq's averages add whole numbers up and divide them; `--store-ema` multiplies all but versions."""
    model = fairseq.build()
    settings = model.half().state_dict()["decoder.settings_version"]
    assert torch.equal((settings + settings + settings) // 3, settings)
    assert checkpoint_settings.decode(settings)["mixers"] == "delta"


@pytest.mark.parametrize("codes", [[300], [91, 93], list(b"[" * 10**5), list(b"{"), [[1]], [0.5]])
def test_settings_that_are_none_are_named(codes):
    with pytest.raises(ValueError, match=r"^settings_version holds "):
        checkpoint_settings.decode(torch.tensor(codes))


@pytest.mark.parametrize(
    "settings",
    [
        *({"cross mixers": [["sum"]]}, {"mixers": 3}),
        *({"output norm layers": "1"}, {"mixers": ["sum", "softmax"]}),  # of two layers
    ],
)
def test_settings_of_other_kinds_are_named(settings):
    weights = {"decoder.settings_version": checkpoint_settings.encode(settings)}
    with pytest.raises(ValueError, match=r"^settings_version has "):
        checkpoint_settings.prune(weights, "decoder", [1, 3])
    weights = {"decoder.settings_version": checkpoint_settings.encode({"other": math.nan})}
    checkpoint_settings.prune(weights, "decoder", [1, 3])
