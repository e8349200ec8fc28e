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
from tests.models.translation import (
    FUSED,
    SUBSETS,
    batch,
    build,
    relative_error,
    sentences,
    shifted,
)

SAME = 1e-6


@cache
def fairseqs() -> Any:
    """fairseq's Transformer, whose weights are only read."""
    return build("transformer")


def output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch(sentences((5, 3))), prev_output_tokens=shifted(sentences((4, 6), seed=1)))[0]


# -------------------------------------------------------------------------------------- names

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
    zip([*SUBSETS, *[SUBSETS[0]] * 7], cycle(UPDATE_RULES), cycle(MAPS), strict=False),
)
def test_names_are_fairseqs_but_for_gates_maps_and_settings(places, rule, feature_map):
    theirs = fairseqs().state_dict()
    ours = build(fast_weight_attention=places, update_rule=rule, feature_map=feature_map).state_dict()
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


# ----------------------------------------------------------------------- fairseq's checkpoints


def as_of_2018(state: dict[str, torch.Tensor], version: float) -> dict[str, torch.Tensor]:
    """The same weights under the names that they had in fairseq until 2019."""
    old = {name: x for name, x in state.items() if name.split(".")[-1] not in FUSED}
    for name in list(old):
        path, _, last = name.rpartition(".q_proj.")
        if path:
            old[f"{path}.in_proj_{last}"] = torch.cat([old.pop(f"{path}.{kind}_proj.{last}") for kind in "qkv"])
    norms = {
        "encoder": ["self_attn_layer_norm", "final_layer_norm"],
        "decoder": ["self_attn_layer_norm", "encoder_attn_layer_norm", "final_layer_norm"],
    }
    for side, names in norms.items():
        for layer in (0, 1):
            for number, norm in enumerate(names):
                for kind in ("weight", "bias"):
                    path = f"{side}.layers.{layer}"
                    old[f"{path}.layer_norms.{number}.{kind}"] = old.pop(f"{path}.{norm}.{kind}")
        old[f"{side}.version"] = torch.tensor([version])
        old[f"{side}.embed_positions.weights"] = torch.zeros(1026, 16)  # they were computed, and saved all the same
        old.pop(f"{side}.embed_positions._float_tensor")
    old["decoder.embed_out"] = old.pop("decoder.output_projection.weight")
    return old


@pytest.mark.parametrize(
    ("places", "form"), zip([*SUBSETS, SUBSETS[0]], cycle(["of today", "of 2018", "of 2019"]), strict=False)
)
def test_fairseqs_checkpoints_load(places, form):
    theirs = build("transformer")
    state = theirs.state_dict()
    if form != "of today":
        state = as_of_2018(state, version={"of 2018": 1.0, "of 2019": 3.0}[form])
        assert not any(".q_proj." in name for name in state)
    ours = build(fast_weight_attention=places, seed=1)
    own = values(ours)
    ours.load_state_dict(state, strict=True)
    weights = theirs.state_dict()
    for name, x in ours.named_parameters():
        if name.split(".")[-1] not in FUSED:
            assert torch.equal(x, weights[name]), name
            assert not x.any() or name.endswith("norm.weight") or not torch.equal(x, own[name]), name
    if places == "none":
        theirs.load_state_dict(weights)
        assert relative_error(output(ours), output(theirs)) <= SAME
    else:
        assert output(ours).isfinite().all()
    # From there on it is a checkpoint of ours.
    again = build(fast_weight_attention=places, seed=2)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(output(again), output(ours))
    other = build(fast_weight_attention="none" if places != "none" else "cross")
    with pytest.raises(ValueError, match="the checkpoint does not fit the model"):
        other.load_state_dict(ours.state_dict())


@pytest.mark.parametrize("places", [SUBSETS[0], "none"])
def test_shared_embeddings_of_2018_load(places):
    options = {"share_all_embeddings": True}
    state = as_of_2018(build("transformer", **options).state_dict(), 3.0)
    state.pop("decoder.embed_out")  # it was the embedding, which had another name of its own already
    ours = build(fast_weight_attention=places, seed=1, **options)
    ours.load_state_dict(state, strict=True)
    assert torch.equal(ours.decoder.output_projection.weight, state["encoder.embed_tokens.weight"])


@pytest.mark.parametrize(
    ("rule", "missing"), [("gated", "gate_proj"), ("decay", "key_decay_proj"), ("delta", "beta_proj")]
)
def test_weights_that_a_transformer_lacks_are_missed(rule, missing):
    with pytest.raises(RuntimeError, match=rf"Missing key.*decoder.layers.0.self_attn.{missing}"):
        build(update_rule=rule).load_state_dict(fairseqs().state_dict())


