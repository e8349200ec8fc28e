"""Checkpoints of the translation model: parameters have the names of fairseq's Transformer, whose checkpoints of all
ages load; settings that no parameter shows are kept, and others are refused by name."""

from __future__ import annotations

import re
from functools import cache
from itertools import cycle
from typing import Any

import pytest
import torch

from fairseq_fastweights.mixers.update_rules import UPDATE_RULES
from tests.models.test_checkpoints import assert_unchanged, values
from tests.models.translation import FUSED, SUBSETS, WORDS, batch, build, sentences, shifted
from tests.ops.rules import relative_error


@cache
def fairseqs() -> Any:
    """fairseq's Transformer, whose weights are only read."""
    return build("transformer")


def output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch(sentences((5, 3))), prev_output_tokens=shifted(sentences((4, 6), seed=1)))[0]


MAPS = {"elu": [], "relu": ["feature_map.weight", "feature_map.bias"], "favor": ["feature_map.features"]}
GATES = {
    "sum": [],
    "gated": ["gate_proj.weight", "gate_proj.bias"],
    "decay": [f"{name}_decay_proj.{kind}" for name in ("key", "value") for kind in ("weight", "bias")],
    "delta": ["beta_proj.weight", "beta_proj.bias"],
    "retention": ["g_proj.weight", "g_proj.bias"],
}


@pytest.mark.parametrize(
    ("places", "rule", "feature_map"),
    list(zip([*SUBSETS, *[SUBSETS[0]] * 4], cycle([*UPDATE_RULES, "retention"]), cycle(MAPS), strict=False)),
)
def test_names_are_fairseqs_but_for_gates_maps_and_settings(places, rule, feature_map):
    theirs = fairseqs().state_dict()
    model = build(fast_weight_attention=places, update_rule=rule, feature_map=feature_map)
    ours = model.state_dict()
    new, gone = {"encoder.settings_version", "decoder.settings_version"}, set()
    for layer in (0, 1):
        if "encoder" in places:
            new |= {f"encoder.layers.{layer}.self_attn.{name}" for name in MAPS[feature_map]}
            gone |= {f"encoder.layers.{layer}.{name}" for name in FUSED}
        if "decoder" in places:
            new |= {f"decoder.layers.{layer}.self_attn.{name}" for name in (*GATES[rule], *MAPS[feature_map])}
        if "cross" in places:
            new |= {f"decoder.layers.{layer}.encoder_attn.{name}" for name in MAPS[feature_map]}
    assert set(ours) - set(theirs) == new
    assert set(theirs) - set(ours) == gone
    assert all(ours[name].shape == x.shape for name, x in theirs.items() if name in ours)
    # A checkpoint loads into its model, in which both have fairseq's fused kernel, which it switches on in loading.
    loaded = build(fast_weight_attention=places, update_rule=rule, feature_map=feature_map, seed=1)
    model.load_state_dict(ours)
    assert relative_error(output(loaded), output(model)) > 0.1
    loaded.load_state_dict(ours, strict=True)
    assert torch.equal(output(model), output(loaded))
    missing = new - {"encoder.settings_version", "decoder.settings_version"}
    if missing:  # in a checkpoint of fairseq's
        with pytest.raises(RuntimeError, match=rf"Missing key.*{re.escape(min(missing))}"):
            loaded.load_state_dict(theirs)


def as_of_2018(state: dict[str, torch.Tensor], version: float) -> dict[str, torch.Tensor]:
    """The same weights under the names that they had in fairseq until 2019."""
    old = {name: x for name, x in state.items() if name.split(".")[-1] not in FUSED}
    for name in list(old):
        path, _, last = name.rpartition(".q_proj.")
        if path:
            old[f"{path}.in_proj_{last}"] = torch.cat([old.pop(f"{path}.{kind}_proj.{last}") for kind in "qkv"])
    for side, names in (("encoder", ("self_attn", "final")), ("decoder", ("self_attn", "encoder_attn", "final"))):
        for layer in (0, 1):
            for number, norm in enumerate(names):
                for kind in ("weight", "bias"):
                    path = f"{side}.layers.{layer}"
                    old[f"{path}.layer_norms.{number}.{kind}"] = old.pop(f"{path}.{norm}_layer_norm.{kind}")
        old[f"{side}.version"] = torch.tensor([version])
        old[f"{side}.embed_positions.weights"] = torch.zeros(1026, 16)  # they were computed, and saved all the same
        old.pop(f"{side}.embed_positions._float_tensor")
    old["decoder.embed_out"] = old.pop("decoder.output_projection.weight")
    return old


