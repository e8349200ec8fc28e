"""A checkpoint loads into the model that it was made by, and into no other; fairseq's tools for
checkpoints leave its settings intact."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf

from fairseq_fastweights.models import checkpoint_settings
from tests.ops.rules import deal

WORDS = tuple(f"w{i}" for i in range(40))


def values(model: Any) -> dict[str, torch.Tensor]:
    return {name: x.clone() for name, x in model.state_dict().items()}


def assert_unchanged(model: Any, before: dict[str, torch.Tensor]) -> None:
    """NaN too: fairseq's sinusoidal positions have a buffer, `_float_tensor`, that nothing is ever written to."""
    torch.testing.assert_close(values(model), before, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    "flags",
    [
        "--update-rule sum",
        "--update-rule gated",
        "--update-rule decay",
        "--update-rule delta",
        "--update-rule sum --feature-map favor",
        "--update-rule sum --feature-map relu --feature-dim 5",
        "--softmax-attention-layers 2",
        "--softmax-attention-layers all",
        "--decoder-learned-pos --decoder-normalize-before",
        "--adaptive-input --adaptive-input-cutoff 10,25 --adaptive-softmax-cutoff 10,25",
    ],
)
def test_a_checkpoint_loads_into_its_model(fairseq, text, flags):
    saved, loaded = fairseq.build(flags), fairseq.build(flags, seed=1)
    assert not torch.equal(saved(text(2, 6))[0], loaded(text(2, 6))[0])
    loaded.load_state_dict(saved.state_dict(), strict=True)
    assert torch.equal(saved(text(2, 6))[0], loaded(text(2, 6))[0])


# What a checkpoint was made with, what loads it, and what has to be named.
DIFFERENT = [
    ("--update-rule delta", "--update-rule sum --normalization sum", ["mixers is 'delta'", "'sum'"]),
    ("--update-rule gated", "--update-rule decay", ["mixers is 'gated'", "'decay'"]),
    # With the same parameters, of the same sizes: nothing else would notice.
    ("--feature-map elu", "--feature-map tanh", ["feature map is 'elu'", "'tanh'"]),
    ("--normalization sum", "--normalization sum,attention", ["normalization is 'sum'", "attention"]),
    ("--normalization none", "--normalization removal", ["normalization is 'none'", "removal"]),
    ("", "--scale-read-out", ["read-out scale is 1.0", "0.35"]),
    ("--feature-map dpfp", "--feature-map dpfp --dpfp-nu 2", ["feature dim is 16", "32"]),
    # Of other sizes.
    ("--feature-dim 4", "--feature-dim 6", ["feature dim is 4", "6"]),
    (
        "--feature-map favor --favor-features 3",
        "--feature-map favor --favor-features 5",
        ["feature dim is 6", "10"],
    ),
    # Softmax attention has q, k, v and out as the sum rule has.
    ("--update-rule sum", "--softmax-attention-layers all", ["mixers is 'sum'", "'softmax'"]),
    (
        "--update-rule sum --softmax-attention-layers 1",
        "--update-rule sum --softmax-attention-layers 2",
        ["mixers is ['softmax', 'sum']", "['sum', 'softmax']"],
    ),
]


@pytest.mark.parametrize(("made_with", "flags", "named"), DIFFERENT)
def test_a_checkpoint_of_other_settings_is_refused_by_name(fairseq, made_with, flags, named):
    saved, model = fairseq.build(made_with), fairseq.build(flags, seed=1)
    before = values(model)
    with pytest.raises(ValueError, match="the checkpoint does not fit the model") as error:
        model.load_state_dict(saved.state_dict())
    assert all(words in str(error.value) for words in named), error.value
    # Nothing was loaded before the difference was seen.
    assert_unchanged(model, before)


def with_former_settings(state_dict: dict[str, torch.Tensor], rule: str, softmax: list[int]) -> dict[str, torch.Tensor]:
    """With settings as they were said before layers were mixers: one rule, and a list of softmax layers."""
    settings = checkpoint_settings.decode(state_dict["decoder.settings_version"])
    del settings["mixers"]
    former = {name.removeprefix(f"{rule} ").removeprefix("softmax "): value for name, value in settings.items()}
    former |= {"softmax attention layers": softmax} | ({"update rule": rule} if rule else {})
    return {**state_dict, "decoder.settings_version": checkpoint_settings.encode(former)}


