"""The synthetic experiments: what is drawn, the memories against the reference, when training ends, what is kept."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from fairseq_fastweights import ops
from fairseq_fastweights.feature_maps import sum_normalize

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"

sys.path.insert(0, str(EXAMPLES))  # as when run.py is started
demo, figures, grid, memories, models, report, results, retrieval, run, training, steps = map(
    import_module,
    [
        *(
            f"synthetic.{name}"
            for name in "demo figures grid memories models report results retrieval run training".split()
        ),
        "common.steps",
    ],
)

SIZE, DIM = 7, 6


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


# --- sequences


def test_setting_1_draws_every_key_and_every_value_once() -> None:
    sequences = retrieval.draw_sequences(1, SIZE, 50)
    for numbers in (sequences.keys, sequences.values):
        assert numbers.shape == (50, SIZE)
        assert torch.equal(numbers.sort(dim=1).values, torch.arange(SIZE).expand(50, SIZE))
        assert len({tuple(row.tolist()) for row in numbers}) > 40  # each in an order of its own
    assert not torch.equal(sequences.keys, sequences.values)


def test_setting_2_draws_twice_as_many_pairs_each_anew() -> None:
    sequences = retrieval.draw_sequences(2, SIZE, 2_000)
    for numbers in (sequences.keys, sequences.values):
        assert numbers.shape == (2_000, 2 * SIZE)
        assert (numbers.min(), numbers.max()) == (0, SIZE - 1)
        # 28,000 numbers, 4,000 expected of each: five standard deviations are 293.
        counts = numbers.flatten().bincount()
        assert ((counts - 4_000).abs() < 293).all()
        # Two places are equal as often as chance has it: 2,000 / 7 = 286, five standard deviations are 78.
        assert abs((numbers[:, 0] == numbers[:, 1]).sum() - 286) < 78
    same = (sequences.keys == sequences.values).sum() / sequences.keys.numel()
    assert abs(same - 1 / SIZE) < 0.02


@pytest.mark.parametrize("setting", [1, 2])
def test_a_query_asks_for_the_value_that_was_written_last(setting: int) -> None:
    sequences = retrieval.draw_sequences(setting, SIZE, 300)
    queries, targets = retrieval.draw_queries(sequences)
    everything, all_targets, possible = retrieval.all_queries(sequences)
    assert torch.equal(everything, torch.arange(SIZE).expand(300, SIZE))
    for row in range(300):
        memory = dict(zip(sequences.keys[row].tolist(), sequences.values[row].tolist(), strict=True))
        assert memory[queries[row].item()] == targets[row].item()
        assert possible[row].tolist() == [key in memory for key in range(SIZE)]
        assert [all_targets[row, key].item() for key in memory] == list(memory.values())
    # A key is chosen as often as the sequence has it.
    share = (queries == sequences.keys).float().mean()
    assert math.isclose(share, 1 / SIZE if setting == 1 else (1 + (2 * SIZE - 1) / SIZE) / (2 * SIZE), abs_tol=0.03)


def test_the_loss_is_half_the_squared_distance_to_the_one_hot_value() -> None:
    retrieved = torch.tensor([[0.5, 0.25, 0.0], [0.0, 0.0, 1.0]])
    losses = models.retrieval_loss(retrieved, torch.tensor([0, 2]))
    assert losses.tolist() == [0.5 * (0.5**2 + 0.25**2), 0.0]


# --- memories, against the operations of the plugin on one-hot values


def pairs(length: int = 23, queries: int = 4) -> SimpleNamespace:
    torch.manual_seed(1)
    return SimpleNamespace(
        k=torch.randn(3, length, DIM, dtype=torch.float64, requires_grad=True),
        q=torch.randn(3, queries, DIM, dtype=torch.float64, requires_grad=True),
        beta=torch.rand(3, length, dtype=torch.float64, requires_grad=True),
        values=torch.randint(SIZE, (3, length)),
        one_hot=None,
    )


def softmax_by_hand(memory: Any, p: SimpleNamespace, v: torch.Tensor) -> torch.Tensor:
    weights = torch.einsum("bqd,bld->bql", p.q, p.k) / math.sqrt(DIM)
    return torch.einsum("bql,blv->bqv", weights.exp() / weights.exp().sum(-1, keepdim=True), v)


def sum_by_operation(memory: Any, p: SimpleNamespace, v: torch.Tensor) -> torch.Tensor:
    phi_q, phi_k = memory.feature_map(p.q[:, :, None], p.k[:, :, None])
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)
    _, state = ops.sum_rule(phi_k, phi_k, v[:, :, None], backend="reference")
    read = torch.einsum("bqd,bdv->bqv", phi_q[:, :, 0], state[:, 0])
    return read[..., :-1] / (read[..., -1:] + memory.feature_map.sum_eps)


def delta_by_operation(memory: Any, p: SimpleNamespace, v: torch.Tensor) -> torch.Tensor:
    eps = memory.feature_map.sum_eps
    phi_q, phi_k = (sum_normalize(x, eps=eps) for x in memory.feature_map(p.q[:, :, None], p.k[:, :, None]))
    _, state = ops.delta_rule(phi_k, phi_k, v[:, :, None], p.beta[:, :, None], backend="reference")
    return torch.einsum("bqd,bdv->bqv", phi_q[:, :, 0], state[:, 0])


def capped_by_steps(memory: Any, p: SimpleNamespace, v: torch.Tensor) -> torch.Tensor:
    phi_q, phi_k = memory.feature_map(p.q[:, :, None], p.k[:, :, None])
    state = torch.zeros(3, 1, phi_k.shape[-1], SIZE, dtype=torch.float64)
    for t in range(v.shape[1]):
        now = slice(t, t + 1)
        _, state = ops.delta_rule(
            phi_k[:, now],
            phi_k[:, now],
            v[:, now, None],
            p.beta[:, now, None],
            initial_state=state,
            backend="reference",
        )
        state = state / state.flatten(1).norm(dim=1).clamp(min=1)[:, None, None, None]
    read = torch.einsum("bqd,bdv->bqv", phi_q[:, :, 0], state[:, 0])
    if memory.layer_norm:
        read = read - read.mean(-1, keepdim=True)
        read = read / (read.square().mean(-1, keepdim=True) + 1e-5).sqrt()
    return read


BY_DEFINITION: dict[str, Callable[..., torch.Tensor]] = {
    "softmax": softmax_by_hand,
    "sum": sum_by_operation,
    "delta": delta_by_operation,
    "capped": capped_by_steps,
}
ALL = [(setting, name) for setting in models.MODELS for name in models.MODELS[setting]]


@pytest.mark.parametrize(("setting", "name"), ALL)
def test_a_memory_reads_what_its_definition_reads_with_the_same_gradients(setting: int, name: str) -> None:
    model = models.MODELS[setting][name]
    memory = model.build(DIM).double().eval()  # in evaluation FAVOR+ keeps its features
    found, expected = [], []
    for read, into in ((memory, found), (BY_DEFINITION[model.memory], expected)):
        p = pairs()
        v = F.one_hot(p.values, SIZE).double()
        if read is memory:
            y = memory(p.k, p.q, p.beta if memory.has_strength else None, p.values, SIZE)
        else:
            y = read(memory, p, v)
        (y * torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view_as(y)).sum().backward()
        into += [y, p.k.grad, p.q.grad] + ([p.beta.grad] if memory.has_strength else [])
    for x, y in zip(found, expected, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("backend", ["reference", "chunkwise", "auto"])
def test_the_delta_rule_read_backwards_is_exact_with_every_backend(backend: str) -> None:
    p = pairs(length=41)
    k, q = (sum_normalize(x.abs(), eps=0)[:, :, None] for x in (p.k, p.q))
    coefficients = memories.delta_coefficients(k, q, p.beta, backend=backend)
    v = F.one_hot(p.values, SIZE).double()[:, :, None]
    _, state = ops.delta_rule(k, k, v, p.beta[:, :, None], backend="reference")
    expected = torch.einsum("bqd,bdv->bqv", q[:, :, 0], state[:, 0])
    torch.testing.assert_close(memories.spread(coefficients, p.values, SIZE), expected, rtol=0, atol=1e-13)


@pytest.mark.parametrize("length", [1, memories.CHUNK - 1, memories.CHUNK, 3 * memories.CHUNK + 1])
@pytest.mark.parametrize("scale", [0.1, 6.0])
def test_a_capped_memory_is_exact_for_any_length_below_and_above_its_cap(length: int, scale: float) -> None:
    """Keys of length 0.25 never fill it; those of length 15 would make it grow by factors of 100 a step."""
    p = pairs(length)
    k = scale * p.k.detach()
    memory = models.Model("", "capped").build(DIM)
    v = F.one_hot(p.values, SIZE).double()
    expected = capped_by_steps(memory, SimpleNamespace(k=k, q=p.q, beta=p.beta), v)
    found = p.q @ memories.capped_delta_rule(k, p.beta, p.values, SIZE)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-11)
    single = memories.capped_delta_rule(k.float(), p.beta.float(), p.values, SIZE)
    # A step multiplies what is off by up to |k|^2 = 225; the cap undoes it for the memory's length, not its direction.
    assert single.isfinite().all() and single.flatten(1).norm(dim=1).max() < 1 + 1e-4


def test_one_pair_is_enough_for_a_delta_rule() -> None:
    p = pairs(length=1)
    k = sum_normalize(p.k.abs(), eps=0)[:, :, None]
    coefficients = memories.delta_coefficients(k, k, p.beta)
    torch.testing.assert_close(coefficients[:, :, 0], p.beta * k[:, :, 0].square().sum(-1))


def test_a_retriever_is_the_papers_projections_of_embedding_and_value() -> None:
    """k = W_K [e(k); v], q = W_Q e(q), beta = sigmoid(W_beta [e(k); v]), built in full."""
    model = models.MODELS[2]["delta-dpfp-1"]
    retriever = models.Retriever(model, SIZE, DIM).double()
    sequences = retrieval.draw_sequences(2, SIZE, 5)
    queries, _ = retrieval.draw_queries(sequences)
    x = torch.cat([retriever.embedding[sequences.keys], F.one_hot(sequences.values, SIZE).double()], dim=-1)
    k, beta = x @ retriever.key_weight.t(), (x @ retriever.strength_weight.t()).sigmoid()[:, :, 0]
    q = retriever.embedding[queries] @ retriever.query_weight.t()
    expected = retriever.memory(k, q, beta, sequences.values, SIZE)
    torch.testing.assert_close(retriever(sequences, queries), expected, rtol=1e-12, atol=1e-12)


def test_models_have_the_feature_sizes_of_the_paper() -> None:
    sizes = {name: model.build().features for setting in (1, 2) for name, model in models.MODELS[setting].items()}
    assert sizes["softmax"] == sizes["linear"] == sizes["tanh"] == 64
    assert [sizes[f"dpfp-{nu}"] for nu in (1, 2, 3)] == [128, 256, 384]
    assert [sizes[f"favor-{m}"] for m in (64, 128, 512)] == [128, 256, 1024]


# --- training


def judge_all(losses: list[float], max_steps: int = 100_000) -> tuple[str | None, int]:
    """Why and after which step training ends with these losses."""
    rule = training.StopRule(max_steps)
    for count, loss in enumerate(losses, 1):
        if (reason := rule.judge(100 * count, loss)) is not None:
            return reason, 100 * count
    return None, 100 * len(losses)


@pytest.mark.parametrize(
    ("losses", "max_steps", "end"),
    [
        ([0.5, 0.1, 0.00099, 0.0], 10_000, ("solved", 300)),
        ([0.5, 0.001], 10_000, (None, 200)),  # not below the target
        ([0.5, 0.2] + [0.3] * 20, 10_000, ("no progress", 1_200)),
        ([0.5] + [0.499] * 20, 10_000, ("no progress", 1_100)),  # less than a hundredth is none
        ([0.5] + [0.4999 - 0.001 * i for i in range(20)], 10_000, (None, 2_100)),  # slow, but progress
        ([0.5] + [0.6] * 9 + [0.4] + [0.6] * 9, 10_000, (None, 2_000)),
        ([0.5, math.nan, 0.1], 10_000, ("not a number", 200)),
        ([math.inf], 10_000, ("not a number", 100)),
        ([0.5, 0.4, 0.3], 200, ("limit", 200)),
    ],
)
def test_training_ends_at_the_target_without_progress_or_at_the_limit(
    losses: list[float], max_steps: int, end: tuple[str | None, int]
) -> None:
    assert judge_all(losses, max_steps) == end


def test_the_best_loss_counts_small_steps_too() -> None:
    rule = training.StopRule(1_000)
    for step, loss in ((100, 0.5), (200, 0.499), (300, 0.6)):
        rule.judge(step, loss)
    assert (rule.best_loss, rule.best_step) == (0.499, 200)


def test_an_evaluation_is_the_mean_over_all_queries_whatever_its_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    point = training.Point(2, "sum-dpfp-1", 5)
    retriever = models.Retriever(models.MODELS[2]["sum-dpfp-1"], 5)
    torch.manual_seed(3)
    sequences = [retrieval.draw_sequences(2, 5, 1) for _ in range(20)]
    losses = []
    with torch.no_grad():
        for s in sequences:
            memory = dict(zip(s.keys[0].tolist(), s.values[0].tolist(), strict=True))
            queries = torch.tensor([list(memory)])
            targets = torch.tensor([list(memory.values())])
            losses += models.retrieval_loss(retriever(s, queries), targets)[0].tolist()
    monkeypatch.setattr(training, "AT_ONCE", 1)  # one sequence at a time
    torch.manual_seed(3)
    assert math.isclose(training.evaluate(retriever, point), sum(losses) / len(losses), rel_tol=1e-5)


def test_training_is_repeatable_learns_and_tells_how_far_it_is() -> None:
    point = training.Point(1, "softmax", 6)
    told: list[tuple[int, float]] = []
    first = training.train_point(point, lambda step, loss: told.append((step, loss)))
    second = training.train_point(point)
    other = training.train_point(training.Point(1, "softmax", 6, seed=2))
    assert first["stopped"] == "solved" and first["best_loss"] < training.TARGET
    assert first["curve"] == second["curve"] != other["curve"]
    assert first["curve"] == [[step, training.round_off(loss)] for step, loss in told]
    assert first["steps"] == first["best_step"] == told[-1][0] == 100 * len(told)


def test_a_loss_that_is_no_number_is_kept_as_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(training, "evaluate", lambda retriever, point: math.nan)
    result = training.train_point(training.Point(1, "softmax", 3, max_steps=2))
    assert (result["stopped"], result["best_loss"], result["curve"]) == ("not a number", None, [[2, None]])
    json.dumps(result, allow_nan=False)


@pytest.mark.parametrize("change", [{"model": "dpfp-1"}, {"size": 21}, {"seed": 2}, {"max_steps": 7}, {"setting": 2}])
def test_a_points_key_changes_with_all_that_its_result_depends_on(change: dict[str, Any]) -> None:
    base: dict[str, Any] = {"setting": 1, "model": "linear", "size": 20}
    if change == {"setting": 2}:
        change = {"setting": 2, "model": "delta-linear"}
    assert training.Point(**base).key != training.Point(**(base | change)).key
    assert training.Point(**base).key == training.Point(**base).key


@pytest.mark.parametrize("constant", ["TARGET", "PATIENCE", "PROGRESS", "BATCH", "EVALUATE_EVERY", "VERSION"])
def test_a_points_key_changes_with_how_points_are_trained(constant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before = training.Point(1, "linear", 20).key
    monkeypatch.setattr(training, constant, 17)
    assert training.Point(1, "linear", 20).key != before


# --- results


def line(model: str = "linear", size: int = 20, loss: float | None = 0.25, setting: int = 1, **other: Any) -> dict:
    point = training.Point(setting, model, size, **other)
    return {
        "key": point.key,
        "point": dict(point.__dict__),
        "best_loss": loss,
        "best_step": 100,
        "steps": 1_100,
        "stopped": "not a number" if loss is None else "no progress",
        "curve": [[100, loss], [200, loss]],
        "seconds": 2.0,
    }


def test_results_come_back_as_they_were_appended(tmp_path: Path) -> None:
    path = tmp_path / "setting1.jsonl"
    for value in (line(), line("dpfp-1"), line("favor-64", loss=None)):
        results.append_result(path, value)
    read = list(results.read_results(path).values())
    assert [result.point.model for result in read] == ["linear", "dpfp-1", "favor-64"]
    assert [result.best_loss for result in read] == [0.25, 0.25, None]
    assert read[0].curve == [(100, 0.25), (200, 0.25)]
    assert results.read_results(tmp_path / "none.jsonl") == {}


def test_half_a_line_is_left_out_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "setting1.jsonl"
    results.append_result(path, line())
    whole = path.read_bytes()
    path.write_bytes(whole + json.dumps(line("dpfp-1")).encode()[:-30])
    assert [result.point.model for result in results.read_results(path).values()] == ["linear"]
    assert path.stat().st_size > len(whole)  # reading changes nothing
    results.append_result(path, line("dpfp-2"))
    assert path.read_bytes().startswith(whole)
    assert [result.point.model for result in results.read_results(path).values()] == ["linear", "dpfp-2"]


@pytest.mark.parametrize(
    "broken",
    [
        "no json",
        "{}",
        "[1, 2]",
        '"text"',
        json.dumps(line() | {"point": {"setting": 1}}),
        json.dumps(line() | {"point": line()["point"] | {"model": "lstm"}}),
        json.dumps(line() | {"point": line()["point"] | {"setting": 3}}),
        json.dumps(line() | {"curve": [[1]]}),
        json.dumps(line() | {"best_loss": "low"}),
        "",
    ],
)
def test_a_line_that_is_no_result_is_named(tmp_path: Path, broken: str) -> None:
    path = tmp_path / "setting1.jsonl"
    path.write_text(json.dumps(line()) + "\n" + broken + "\n" + json.dumps(line("dpfp-1")) + "\n")
    with pytest.raises(results.ResultsError, match=r"setting1\.jsonl, line 2 is no result of a point"):
        results.read_results(path)


def test_a_point_that_is_there_twice_is_named(tmp_path: Path) -> None:
    path = tmp_path / "setting1.jsonl"
    path.write_text(2 * (json.dumps(line()) + "\n"))
    with pytest.raises(results.ResultsError, match="line 2 repeats a point"):
        results.read_results(path)


def test_results_of_another_way_of_training_are_left_out(tmp_path: Path) -> None:
    path = tmp_path / "setting1.jsonl"
    results.append_result(path, line() | {"key": "of another version"})
    assert results.read_results(path) == {}


# --- the time that is left


def test_the_estimate_learns_from_the_same_model_first() -> None:
    small, large = training.Point(1, "linear", 20), training.Point(1, "linear", 600)
    other = training.Point(1, "dpfp-3", 600)
    estimate = grid.Estimate([])
    assert estimate.seconds(small) is None and estimate.left([small], [], 1) is None
    estimate.learn(small, 10.0)
    assert math.isclose(estimate.seconds(large), 10 * large.work / small.work)
    assert math.isclose(estimate.seconds(other), 10 * other.work / small.work)
    estimate.learn(other, 1.0)
    assert math.isclose(estimate.seconds(other), 1.0)
    assert math.isclose(estimate.seconds(large), 10 * large.work / small.work)


def test_what_runs_and_what_waits_is_left() -> None:
    point = training.Point(1, "linear", 20)
    estimate = grid.Estimate([])
    estimate.learn(point, 10.0)
    assert math.isclose(estimate.left([point, point], [(point, 4.0)], 1), 26)
    assert math.isclose(estimate.left([point, point], [(point, 4.0)], 2), 13)
    assert math.isclose(estimate.left([point], [], 4), 10)  # a point is not divided
    assert estimate.left([], [(point, 50.0)], 1) == 0


# --- figures


@pytest.mark.slow
def test_figures_are_drawn_from_any_part_of_the_grid(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = [line("linear"), line("linear", 600, 0.4), line("linear", seed=2), line("favor-64", loss=None)]
    two = [line("tanh", 40, 0.0, setting=2)]
    for setting, values in ((1, one), (2, two)):
        for value in values:
            results.append_result(results.file_of(tmp_path, setting), value)
    drawn = run.draw(tmp_path, tmp_path / "figures")
    shown = capsys.readouterr().out
    assert "Setting 1" in shown and "Setting 2" in shown and "| FAVOR+, 64 features |" in shown
    assert [path.name for path in drawn] == [f"synthetic-figure{number}.png" for number in (2, 3, 4, 5)]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)
    assert sorted(path.name for path in (tmp_path / "figures").iterdir()) == [path.name for path in drawn]

    results.file_of(tmp_path, 1).unlink()
    assert [path.name for path in run.draw(tmp_path, tmp_path / "part")] == [
        "synthetic-figure3.png",
        "synthetic-figure5.png",
    ]


def test_of_a_seed_the_point_that_may_go_on_longest_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A quick look with --max-steps, or the same seed on a GPU, is not to move the median."""
    monkeypatch.setattr(run, "draw_figures", lambda chosen, folder: seen.update(chosen) or [])
    seen: dict[int, list[Any]] = {}
    lines = [line(loss=0.1), line(loss=0.5, max_steps=100), line(loss=0.4, device="cuda"), line(loss=0.2, seed=2)]
    lines += [line("dpfp-1", 60, 0.6), line("dpfp-1", 60, 0.3, max_steps=30_000, device="cuda")]
    for values in (lines, lines[::-1]):
        file = results.file_of(tmp_path, 1)
        file.unlink(missing_ok=True)
        for value in values:
            results.append_result(file, value)
        run.draw(tmp_path, tmp_path / "figures")
        assert sorted(result.best_loss for result in seen[1]) == [0.1, 0.2, 0.3]
        shown = capsys.readouterr().out
        assert "0.1500" in shown and "0.3000" in shown and ": 3 of the points" in shown


