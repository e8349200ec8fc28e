"""fairseq's checkpoints of all ages load into the translation model, and of its own only those with its settings."""

from __future__ import annotations

from itertools import cycle
from typing import Any

import pytest
import torch

from tests.models.test_checkpoints import assert_unchanged, values
from tests.models.translation import FUSED, SUBSETS, WORDS, batch, build, sentences, shifted


def output(model: Any) -> torch.Tensor:
    with torch.no_grad():
        return model(**batch(sentences((5, 3))), prev_output_tokens=shifted(sentences((4, 6), seed=1)))[0]


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
    shared = {"share_all_embeddings": places in ("none", "encoder,decoder")}
    state = weights = build("transformer", **shared).state_dict()
    if form != "of today":
        state = as_of_2018(state, version={"of 2018": 1.0, "of 2019": 3.0}[form])
        assert not any(".q_proj." in name for name in state)
        if shared["share_all_embeddings"]:
            state.pop("decoder.embed_out")  # it was the embedding, which had another name of its own already
    ours = build(fast_weight_attention=places, seed=1, **shared)
    own = values(ours)
    # Names are fairseq's; the copies for its fused kernel are there only where its attention is.
    fused = {f"encoder.layers.{layer}.{name}" for layer in (0, 1) for name in FUSED}
    assert set(weights) - set(own) == (fused if "encoder" in places else set())
    assert set(own) - set(weights) == {"encoder.settings_version", "decoder.settings_version"}
    ours.load_state_dict(state, strict=True)
    for name, x in ours.named_parameters():
        if name not in fused:
            assert torch.equal(x, weights[name]), name
            assert not x.any() or name.endswith("norm.weight") or not torch.equal(x, own[name]), name
    # From there on it is a checkpoint of ours, which computes the same.
    again = build(fast_weight_attention=places, seed=2, **shared)
    again.load_state_dict(ours.state_dict())
    assert torch.equal(output(again), output(ours))
    other = build(fast_weight_attention="none" if places != "none" else "cross", **shared)
    with pytest.raises(ValueError, match="the checkpoint does not fit the model"):
        other.load_state_dict(ours.state_dict())


def test_missing_and_other_layers_are_errors():
    with pytest.raises(RuntimeError, match=r"Missing key.*decoder\.layers\.0\.self_attn\.beta_proj"):
        build(update_rule="delta").load_state_dict(build("transformer").state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*encoder\.layers\.2\."):
        build().load_state_dict(build("transformer", encoder_layers=3).state_dict())
    with pytest.raises(RuntimeError, match=r"Unexpected key.*encoder\.layers\.0\.more"):
        build().load_state_dict({**build().state_dict(), "encoder.layers.0.more": torch.zeros(1)})


# Options that a checkpoint was made with, those of the model that loads it, and the settings that the error names.
DECODER = {"fast_weight_attention": "decoder,cross"}
NONE = {"fast_weight_attention": "none"}
DIFFERENT: list[tuple[dict[str, Any], dict[str, Any], str]] = [
    ({"update_rule": "delta"}, {}, "decoder mixers is 'delta' in the checkpoint and 'sum' in the model$"),
    ({"feature_map": "elu"}, {"feature_map": "tanh"}, "encoder sum feature map is 'elu' .* 'tanh'"),
    ({"normalization": "sum"}, {"normalization": "none"}, "decoder sum normalization is 'sum' .* 'none'"),
    (DECODER, {"scale_read_out": True, **DECODER}, "cross sum read-out scale is 1.0.*decoder sum read-out scale is 1"),
    ({"feature_dim": 4, **DECODER}, {"feature_dim": 6, **DECODER}, "cross sum feature dim is 4 .*decoder sum feature "),
    ({}, DECODER, "encoder mixers is 'sum' in the checkpoint and 'softmax' in the model"),
    ({}, {"fast_weight_attention": "encoder,cross"}, "decoder mixers is 'sum' .* 'softmax'"),
    ({}, {"fast_weight_attention": "encoder,decoder"}, "cross mixers is 'sum' .* 'softmax'"),
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
