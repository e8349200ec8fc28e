"""The training that training.py measures is fairseq-train's, beside one in plain PyTorch of the same model."""

import warnings
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


class Asking:
    """A connection at whose other end these blocks are asked for, one after the other."""

    def __init__(self, *asked: tuple[str, int]) -> None:
        self.asked, self.answers = list(asked), []

    def send(self, answer: dict[str, Any]) -> None:
        self.answers.append(answer)

    def recv(self) -> tuple[str, int]:
        return self.asked.pop(0)


def training_of(part: str, model: str, implementation: str, folder: Path) -> Training:
    PARTS[part].prepare(folder, 10, quick=True)
    flags = tuple(PARTS[part].flags_of(model, implementation, "auto", quick=True))
    return Training(part, model, implementation, flags, folder, "cpu", "fp32")


TRAINED = [
    *((part, model, way) for part, of in PARTS.items() for model, way in of.contestants[:1]),
    *(("lm-small", model, PLUGIN) for model in ("favor", "mamba")),
    ("baevski", "softmax", PLAIN),
    ("demo", "delta", STOCK),
]


@pytest.mark.parametrize(("part", "model", "implementation"), TRAINED)
def test_every_part_is_trained_in_blocks(part, model, implementation, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(nn.Module, "compile", lambda module: None)
    asking = Asking(("time", 2), ("profile", 1), ("end", 0))
    trainee.train(training_of(part, model, implementation, tmp_path), UpdateBlocks(asking, "cpu"))
    loaded, timed, profiled = asking.answers
    assert loaded["words"] == 0 and timed["seconds"] > 0 and timed["memory"] > 2**20
    if not PARTS[part].translates:  # whose batches are of any size
        assert (timed["words"], profiled["words"]) == (2 * 2 * 16, 2 * 16)
    assert 50 < profiled["operators"] < 2000 and "kernels" not in profiled


def test_the_first_update_is_not_timed_and_what_a_gpu_did_is_counted(monkeypatch) -> None:
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 7)
    now = iter([0.0, 10.0, 13.0, 20.0, 21.0])
    monkeypatch.setattr(trainee.time, "perf_counter", lambda: next(now))
    on_gpu, on_cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU

    def event(name: str, *times: int, device: Any = on_gpu, note: bool = False) -> Any:
        facts = {"name": name, "start_ns": times[0], "end_ns": times[1], "device_type": device}
        return Mock(**{f"{fact}.return_value": value for fact, value in (facts | {"is_user_annotation": note}).items()})

    # Time that several kernels cover counts once.
    events = [event("a", 0, 10), event("b", 5, 20), event("b", 6, 7), event("aten::mm", 0, 99, device=on_cpu)]
    events += [event("forward", 0, 90), event("step", 0, 90, note=True)]
    operators = [SimpleNamespace(name="aten::mm", cpu_parent=None, device_type=on_cpu)]
    operators += [SimpleNamespace(name="void at::native::k", cpu_parent=None, device_type=on_gpu)]
    found = MagicMock(**{"events.return_value": operators})
    found.__enter__.return_value = found
    found.profiler.kineto_results.events.return_value = events
    monkeypatch.setattr(trainee, "profile", lambda activities: found)
    asking = Asking(("time", 2), ("profile", 1), ("end", 0))
    modes = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    blocks, made = UpdateBlocks(asking, "cuda"), []

    def step(number: int) -> None:
        made.append(number)
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
        warnings.warn("another", stacklevel=1)

    with pytest.raises(trainee.Finished), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for number in range(9):
            blocks.update(lambda number=number: step(number), 100)
    assert made == [0, 1, 2, 3, 4]  # one more than was asked for, twice
    assert asking.answers[1] == {"seconds": 3.0, "words": 200, "memory": 7}
    told = {"operators": 1, "kernels": 3, "kernel seconds": 20e-9}
    [wait] = asking.answers[2].pop("waits")
    assert asking.answers[2] == {"seconds": 1.0, "words": 100, "memory": 7, **told}
    assert wait.startswith(f"{__file__}:") and modes == ["warn", "default"]


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
    batch, model = next(plain_training.batches(task, cfg)), task.build_model(cfg.model)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in model.parameters())
    decoder = model.decoder
    plain.embeddings.load_state_dict(decoder.embed_tokens.state_dict())
    plain.softmax.load_state_dict(decoder.adaptive_softmax.state_dict())
    for own, other in zip(plain.layers, decoder.layers, strict=True):
        attention = other.self_attn
        for kind in ("weight", "bias"):
            projections = [getattr(getattr(attention, f"{name}_proj"), kind) for name in "qkv"]
            getattr(own.mixer.projections, kind).data = torch.cat(projections)
        for here, there in (
            *((own.mixer.out, attention.out_proj), (own.norms[0], other.self_attn_layer_norm)),
            *(
                (own.norms[1], other.final_layer_norm),
                (own.feed_forward[0], other.fc1),
                (own.feed_forward[3], other.fc2),
            ),
        ):
            here.load_state_dict(there.state_dict())
    # fairseq's positions have other wave lengths.
    words = batch["net_input"]["src_tokens"]
    plain.positions = decoder.embed_positions(words)[0]
    expected, _, _ = task.build_criterion(cfg.criterion)(model.eval(), batch)
    torch.testing.assert_close(plain.eval()(words, batch["target"]), expected.squeeze(), rtol=1e-5, atol=1e-5)