@pytest.mark.parametrize("layers", ["", "1", "2", "all"])
@pytest.mark.parametrize("flags", ["--update-rule sum", "--update-rule sum --rotary-dim 4"])
def test_former_hybrids_load_where_their_softmax_layers_are_and_nowhere_else(fairseq, text, flags, layers):
    """The sum rule has softmax attention's parameters: settings alone tell the layers apart."""
    for number, others in ((1, "2"), (2, "1")):
        saved = fairseq.build(f"{flags} --softmax-attention-layers {number}")
        state_dict = with_former_settings(saved.state_dict(), "sum", [number])
        before = dict(state_dict)
        model = fairseq.build(f"{flags} --softmax-attention-layers {layers}" if layers else flags, seed=1)
        if layers == str(number):
            model.load_state_dict(state_dict)
            assert torch.equal(model(text(2, 6))[0], saved(text(2, 6))[0])
        else:
            assert layers in ("", "all", others)
            with pytest.raises(ValueError, match=r"mixers is .* in the checkpoint and .* in the model"):
                model.load_state_dict(state_dict)
            assert all(state_dict[name] is x for name, x in before.items()), "a refusal has changed the checkpoint"


def test_former_hybrids_are_pruned(fairseq, text):
    flags = "--update-rule sum --rotary-dim 4 --softmax-attention-layers 4"
    whole = fairseq.build(f"--decoder-layers 4 {flags}")
    state_dict = with_former_settings(whole.state_dict(), "sum", [4])
    cfg = fairseq.tiny("fast_weight_lm", f"--decoder-layers 4 {flags} --decoder-layers-to-keep 0,1")
    pruned = fairseq.build(f"--decoder-layers 4 {flags} --decoder-layers-to-keep 0,1", seed=1)
    pruned.load_state_dict(state_dict, model_cfg=cfg)
    assert torch.equal(pruned.decoder.layers[1].fc1.weight, whole.decoder.layers[1].fc1.weight)


def test_every_difference_is_named(fairseq):
    saved = fairseq.build("--update-rule delta --feature-map elu --normalization sum")
    model = fairseq.build("--update-rule delta --feature-map dpfp --normalization attention")
    with pytest.raises(ValueError) as error:
        model.load_state_dict(saved.state_dict())
    for setting in ("delta feature map", "delta normalization"):
        assert setting in str(error.value)
    for setting in ("dpfp nu", "dictionary", "mixers"):
        assert setting not in str(error.value)


def prune(fairseq, saved, flags: str, kept: str):
    """A model that has loaded the layers `kept` of another, as fairseq prunes for LayerDrop; numbers start at 0."""
    cfg = fairseq.tiny("fast_weight_lm", f"--decoder-layers 4 {flags} --decoder-layers-to-keep {kept}")
    model = fairseq.build(f"--decoder-layers 4 {flags} --decoder-layers-to-keep {kept}", seed=1)
    model.load_state_dict(saved.state_dict(), model_cfg=cfg)
    return model


@pytest.mark.parametrize(
    ("kept", "layers", "flags"),
    deal(
        ["0,2", "3,0,1", "1"],
        ["1", "2,4", "all", ","],
        ["--update-rule sum", "--update-rule delta", "--update-rule sum --rotary-dim 4 --fast-weight-heads 4"],
    ),
)
@torch.no_grad()
def test_pruned_layers_keep_their_kind(fairseq, text, flags, layers, kept):
    flags = f"{flags} --softmax-attention-layers {layers}"
    whole = fairseq.build(f"--decoder-layers 4 {flags}")
    pruned = prune(fairseq, whole, flags, kept)
    numbers = sorted(int(number) for number in kept.split(","))
    whole.decoder.layers = torch.nn.ModuleList([whole.decoder.layers[number] for number in numbers])
    assert torch.equal(pruned(text(2, 6))[0], whole(text(2, 6))[0])
    # It is one of the smaller model from there on.
    wanted = {1, 2, 3, 4} if layers == "all" else {int(number) for number in layers.split(",") if number}
    left = ",".join(str(place) for place, number in enumerate(numbers, 1) if number + 1 in wanted) or ","
    small = f"--decoder-layers {len(numbers)} {flags} --softmax-attention-layers {left}"
    again = fairseq.build(small, seed=2)
    again.load_state_dict(pruned.state_dict())
    assert torch.equal(again(text(2, 6))[0], pruned(text(2, 6))[0])


