"""Trainings in worker processes that take turns, the plain model beside fairseq's, and records."""

import math
import re
import warnings
from itertools import accumulate, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
import torch
from harness import plain_training, records, workers
from harness.timing import Budget
from harness.trainings import FLA, PARTS, PLAIN, PLUGIN, STOCK, Training
from harness.workers import UpdateBlocks, Worker, slices
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


TRAINED = [(part, *implementation) for part, of in PARTS.items() for implementation in of.runs[:1]]
TRAINED += [("lm-small", "favor", PLUGIN), ("lm-small", "mamba", PLUGIN), ("baevski", "softmax", PLAIN)]


@pytest.mark.parametrize("named", [*TRAINED, ("demo", "delta", STOCK)])
def test_every_part_is_trained_in_blocks(named: tuple[str, str, str], tmp_path: Path, monkeypatch) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(nn.Module, "compile", lambda module: None)
    connection, answers = asking(("time", 2), ("profile", 1))
    workers.train(training_of(*named, tmp_path), UpdateBlocks(connection, "cpu"))
    loaded, timed, profiled = answers
    assert loaded["tokens"] == 0 and timed["seconds"] > 0 and timed["memory"] > 2**20
    if not PARTS[named[0]].translates:  # whose batches are of any size
        assert (timed["tokens"], profiled["tokens"]) == (2 * 2 * 16, 2 * 16)
    assert 50 < profiled["operators"] < 2000 and "kernels" not in profiled


def test_the_first_update_is_not_timed_and_gpu_work_is_counted(monkeypatch) -> None:
    for name in ("synchronize", "empty_cache", "reset_peak_memory_stats", "max_memory_reserved"):
        monkeypatch.setattr(torch.cuda, name, lambda: 7)
    monkeypatch.setattr(workers.time, "perf_counter", Mock(side_effect=[0.0, 10.0, 13.0, 20.0, 21.0]))
    gpu, cpu = torch.autograd.DeviceType.CUDA, torch.autograd.DeviceType.CPU
    # Three kernels, which overlap, and three other events.
    rows = [("a", 0, 10, gpu, False), ("b", 5, 20, gpu, False), ("b", 6, 7, gpu, False)]
    rows += [("aten::mm", 0, 99, cpu, False), ("forward", 0, 90, gpu, False), ("step", 0, 90, gpu, True)]
    facts = [f"{x}.return_value" for x in ("name", "start_ns", "end_ns", "device_type", "is_user_annotation")]
    found = MagicMock()
    found.__enter__.return_value = found
    operators = {"aten::mm": cpu, "void at::native::k": gpu}.items()
    found.events.return_value = [SimpleNamespace(name=n, cpu_parent=None, device_type=x) for n, x in operators]
    events = [Mock(**dict(zip(facts, row, strict=True))) for row in rows]
    found.profiler.kineto_results.events.return_value = events
    monkeypatch.setattr(workers, "profile", lambda activities: found)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", mode := Mock())
    connection, answers = asking(("time", 2), ("profile", 1))
    blocks, made = UpdateBlocks(connection, "cuda"), []

    def step() -> None:
        made.append(mode.call_count)
        warnings.warn("called a synchronizing CUDA operation (Triggered internally at ...)", stacklevel=1)
        warnings.warn("another", stacklevel=1)

    with pytest.raises(workers.Finished), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(9):
            blocks.update(step, 100)
    assert made == [0, 0, 0, 0, 1] and mode.call_count == 2  # one more than was asked for, twice
    assert answers[1] == {"seconds": 3.0, "tokens": 200, "memory": 7}
    assert answers[2].pop("waits")[0].startswith(f"{__file__}:")
    assert answers[2] == {
        "seconds": 1,
        "tokens": 100,
        "memory": 7,
        "operators": 1,
        "kernels": 3,
        "kernel seconds": 2e-8,
    }


NAMES = {"mixer.out": "self_attn.out_proj", "norms.0": "self_attn_layer_norm", "norms.1": "final_layer_norm"}
NAMES |= {"feed_forward.0": "fc1", "feed_forward.3": "fc2"}


@pytest.mark.parametrize("part", ["lm-small", "baevski"])
def test_the_plain_model_is_fairseqs_transformer(part: str, tmp_path: Path, monkeypatch) -> None:
    from fairseq import options, tasks
    from fairseq.dataclass.utils import convert_namespace_to_omegaconf

    monkeypatch.chdir(ROOT)
    import_plugin()
    words = workers.options_of(training_of(part, "softmax", PLAIN, tmp_path))
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
    for layer, kind in product((f"layers.{number}." for number in range(len(plain.layers))), (".weight", ".bias")):
        projections = [theirs[f"{layer}self_attn.{name}_proj{kind}"] for name in "qkv"]
        state[f"{layer}mixer.projections{kind}"] = torch.cat(projections)
        state |= {layer + here + kind: theirs[layer + there + kind] for here, there in NAMES.items()}
    plain.load_state_dict(state)
    assert sum(p.numel() for p in plain.parameters()) == sum(p.numel() for p in model.parameters())
    expected, _, _ = task.build_criterion(cfg.criterion)(model, batch)
    torch.testing.assert_close(plain.eval()(words, batch["target"]), expected.squeeze(), rtol=1e-5, atol=1e-5)


LOADED, WARM, TURN = {"tokens": 0}, {"seconds": 2.0}, {"seconds": 2.0, "tokens": 100, "memory": 5}
GONE = {"status": "failed", "message": "gone"}
PROFILE = {"operators": 9, "kernels": 3, "kernel seconds": 0.05, "waits": ["here"]}


