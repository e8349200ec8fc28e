"""A model is no larger than the weights of its checkpoint allow, and only of numbers that a model can have."""

from __future__ import annotations

import re
import resource
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils

from fairseq_fastweights.model_sizes import likely

pytestmark = pytest.mark.usefixtures("our_fairseq")

FC1 = "decoder.layers.0.fc1.weight"
HISTORY = {"criterion_name": "", "optimizer_name": "", "lr_scheduler_state": {}, "num_updates": 0}
TRANSFORMER = "--task language_modeling"
KINDS = {
    "ours": ("fast_weight_lm", ""),
    "linformer": ("fast_weight_lm", "--mixers linformer:1,mamba:2"),
    "favor": ("fast_weight_lm", "--feature-map favor"),
    "fairseq's": ("transformer_lm", TRANSFORMER),
    "adaptive": (
        "transformer_lm",
        f"{TRANSFORMER} --criterion adaptive_loss --adaptive-softmax-cutoff 10,20 --adaptive-input "
        "--adaptive-input-cutoff 10,20",
    ),
    "convolutions": ("fconv_lm", f"{TRANSFORMER} --decoder-layers [(16,3)]*2"),
}


@pytest.fixture(scope="module")
def saved(fairseq, tmp_path_factory) -> Callable[..., tuple[Path, Any]]:
    """The file of a checkpoint of a kind, changed, and the task to load it."""
    states: dict[str, dict[str, Any]] = {}
    path = tmp_path_factory.mktemp("saved") / "model.pt"

    def save(kind: str, settings: dict[str, Any], weights: Callable[[dict[str, Any]], Any] = dict) -> tuple[Path, Any]:
        if kind not in states:
            arch, flags = KINDS[kind]
            parse = fairseq.tiny if arch != "fconv_lm" else fairseq.parse
            args = parse(arch, f"{flags} --decoder-embed-dim 16 --tokens-per-sample 64")
            model = fairseq.task().build_model(args)
            states[kind] = {"args": args, "model": model.state_dict()}
        args = Namespace(**{**vars(states[kind]["args"]), **settings})
        state = {"args": args, "model": weights(states[kind]["model"]), "optimizer_history": [HISTORY]}
        torch.save(state | {"extra_state": {"train_iterator": {"epoch": 1}}}, path)
        return path, fairseq.task()

    return save


def load(path: Path, task: Any) -> Any:
    return checkpoint_utils.load_model_ensemble_and_task([str(path)], task=task)[0][0]


@pytest.mark.parametrize("kind", KINDS)
def test_a_fitting_checkpoint_is_loaded(saved, kind):
    for settings in ({}, {"max_target_positions": 10**4}):  # a table of 640 kB for a file of less
        path, task = saved(kind, settings if kind != "linformer" else {})
        load(path, task)


@pytest.mark.parametrize(
    ("kind", "name", "value", "says"),
    [
        ("ours", "decoder_ffn_embed_dim", 10**8, r"a tensor of shape \(100000000, 16\), 6,400,000,000 bytes; its"),
        ("ours", "decoder_embed_dim", 10**8, r"a tensor of shape \("),
        ("ours", "feature_dim", 10**7, r"a tensor of shape \(20000000, 16\)"),
        ("ours", "decoder_ffn_embed_dim", 10**30, "its settings make no model"),
        ("ours", "max_target_positions", 10**8, r"a tensor of shape \(100000002,\)"),
        ("ours", "decoder_layers", 10**6, r"it has \d+ weights"),
        ("ours", "decoder_layers", 10**12, r"it has \d+ weights"),
        ("favor", "favor_features", 10**8, r"a tensor of shape \("),
        ("linformer", "max_target_positions", 10**8, r"a tensor of shape \("),
        ("linformer", "mamba_state", 10**8, r"a tensor of shape \("),
        ("linformer", "mamba_expansion", 10**8, r"a tensor of shape \("),
        ("fairseq's", "decoder_ffn_embed_dim", 10**8, r"a tensor of shape \(100000000, 16\)"),
        ("fairseq's", "decoder_output_dim", 10**8, r"a tensor of shape \(100000000, 16\)"),
        ("fairseq's", "decoder_layers", 10**6, r"it has \d+ weights"),
        ("adaptive", "decoder_input_dim", 10**8, r"a tensor of shape \("),
        ("convolutions", "decoder_layers", "[(16, 3)] * 20000", r"20000, and it has \d+ weights"),
        ("convolutions", "decoder_layers", "[(10**2, 3)]", "is no literal"),
        ("convolutions", "decoder_layers", "[(100000000, 3)]", r"a tensor of shape \("),
        ("fairseq's", "decoder_attention_heads", 5, "its settings make no model"),
    ],
)
def test_settings_that_ask_for_more_are_refused_by_name(saved, kind, name, value, says):
    path, task = saved(kind, {name: value})
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(ValueError, match=rf"^{re.escape(str(path))}.*{says}") as error:
        load(path, task)
    assert "\n" not in str(error.value)
    assert name in str(error.value) or isinstance(value, str) or value == 5
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 200_000  # KiB


