"""The training that training.py measures is fairseq-train's, beside one in plain PyTorch of the same model."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from harness import plain_training, trainee
from harness.trainee import UpdateBlocks
from harness.trainings import PARTS, PLAIN, PLUGIN, STOCK, Training
from torch import nn

from tests.conftest import ROOT, import_plugin


def asking(*asked: tuple[str, int]) -> tuple[Any, list[dict[str, Any]]]:
    """A connection at whose other end these blocks are asked for, one after the other, and the answers."""
    answers: list[dict[str, Any]] = []
    return SimpleNamespace(send=answers.append, recv=Mock(side_effect=[*asked, ("end", 0)])), answers


def training_of(part: str, model: str, implementation: str, folder: Path) -> Training:
    PARTS[part].prepare(folder, 10, quick=True)
    flags = tuple(PARTS[part].flags_of(model, implementation, "auto", quick=True))
    return Training(part, model, implementation, flags, folder, "cpu", "fp32")


TRAINED = [
    *((part, model, way) for part, of in PARTS.items() for model, way in of.contestants[:1]),
    *(("lm-small", model, PLUGIN) for model in ("favor", "mamba")),
    *(("baevski", "softmax", PLAIN), ("demo", "delta", STOCK)),
]


@pytest.mark.parametrize(("part", "model", "implementation"), TRAINED)
def test_every_part_is_trained_in_blocks(part, model, implementation, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(nn.Module, "compile", lambda module: None)
    connection, answers = asking(("time", 2), ("profile", 1))
    trainee.train(training_of(part, model, implementation, tmp_path), UpdateBlocks(connection, "cpu"))
    loaded, timed, profiled = answers
    assert loaded["words"] == 0 and timed["seconds"] > 0 and timed["memory"] > 2**20
    if not PARTS[part].translates:  # whose batches are of any size
        assert (timed["words"], profiled["words"]) == (2 * 2 * 16, 2 * 16)
    assert 50 < profiled["operators"] < 2000 and "kernels" not in profiled


def test_the_first_update_is_not_timed_and_what_a_gpu_did_is_counted(monkeypatch) -> None:
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 7)
    monkeypatch.setattr(trainee.time, "perf_counter", Mock(side_effect=[0.0, 10.0, 13.0, 20.0, 21.0]))
    on_gpu, on_cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    def event(
        name: str, start_ns: int, end_ns: int, device_type: Any = on_gpu, is_user_annotation: bool = False
    ) -> Any:
        return SimpleNamespace(**{fact: (lambda value=value: value) for fact, value in locals().items()})

    # Time that several kernels cover counts once.
    events = [event("a", 0, 10), event("b", 5, 20), event("b", 6, 7), event("aten::mm", 0, 99, on_cpu)]
    events += [event("forward", 0, 90), event("step", 0, 90, is_user_annotation=True)]
    operators = [("aten::mm", on_cpu), ("void at::native::k", on_gpu)]
    found = MagicMock()
    found.__enter__.return_value = found
    found.events.return_value = [SimpleNamespace(name=n, cpu_parent=None, device_type=where) for n, where in operators]
    found.profiler.kineto_results.events.return_value = events
    monkeypatch.setattr(trainee, "profile", lambda activities: found)
    connection, answers = asking(("time", 2), ("profile", 1))
    blocks, made = UpdateBlocks(connection, "cuda"), []
    with pytest.raises(trainee.Finished):
        for number in range(9):
            blocks.update(lambda number=number: made.append(number), 100)
    assert made == [0, 1, 2, 3, 4]  # one more than was asked for, twice
    assert answers[1] == {"seconds": 3.0, "words": 200, "memory": 7}
    told = {"operators": 1, "kernels": 3, "kernel seconds": 20e-9}
    assert answers[2] == {"seconds": 1.0, "words": 100, "memory": 7, **told}


NAMES = {"mixer.out": "self_attn.out_proj", "norms.0": "self_attn_layer_norm", "norms.1": "final_layer_norm"}
NAMES |= {"feed_forward.0": "fc1", "feed_forward.3": "fc2"}


@pytest.mark.parametrize("part", ["lm-small", "baevski"])
def test_the_plain_model_is_fairseqs_transformer(part: str, tmp_path: Path, monkeypatch) -> None:
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    monkeypatch.chdir(ROOT)
    import_plugin()
    words = trainee.words_of(training_of(part, "softmax", PLAIN, tmp_path))
    args = options.parse_args_and_arch(options.get_training_parser(), words)
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")
    shape = (args.decoder_embed_dim, args.decoder_attention_heads, args.attention_dropout)
    plain = plain_training.PlainModel(args, task.source_dictionary, lambda: plain_training.SoftmaxAttention(*shape))
    batch, model = next(plain_training.batches(task, cfg)), task.build_model(cfg.model).eval()
    words, theirs = batch["net_input"]["src_tokens"], model.decoder.state_dict()
    state = {"positions": model.decoder.embed_positions(words)[0]}  # which have other wave lengths
    for here, there in (("embeddings", "embed_tokens"), ("softmax", "adaptive_softmax")):
        state |= {here + name.removeprefix(there): x for name, x in theirs.items() if name.startswith(f"{there}.")}
    for layer in (f"layers.{number}." for number in range(len(plain.layers))):
        for kind in (".weight", ".bias"):
            projections = [theirs[f"{layer}self_attn.{name}_proj{kind}"] for name in "qkv"]
            state[f"{layer}mixer.projections{kind}"] = torch.cat(projections)
            state |= {layer + here + kind: theirs[layer + there + kind] for here, there in NAMES.items()}
    plain.load_state_dict(state)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in model.parameters())
    expected, _, _ = task.build_criterion(cfg.criterion)(model, batch)
    torch.testing.assert_close(plain.eval()(words, batch["target"]), expected.squeeze(), rtol=1e-5, atol=1e-5)