@pytest.mark.parametrize(
    ("made_with", "flags", "named"),
    [
        (
            "--softmax-attention-layers 1,4",
            "--softmax-attention-layers 3",
            r"mixers is \['softmax', 'delta'\].*\['delta', 'softmax'\]",
        ),
        (
            "--softmax-attention-layers 1",
            "--softmax-attention-layers all",
            r"mixers is \['softmax', 'delta'\].*'softmax' in",
        ),
        ("--update-rule sum --normalization none", "--update-rule sum --normalization sum", "normalization is 'none'"),
        ("--parallel-residual --decoder-normalize-before", "--decoder-normalize-before", "parallel residual is True"),
    ],
)
def test_a_checkpoint_of_other_settings_is_refused_where_layers_are_pruned(fairseq, made_with, flags, named):
    saved = fairseq.build(f"--decoder-layers 4 {made_with}")
    before = values(saved)
    with pytest.raises(ValueError, match=named):
        prune(fairseq, saved, flags, "0,2")
    assert_unchanged(saved, before)


@pytest.mark.parametrize(
    ("made_with", "flags"),
    [
        ("--normalization auto", "--normalization sum"),
        ("--feature-map auto", "--feature-map elu"),
        ("--softmax-attention-layers 2,1", "--softmax-attention-layers all"),
        ("--dropout 0.1", "--dropout 0.3 --fast-weight-backend reference"),
        ("", "--feature-dim 8"),  # the head dim, which is what it is without
        ("", "--dpfp-nu 3"),  # which this map does not have
        ("--feature-map favor --feature-dim 6", "--feature-map favor --favor-features 3"),
    ],
)
def test_another_way_to_say_the_same_fits(fairseq, text, made_with, flags):
    saved, model = fairseq.build(made_with), fairseq.build(flags, seed=1)
    model.load_state_dict(saved.state_dict())
    # Backends may round differently.
    assert torch.allclose(model(text(2, 6))[0], saved(text(2, 6))[0], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("flags", ["", "--softmax-attention-layers all"])
@pytest.mark.parametrize(
    ("words", "named"),
    [
        (WORDS[:-1], "dictionary size is 44 in the checkpoint and 43 in the model"),
        ((*WORDS[:-2], WORDS[-1], WORDS[-2]), "dictionary digest is"),
        ((*WORDS[:-1], "other"), "dictionary digest is"),
    ],
    ids=["smaller", "another order", "another word"],
)
def test_a_checkpoint_of_another_dictionary_is_refused_by_name(fairseq, flags, words, named):
    saved = fairseq.build(flags)
    with pytest.raises(ValueError, match=named):
        fairseq.build(flags, words=words).load_state_dict(saved.state_dict())


def test_transformers_checkpoints_carry_no_settings_and_load(fairseq, text):
    theirs = fairseq.build(arch="transformer_lm")
    ours = fairseq.build("--softmax-attention-layers all", seed=1)
    ours.load_state_dict(theirs.state_dict())
    assert torch.allclose(ours(text(2, 6))[0], theirs(text(2, 6))[0], rtol=1e-6, atol=1e-6)
    # From there on it is a checkpoint of ours.
    again = fairseq.build("--softmax-attention-layers all", seed=2)
    again.load_state_dict(ours.state_dict())
    with pytest.raises(ValueError, match="mixers is 'softmax'"):
        fairseq.build("--update-rule sum").load_state_dict(ours.state_dict())


@pytest.mark.parametrize(("rule", "missing"), [("gated", "gate_proj"), ("delta", "beta_proj")])
def test_weights_that_a_transformer_lacks_are_missed(fairseq, rule, missing):
    theirs = fairseq.build(arch="transformer_lm")
    ours = fairseq.build(f"--update-rule {rule}")
    with pytest.raises(RuntimeError, match=rf"Missing key.*{missing}"):
        ours.load_state_dict(theirs.state_dict())


def with_former_name(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A checkpoint's weights as they were saved when its settings had the name of no version."""
    return {re.sub(r"\.settings_version$", ".settings", name): x for name, x in state.items()}


def test_a_checkpoint_with_the_former_name_of_its_settings_loads(fairseq, text):
    saved, loaded = fairseq.build("--feature-map elu"), fairseq.build("--feature-map elu", seed=1)
    state = with_former_name(saved.state_dict())
    assert "decoder.settings" in state and "decoder.settings_version" not in state
    loaded.load_state_dict(dict(state), strict=True)
    assert torch.equal(saved(text(2, 6))[0], loaded(text(2, 6))[0])
    with pytest.raises(ValueError, match="feature map is 'elu' in the checkpoint and 'tanh' in the model"):
        fairseq.build("--feature-map tanh").load_state_dict(dict(state))
    with pytest.raises(ValueError, match="dictionary digest is"):
        fairseq.build("--feature-map elu", words=WORDS[::-1]).load_state_dict(dict(state))


def average(states: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """As fairseq's `scripts/average_checkpoints.py`: sums, divided in place, whole numbers too."""
    total: dict[str, torch.Tensor] = {}
    for state in states:
        for name, x in state.items():
            x = x.float() if x.dtype == torch.float16 else x
            total[name] = total[name] + x if name in total else x.clone()
    for x in total.values():
        if x.is_floating_point():
            x.div_(len(states))
        else:
            x //= len(states)
    return total


@pytest.mark.parametrize("half", [False, True], ids=["", "half"])
@pytest.mark.parametrize("number", [2, 3])
def test_averages_of_checkpoints_keep_their_settings(fairseq, text, number, half):
    models = [fairseq.build("--feature-map relu", seed=seed) for seed in range(number)]
    states = [(m.half() if half else m).state_dict() for m in models]
    mean = average(states)
    assert torch.equal(mean["decoder.settings_version"], states[0]["decoder.settings_version"])
    model = fairseq.build("--feature-map relu", seed=9)
    model.load_state_dict(mean)
    expected = sum(state["decoder.layers.1.self_attn.v_proj.weight"].float() for state in states)
    weight = model.decoder.layers[1].self_attn.v_proj.weight
    assert torch.allclose(weight, expected / number, atol=1e-6)  # rounding of a mean of 3
    with pytest.raises(ValueError, match="feature map is 'relu'"):
        fairseq.build().load_state_dict(mean)


@pytest.fixture
def checkpoint(fairseq, tmp_path):
    """A file as fairseq-train leaves it, and the model in it."""
    flags = "--update-rule delta --no-token-positional-embeddings"
    cfg = convert_namespace_to_omegaconf(fairseq.tiny("fast_weight_lm", flags))
    cfg.common.user_dir = None
    model = fairseq.build(flags)
    path = str(tmp_path / "checkpoint.pt")
    state = {
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "args": None,
        "model": model.state_dict(),
        "optimizer_history": [
            {
                "criterion_name": "CrossEntropyCriterion",
                "optimizer_name": "FairseqAdam",
                "lr_scheduler_state": {},
                "num_updates": 1,
            }
        ],
        "extra_state": {},
        "task_state": {},
    }
    checkpoint_utils.torch_persistent_save(state, path)
    return path, model


def test_fairseqs_loader_brings_the_model_back(checkpoint, text):
    path, model = checkpoint
    (loaded,), cfg, task = checkpoint_utils.load_model_ensemble_and_task([path])
    assert cfg.model.update_rule == "delta" and len(task.dictionary) == 44
    assert torch.equal(loaded.eval()(text(2, 6))[0], model(text(2, 6))[0])


def test_overrides_of_what_the_weights_were_made_for_are_refused(checkpoint):
    path, _ = checkpoint
    with pytest.raises(ValueError, match=r"normalization is 'sum' .*'attention,sum'"):
        checkpoint_utils.load_model_ensemble_and_task([path], arg_overrides={"normalization": "sum,attention"})