@pytest.mark.parametrize(
    ("places", "form"), list(zip([*SUBSETS, SUBSETS[0]], cycle(["of today", "of 2018", "of 2019"]), strict=False))
)
def test_fairseqs_checkpoints_load(places, form):
    theirs = build("transformer")
    state = weights = theirs.state_dict()
    if form != "of today":
        state = as_of_2018(state, version={"of 2018": 1.0, "of 2019": 3.0}[form])
        assert not any(".q_proj." in name for name in state)
    ours = build(fast_weight_attention=places, seed=1)
    own = values(ours)
    ours.load_state_dict(state, strict=True)
    for name, x in ours.named_parameters():
        if name.split(".")[-1] not in FUSED:
            assert torch.equal(x, weights[name]), name
            assert not x.any() or name.endswith("norm.weight") or not torch.equal(x, own[name]), name
    # From there on it is a checkpoint of ours.
    build(fast_weight_attention=places, seed=2).load_state_dict(ours.state_dict())
    other = build(fast_weight_attention="none" if places != "none" else "cross")
    with pytest.raises(ValueError, match="the checkpoint does not fit the model"):
        other.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("places", [SUBSETS[0], "none"])
def test_shared_embeddings_of_2018_load(places):
    state = as_of_2018(build("transformer", share_all_embeddings=True).state_dict(), 3.0)
    state.pop("decoder.embed_out")  # it was the embedding, which had another name of its own already
    ours = build(fast_weight_attention=places, seed=1, share_all_embeddings=True)
    ours.load_state_dict(state, strict=True)
    assert torch.equal(ours.decoder.output_projection.weight, state["encoder.embed_tokens.weight"])


def test_other_layers_are_not_dropped_in_silence():
    with pytest.raises(RuntimeError, match=r"Unexpected key.*encoder\.layers\.2\."):
        build().load_state_dict(build("transformer", encoder_layers=3).state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*encoder\.layers\.0\.more"):
        build().load_state_dict({**build().state_dict(), "encoder.layers.0.more": torch.zeros(1)})


# What a checkpoint was made with, what loads it, and what has to be named. What all attention has in common is named
# for the encoder, whose settings are looked at first.
DECODER = {"fast_weight_attention": "decoder,cross"}
NONE = {"fast_weight_attention": "none"}
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"update_rule": "delta"}, {}, "decoder mixers is 'delta' in the checkpoint and 'sum' in the model$"),
    # With the same parameters, of the same sizes: nothing else would notice.
    ({"feature_map": "elu"}, {"feature_map": "tanh"}, "encoder sum feature map is 'elu' .* 'tanh'"),
    ({"normalization": "sum"}, {"normalization": "none"}, "decoder sum normalization is 'sum' .* 'none'"),
    ({}, {"scale_read_out": True}, "encoder sum read-out scale is 1.0 .* 0.35"),
    (DECODER, {"scale_read_out": True, **DECODER}, "cross sum read-out scale is 1.0.*decoder sum read-out scale is 1"),
    # Of other sizes.
    ({"feature_map": "dpfp"}, {"feature_map": "dpfp", "dpfp_nu": 2}, "encoder sum feature dim is 16 .* 32"),
    ({"feature_dim": 4, **DECODER}, {"feature_dim": 6, **DECODER}, "cross sum feature dim is 4 .*decoder sum feature "),
    # Softmax attention has q, k, v and out as the sum rule has.
    ({}, DECODER, "encoder mixers is 'sum' in the checkpoint and 'softmax' in the model"),
    ({}, {"fast_weight_attention": "encoder,cross"}, "decoder mixers is 'sum' .* 'softmax'"),
    ({}, {"fast_weight_attention": "encoder,decoder"}, "cross mixers is 'sum' .* 'softmax'"),
    (NONE, {}, "encoder mixers is 'softmax' .* 'sum'"),
    (NONE, DECODER, "cross mixers is 'softmax' .* 'sum'.*decoder mixers is 'softmax' .* 'sum'"),
]


@pytest.mark.parametrize(("made_with", "options", "named"), DIFFERENT)
def test_a_checkpoint_of_other_settings_is_refused_by_name(made_with, options, named):
    saved, model = build(**made_with), build(**options, seed=1)
    before = values(model)
    with pytest.raises(ValueError, match=f"^the checkpoint does not fit the model: .*{named}"):
        model.load_state_dict(saved.state_dict())
    assert_unchanged(model, before)  # nothing was loaded before the difference was seen


@pytest.mark.parametrize("side", ["source", "target"])
def test_a_checkpoint_of_another_dictionary_is_refused_by_name(side):
    words = ("other", *WORDS[1:])
    with pytest.raises(ValueError, match=f"{side} dictionary digest is"):
        build(**{"source": WORDS, "target": WORDS, side: words}).load_state_dict(build(target=WORDS).state_dict())