def test_many_small_tensors_are_too_many(saved):
    """No setting's name tells the layers of lists."""
    path, task = saved("fairseq's", {"decoder_layers": 100, "decoder_ffn_embed_dim": 16000})
    with pytest.raises(ValueError, match=r"is refused: decoder_ffn_embed_dim is 16000, and it asks for a tensor"):
        load(path, task)


def changed(name: str, change: Callable[[torch.Tensor], Any]) -> Callable[[dict[str, Any]], Any]:
    return lambda weights: {**weights, name: change(weights[name])}


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda x: x + 1j, f"weight {FC1} is complex64; it must be floating-point, as that of the model"),
        (lambda x: x.to(torch.int32), f"weight {FC1} is int32; it must be floating-point"),
        (lambda x: x > 0, f"weight {FC1} is bool; it must be floating-point"),
        (lambda x: "text", f"weight {FC1} is of type str; it must be a tensor"),
        (lambda x: x.clone().index_fill_(0, torch.tensor(3), torch.nan), rf"is refused: its weight {FC1} holds NaN"),
        (lambda x: x.bfloat16().log(), rf"is refused: its weight {FC1} holds NaN"),
        (lambda x: x[1:], f"size mismatch for {FC1}"),
    ],
)
@pytest.mark.parametrize("kind", ["ours", "fairseq's"])
def test_weights_that_a_model_cannot_have_are_refused_by_name(saved, kind, change, says):
    path, task = saved(kind, {}, changed(FC1, change))
    with pytest.raises(ValueError, match=f"^{re.escape(str(path))}.*{says}") as error:
        load(path, task)
    assert "\n" not in str(error.value)


def test_weights_in_16_bits_and_the_largest_numbers_are_taken(saved):
    for change in (torch.Tensor.half, torch.Tensor.double, lambda x: torch.full_like(x, 3e38)):
        load(*saved("ours", {}, changed(FC1, change)))


def test_a_buffer_that_nothing_is_written_to_may_hold_anything(saved):
    name = "decoder.embed_positions._float_tensor"
    load(*saved("ours", {}, changed(name, lambda x: torch.full_like(x, torch.nan))))


@pytest.mark.parametrize(
    "change",
    [
        lambda state: state | {"optimizer_history": 3},
        lambda state: state | {"optimizer_history": [{}]},
        lambda state: state | {"extra_state": {"train_iterator": 3}},
        lambda state: state | {"args": "text"},
        lambda state: {"model": state["model"]},
        lambda state: state | {"model": 3},
    ],
)
def test_a_checkpoint_that_holds_something_else_is_named(saved, change):
    path, task = saved("ours", {})
    state = torch.load(path, weights_only=True)
    torch.save(change(state), path)
    with pytest.raises(ValueError, match=re.escape(str(path))) as error:
        load(path, task)
    assert "\n" not in str(error.value)


def test_a_score_that_is_no_number_is_no_result(our_fairseq):
    from fairseq.models_of_checkpoints import check_score

    for score in (1.0, torch.tensor(3.0), float("inf")):
        check_score("model.pt", score)
    with pytest.raises(ValueError, match=r"^model.pt: the loss is not a number \(nan\)"):
        check_score("model.pt", torch.tensor(torch.nan))


def test_the_setting_that_is_named_is_a_large_part_of_the_size():
    numbers = {"few": 2, "part": 1000, "other": 1500, "large": 9000}
    assert likely(numbers, (4000, 16)) == "part is 1000"
    assert likely(numbers, (9000, 1500)) == "large is 9000 and other is 1500"
    assert likely(numbers, (9001,)) == likely(numbers) == "large is 9000"
    assert likely({}) == "no setting is a number"