def test_other_layers_are_not_dropped_in_silence():
    with pytest.raises(RuntimeError, match=r"Unexpected key.*encoder\.layers\.2\."):
        build().load_state_dict(build("transformer", encoder_layers=3).state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*encoder\.layers\.0\.more"):
        build().load_state_dict({**build().state_dict(), "encoder.layers.0.more": torch.zeros(1)})


# ----------------------------------------------------------------------------------- settings


@pytest.mark.parametrize(
    "options",
    [{"fast_weight_attention": places} for places in SUBSETS]
    + [
        {"update_rule": rule, "feature_map": name}
        for rule, name in zip(UPDATE_RULES, cycle(("favor", "relu")), strict=False)
    ],
    ids=str,
)
def test_a_checkpoint_loads_into_its_model(options):
    saved, loaded = build(**options), build(**options, seed=1)
    saved.load_state_dict(saved.state_dict())  # both, as fairseq switches its fused kernel on in loading
    assert relative_error(output(loaded), output(saved)) > 0.1
    loaded.load_state_dict(saved.state_dict(), strict=True)
    assert torch.equal(output(saved), output(loaded))


# What a checkpoint was made with, what loads it, and what has to be named. What all attention has in common is named
# for the encoder, whose settings are looked at first.
DECODER = {"fast_weight_attention": "decoder,cross"}
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], list[str]]] = [
    (
        {"update_rule": "delta"},
        {"update_rule": "sum"},
        ["decoder mixers is 'delta' in the checkpoint and 'sum' in the model$"],
    ),
    ({"update_rule": "gated"}, {"update_rule": "decay"}, ["decoder mixers is 'gated' .* 'decay'"]),
    # With the same parameters, of the same sizes: nothing else would notice.
    ({"feature_map": "elu"}, {"feature_map": "tanh"}, ["encoder sum feature map is 'elu' .* 'tanh'"]),
    (
        {"feature_map": "elu", **DECODER},
        {"feature_map": "tanh", **DECODER},
        ["cross sum feature map is 'elu' .* 'tanh'", "decoder sum feature map is 'elu' .* 'tanh'"],
    ),
    ({"normalization": "sum"}, {"normalization": "none"}, ["decoder sum normalization is 'sum' .* 'none'"]),
    ({}, {"scale_read_out": True}, ["encoder sum read-out scale is 1.0 .* 0.35"]),
    (
        DECODER,
        {"scale_read_out": True, **DECODER},
        ["cross sum read-out scale is 1.0", "decoder sum read-out scale is 1.0"],
    ),
    ({"feature_map": "dpfp"}, {"feature_map": "dpfp", "dpfp_nu": 2}, ["encoder sum feature dim is 16 .* 32"]),
    # Of other sizes.
    (
        {"feature_map": "favor", "favor_features": 3},
        {"feature_map": "favor", "favor_features": 5},
        ["encoder sum feature dim is 6 .* 10"],
    ),
    (
        {"feature_dim": 4, **DECODER},
        {"feature_dim": 6, **DECODER},
        ["cross sum feature dim is 4 .* 6", "decoder sum feature dim is 4 .* 6"],
    ),
    # Softmax attention has q, k, v and out as the sum rule has.
    ({}, DECODER, ["encoder mixers is 'sum' in the checkpoint and 'softmax' in the model"]),
    ({}, {"fast_weight_attention": "encoder,cross"}, ["decoder mixers is 'sum' .* 'softmax'"]),
    ({}, {"fast_weight_attention": "encoder,decoder"}, ["cross mixers is 'sum' .* 'softmax'"]),
    ({"fast_weight_attention": "none"}, {}, ["encoder mixers is 'softmax' .* 'sum'"]),
    (
        {"fast_weight_attention": "none"},
        DECODER,
        [f"{place} mixers is 'softmax' .* 'sum'" for place in ("cross", "decoder")],
    ),
]


@pytest.mark.parametrize(("made_with", "options", "named"), DIFFERENT)
def test_a_checkpoint_of_other_settings_is_refused_by_name(made_with, options, named):
    saved, model = build(**made_with), build(**options, seed=1)
    before = values(model)
    with pytest.raises(ValueError, match=r"^the checkpoint does not fit the model: ") as error:
        model.load_state_dict(saved.state_dict())
    for pattern in named:
        assert re.search(pattern, str(error.value)), error.value
    # Nothing was loaded before the difference was seen.
    assert_unchanged(model, before)


# ----------------------------------------------------------------------------------- averages