def named(name: str, device: str = "cpu") -> tuple[Training, int]:
    return Training("part", name, PLUGIN, (), Path(name), device, "fp32"), 12


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """Measures trainings of these names with these scripts; returns the events, the rows and the cuts."""

    def measure(names: str, scripts: dict[str, list[Any]], rounds: int = 3, **how: Any) -> Any:
        happened: list[str] = []

        class Fake(Worker):
            """Answers from a script: an answer for each block, or an error."""

            def __init__(self, training: Training, log: Path) -> None:
                self.training, self.row, self._turns, self._seconds = training, {}, [], 1e-6
                default = [LOADED, WARM, TURN, TURN, TURN | {"memory": 6}, PROFILE]
                self.answers = [*scripts.get(training.model, default)]
                self.tell("starts")

            def answer(self, seconds: float, late: str = "failed") -> Any:
                profiled = happened[-1].endswith(" profile 1")
                answer = self.answers.pop(-1 if profiled else 0) if len(self.answers) > 1 else self.answers[0]
                if answer is GONE:
                    self.row = answer
                    self.end()
                    return {}
                if answer.keys() == {"seconds"}:
                    self.tell("is warm")
                return answer

            def tell(self, *event: object) -> None:
                happened.append(" ".join(map(str, (self.training.model, *event))))

            def end(self) -> None:
                self.tell("ends")

        monkeypatch.setattr(workers, "Worker", Fake)
        how, rows = {"device": "cpu", "budget": Budget(None), "memory": math.inf} | how, []
        workers.measure(
            [named(name, how["device"]) for name in names], tmp_path, rounds=rounds, save=rows.append, **how
        )
        return happened, rows, how["budget"].cut

    return measure


def test_all_start_before_any_is_warm_and_then_they_take_turns(measured: Any) -> None:
    happened, [rows], cut = measured("ab", {})
    # Warm one by one on a CPU. A turn takes about 3 s: of updates of 0.4 s, then 0.25 s.
    starts = ["a starts", "b starts", "a time 5", "a is warm", "b time 5", "b is warm"]
    turns = [f"{name} time {updates}" for updates in (8, 12, 18) for name in "ab"]
    assert happened == [*starts, *turns, "a profile 1", "a ends", "b profile 1", "b ends"]
    assert [row["tokens per second"]["median"] for row in rows] == [50.0, 50.0] and cut == []
    assert [rows[0][name] for name in ("peak bytes", "operators", "kernels")] == [6, 9, 3]


def test_a_lost_worker_has_a_reason_and_the_others_go_on(measured: Any) -> None:
    before = ([], [LOADED], [LOADED, WARM, TURN], [LOADED, WARM, TURN, TURN])
    happened, [rows], _ = measured("abcde", {name: [*x, GONE] for name, x in zip("abcd", before, strict=True)}, 2)
    assert [row["status"] for row in rows] == ["failed"] * 4 + ["measured"]
    assert all(row["message"] == "gone" for row in rows[:4])
    assert sorted(line for line in happened if line.endswith("ends")) == [f"{name} ends" for name in "abcde"]


def test_as_many_compile_at_a_time_as_the_gpu_has_room_for(measured: Any) -> None:
    """Busy time is the GPU's time in a profiled update over the time of another one."""
    slow = [LOADED, {"seconds": 0.5}, TURN | {"seconds": 1.0}, PROFILE]
    happened, [[row, *_], *_], _ = measured("abcd", dict.fromkeys("abcd", slow), 1, device="cuda", memory=60)
    # Half of the memory is for two of 12 GiB.
    at_a_time = list(accumulate({"time 5": 1, "is warm": -1}.get(line[2:], 0) for line in happened))
    assert max(at_a_time) == 2 and at_a_time[-1] == 0
    assert next(slices([named("a")] * 30, 144, 99)) == [named("a")] * 12
    assert row["seconds"]["median"] == 0.1 and (row["busy"], row["kernels"], row["waits"]) == (0.5, 3, ["here"])


def test_a_budget_that_ends_leaves_out_the_later_groups_and_rounds(measured: Any, monkeypatch) -> None:
    monkeypatch.setattr(workers, "FEWEST_PROCESSES", 2)
    monkeypatch.setattr(workers.os, "cpu_count", lambda: 1)
    now = iter([0.0, 1.0, *[99.0] * 99])
    happened, [rows], cut = measured("abc", {}, budget=Budget(10, lambda: next(now)))
    assert [row["model"] for row in rows] == ["a", "b"] and "c starts" not in happened
    assert cut == [*(f"part, {name}, plugin: 1 rounds of 3" for name in "ab"), "part, c, plugin: not measured"]


@pytest.mark.slow
def test_trainings_are_processes_whose_results_are_recorded(tmp_path: Path, monkeypatch, run, capsys) -> None:
    monkeypatch.setattr(workers, "TURN_SECONDS", {"cpu": 0.1})
    options = ["--parts", "lm-small", "--models", "delta", "--implementations", PLUGIN, FLA, "--rounds", 1]
    assert run("training", "--quick", *options, "--out", tmp_path / "out.json") == ""
    own, other = records.read(tmp_path / "out.json")["rows"]
    assert own["status"] == "measured" and own["tokens per second"]["median"] > 0 and own["operators"] > 20
    assert (other["status"], other["message"]) == ("unavailable", "ModuleNotFoundError: No module named 'fla'")
    page = capsys.readouterr().out
    assert re.search(r"^\| delta +\| plugin ", page, re.MULTILINE) and "fla, unavailable: Module" in page