@pytest.mark.parametrize("setting", [1, 2])
def test_none_of_the_committed_points_is_left_out(setting: int) -> None:
    read = list(results.read_results(results.file_of(EXAMPLES / "synthetic" / "results", setting)).values())
    assert read and results.one_of_each_seed(read) == read


def test_learning_curves_are_those_of_figures_3_and_4(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The largest S of Setting 1, the smallest of Setting 2."""
    seen: dict[int, list[tuple[str, int]]] = {}

    def note(chosen: Any, number: int, *_: Any) -> Path:
        seen[number] = [(result.point.model, result.point.size) for result in chosen]
        return tmp_path / str(number)

    monkeypatch.setattr(figures, "_draw_curves", note)
    monkeypatch.setattr(figures, "_draw_losses", note)
    for setting, name in ((1, "linear"), (2, "delta-linear")):
        for size in (40, 20, 60):
            results.append_result(results.file_of(tmp_path, setting), line(name, size, setting=setting))
    run.draw(tmp_path, tmp_path)
    assert seen[4] == [("linear", 60)] and seen[3] == [("delta-linear", 20)]
    assert len(seen[2]) == len(seen[5]) == 3


# --- the command


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--setting"),
        (["--setting", "3"], "--setting"),
        (["--setting", "1", "--draw"], "--draw"),
        (["--setting", "1", "--sizes", "20", "0"], "argument --sizes: 0 is not a positive whole number"),
        (["--setting", "1", "--sizes", "-20"], "argument --sizes"),
        (["--setting", "1", "--sizes", "2.5"], "argument --sizes: 2.5 is not"),
        (["--setting", "1", "--sizes", "20000"], "argument --sizes: 20000 is more than 10000"),
        (["--setting", "1", "--sizes"], "argument --sizes"),
        (["--setting", "1", "--models", "lstm"], "argument --models: 'lstm' is no model of setting 1; it must be one"),
        (["--setting", "1", "--models", "tanh"], "argument --models: 'tanh' is no model of setting 1"),
        (["--setting", "2", "--jobs", "0"], "argument --jobs: 0 is not a positive whole number"),
        (["--setting", "2", "--seed", "x"], "argument --seed"),
        (["--setting", "2", "--max-steps", "0"], "argument --max-steps"),
        (["--setting", "2", "--device", "tpu"], "argument --device"),
        (["--setting", "2", "--figures", "x"], "--figures goes with --draw"),
        (["--draw", "--sizes", "20"], "--draw draws all that is finished"),
    ],
)
def test_options_that_make_no_sense_are_refused(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        run.main([*arguments, "--out", str(tmp_path / "out")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_gpu_that_is_not_there_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert run.main(["--setting", "1", "--device", "cuda", "--out", str(tmp_path / "out")]) == 1
    assert capsys.readouterr().err.startswith("error: --device is 'cuda', but torch finds no GPU")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("arguments", [["--setting", "1"], ["--draw"]])
def test_results_that_cannot_be_used_end_it_with_one_line(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / run.MARK).touch()
    (tmp_path / "setting1.jsonl").write_text("no result\n")
    assert run.main([*arguments, "--out", str(tmp_path)]) == 1
    error = capsys.readouterr().err
    assert error.startswith("error: ") and "line 1 is no result" in error and error.count("\n") == 1
    assert (tmp_path / "setting1.jsonl").read_text() == "no result\n"


def test_a_folder_with_other_files_is_left_alone(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    assert run.main(["--setting", "1", "--out", str(tmp_path)]) == 1
    assert "holds other files" in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_nothing_to_draw_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run.main(["--draw", "--out", str(tmp_path / "none")]) == 1
    assert "has no finished points to draw" in capsys.readouterr().err


# --- the demo


def test_the_table_has_a_cell_for_every_model_and_size() -> None:
    lines = [
        line("dpfp-1", 60, 0.0),
        line("linear", loss=None),
        line("linear", 60, 0.1),
        line("linear", 60, 0.4, seed=2),
    ]
    lines.append(line("linear", 60, 0.2, seed=3))
    rows = report.loss_table([results._read(value) for value in lines]).splitlines()
    assert len(set(map(len, rows))) == 1
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert cells[0] == ["model", "S = 20", "S = 60"]
    assert cells[2:] == [["linear (ELU + 1)", "not a number", "0.2000"], ["DPFP-1", "", "< 0.001"]]


def demo_results(out: Path) -> None:
    """Lines for all points of the demo: DPFP-1 fails above S = 100, the linear model above 20, the sum rule always."""
    highest = {"softmax": 1_000, "linear": 20, "dpfp-1": 100, "sum-dpfp-1": 0, "delta-dpfp-1": 1_000}
    for point in demo.POINTS:
        loss = 0.0005 if point.size <= highest[point.model] else 0.125
        results.append_result(
            results.file_of(out, point.setting), line(point.model, point.size, loss, setting=point.setting)
        )


def test_the_demo_ends_in_two_figures_a_table_and_what_they_show(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / demo.MARK).touch()
    demo_results(tmp_path)
    assert demo.main(["--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"{len(demo.POINTS)} of {len(demo.POINTS)} points: done before" in shown
    rows = {row.split("|")[1].strip(): row.split("|")[2:-1] for row in shown.splitlines() if row.startswith("|")}
    assert [cell.strip() for cell in rows["DPFP-1"]] == ["< 0.001", "< 0.001", "< 0.001", "0.1250"]
    assert [cell.strip() for cell in rows["delta rule, DPFP-1"]] == ["< 0.001"]
    assert (
        "Above 0.001: softmax at none of these sizes, linear (ELU + 1) makes errors from S = 60 on, "
        "DPFP-1 makes errors from S = 140 on." in shown
    )
    assert "ends at 0.1250; the delta rule, which replaces it, at < 0.001." in shown
    drawn = ["synthetic-figure2.png", "synthetic-figure3.png"]
    assert sorted(path.name for path in tmp_path.glob("*.png")) == drawn
    assert all(f"{name}\n" in shown for name in drawn)


def test_the_demo_shows_a_loss_that_was_no_number() -> None:
    read = [results._read(line("linear", size, loss)) for size, loss in ((20, None), (60, 0.5))]
    assert demo.capacity_sentence(read) == "Above 0.001: linear (ELU + 1) makes errors from S = 20 on."
    both = [results._read(line(f"{rule}-dpfp-1", loss=None, setting=2)) for rule in ("sum", "delta")]
    assert demo.rules_sentence(both).count("not a number") == 2


@pytest.mark.parametrize("arguments", [["--jobs", "0"], ["--jobs", "x"], ["--sizes", "20"]])
def test_options_that_make_no_sense_are_refused_by_the_demo(
    arguments: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit, match="2"):
        demo.main([*arguments, "--out", str(tmp_path / "out")])
    assert arguments[0] in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# --- all of it


def command(*arguments: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-u", str(EXAMPLES / "synthetic" / "run.py"), *map(str, arguments)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=ROOT.parent,  # it works from anywhere
    )


def finished(path: Path) -> list[tuple[str, int]]:
    return [(result.point.model, result.point.size) for result in results.read_results(path).values()]


@pytest.mark.slow
def test_an_interrupted_grid_goes_on_where_it_was(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    arguments = ["--setting", 1, "--models", "softmax", "linear", "--out", out, "--jobs", 2, "--max-steps", 200]
    # Points of 6 keys are done in a second, those of 300 after seconds.
    interrupted = command(*arguments, "--sizes", 6, 300)
    assert interrupted.stdout is not None
    for text in interrupted.stdout:
        if text.startswith("[2/4]"):
            break
    interrupted.send_signal(signal.SIGTERM)
    _, error = interrupted.communicate(timeout=60)
    assert interrupted.returncode == 130 and "goes on from here" in error
    with steps.claim(out, run.MARK):  # a worker that still ran would hold it
        pass
    before = (out / "setting1.jsonl").read_bytes()
    assert len(finished(out / "setting1.jsonl")) == 2

    with (out / "setting1.jsonl").open("ab") as file:
        file.write(before.splitlines()[0][:50])
    second = command(*arguments, "--sizes", 6, 8)
    shown, error = second.communicate(timeout=300)
    assert second.returncode == 0, error
    assert "ended with half a line, which is dropped" in shown
    assert "2 of 4 points: done before" in shown and "[2/2]" in shown
    assert (out / "setting1.jsonl").read_bytes().startswith(before)
    assert sorted(finished(out / "setting1.jsonl")) == [("linear", 6), ("linear", 8), ("softmax", 6), ("softmax", 8)]

    assert run.main([*map(str, arguments), "--sizes", "6", "8"]) == 0
    assert capsys.readouterr().out == "4 of 4 points: done before\n"


@pytest.mark.slow
def test_a_worker_that_dies_ends_the_grid_with_its_point_and_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = tmp_path / "worker.py"
    broken.write_text("import sys\ninput()\nsys.exit('out of memory')\n")
    monkeypatch.setattr(grid, "WORKER", broken)
    with pytest.raises(steps.StepError, match=r"(?s)the process for setting 1, softmax, S = 6 ended.*out of memory"):
        grid.Grid(tmp_path, 1, sys.stdout).run([training.Point(1, "softmax", 6)])
    assert not (tmp_path / "setting1.jsonl").exists()


@pytest.mark.slow
def test_a_worker_ends_when_nobody_reads_it_any_more() -> None:
    read, write = os.pipe()
    worker = subprocess.Popen(
        [sys.executable, str(grid.WORKER)], stdin=subprocess.PIPE, stdout=write, stderr=subprocess.PIPE
    )
    os.close(write)
    assert worker.stdin is not None and worker.stderr is not None
    # Far above its capacity: it would go on for thousands of steps.
    worker.stdin.write((json.dumps(training.Point(1, "linear", 100).__dict__) + "\n").encode())
    worker.stdin.flush()
    assert os.read(read, 1)
    os.close(read)
    started = time.monotonic()
    assert worker.wait(timeout=120) == 1 and time.monotonic() - started < 60
    assert worker.stderr.read() == b""
