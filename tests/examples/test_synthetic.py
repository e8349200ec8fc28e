"""The synthetic experiments: what is drawn, the memories against the reference, when training ends, what is kept."""

import json
import math
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from common import json_lines, steps
from synthetic import demo, figures, grid, memories, models, report, results, retrieval, training
from synthetic import run as program
from synthetic.feature_figure import dpfp_surfaces
from torch import Tensor

from tests.conftest import DEVICE

from .conftest import EXAMPLES, interrupt

SIZE, DIM = 7, 6


@pytest.fixture(autouse=True)
def seed() -> None:
    torch.manual_seed(0)


def test_setting_1_draws_every_key_and_value_once_and_setting_2_each_pair_anew() -> None:
    once, anew = retrieval.draw_sequences(1, SIZE, 50), retrieval.draw_sequences(2, SIZE, 2_000)
    for numbers in (once.keys, once.values):
        assert torch.equal(numbers.sort(dim=1).values, torch.arange(SIZE).expand(50, SIZE))
        assert len({tuple(row.tolist()) for row in numbers}) > 40  # each in an order of its own
    for numbers in (anew.keys, anew.values):
        assert numbers.shape == (2_000, 2 * SIZE)
        assert ((numbers.flatten().bincount(minlength=SIZE) - 4_000).abs() < 293).all()  # five standard deviations
    for drawn in (once, anew):
        assert abs((drawn.keys == drawn.values).float().mean() - 1 / SIZE) < 0.1


@pytest.mark.parametrize(("setting", "share"), [(1, 1 / SIZE), (2, (1 + (2 * SIZE - 1) / SIZE) / (2 * SIZE))])
def test_a_query_asks_for_the_value_that_was_written_last(setting: int, share: float) -> None:
    sequences = retrieval.draw_sequences(setting, SIZE, 300)
    queries, targets = retrieval.draw_queries(sequences)
    for row in range(300):
        memory = dict(zip(sequences.keys[row].tolist(), sequences.values[row].tolist(), strict=True))
        assert memory[queries[row].item()] == targets[row].item()
    # A key is chosen as often as the sequence has it.
    assert math.isclose((queries == sequences.keys).float().mean(), share, abs_tol=0.03)


def pairs(length: int) -> SimpleNamespace:
    torch.manual_seed(1)
    drawn = {"k": torch.randn(3, length, DIM), "q": torch.randn(3, 4, DIM), "beta": torch.rand(3, length)}
    leaves = {name: x.double().requires_grad_() for name, x in drawn.items()}
    return SimpleNamespace(**leaves, values=torch.randint(SIZE, (3, length)))


def by_definition(kind: str, memory: Any, p: SimpleNamespace) -> Tensor:
    """A pair at a time."""
    v = F.one_hot(p.values, SIZE).double()
    if kind == "softmax":
        return (p.q @ p.k.transpose(1, 2) / math.sqrt(DIM)).softmax(-1) @ v
    phi_q, phi_k = (phi[:, :, 0] for phi in memory.feature_map(p.q[:, :, None], p.k[:, :, None]))
    eps = memory.feature_map.sum_eps
    if kind == "delta":
        phi_q, phi_k = (phi / (phi.sum(-1, keepdim=True) + eps) for phi in (phi_q, phi_k))
    state = torch.zeros(3, phi_k.shape[-1], SIZE, dtype=torch.float64)
    for t in range(v.shape[1]):
        k, written = phi_k[:, t, :, None], v[:, t, None]
        if kind != "sum":
            written = p.beta[:, t, None, None] * (written - k.transpose(1, 2) @ state)
        state = state + k * written
        if kind == "capped":
            state = state / state.flatten(1).norm(dim=1).clamp(min=1)[:, None, None]
    read = phi_q @ state
    if kind == "sum":
        return read / ((phi_q @ phi_k.sum(1)[:, :, None]) + eps)
    return F.layer_norm(read, (SIZE,)) if getattr(memory, "layer_norm", False) else read


@pytest.mark.parametrize("length", [1, 3 * memories.CHUNK + 1])
@pytest.mark.parametrize("name", [*models.MODELS[1], *models.MODELS[2]])
def test_a_memory_reads_what_its_definition_reads_with_the_same_gradients(name: str, length: int) -> None:
    model = (models.MODELS[1] | models.MODELS[2])[name]
    memory = model.build(DIM).double().eval()  # in evaluation FAVOR+ keeps its features
    p = pairs(length)
    inputs = [p.k, p.q, p.beta] if memory.has_strength else [p.k, p.q]
    found: list[list[Tensor]] = []
    beta = p.beta if memory.has_strength else None
    for y in (memory(p.k, p.q, beta, p.values, SIZE), by_definition(model.memory, memory, p)):
        weighted = y * torch.linspace(-1, 2, y.numel(), dtype=torch.float64).view_as(y)
        found.append([y, *torch.autograd.grad(weighted.sum(), inputs)])
    for x, y in zip(*found, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-11)


def test_a_retriever_is_the_papers_projections_of_embedding_and_value() -> None:
    """k = W_K [e(k); v], q = W_Q e(q), beta = sigmoid(W_beta [e(k); v]), built in full."""
    retriever = models.Retriever(models.MODELS[2]["delta-dpfp-1"], SIZE, DIM).double()
    sequences = retrieval.draw_sequences(2, SIZE, 5)
    queries, _ = retrieval.draw_queries(sequences)
    x = torch.cat([retriever.embedding[sequences.keys], F.one_hot(sequences.values, SIZE).double()], dim=-1)
    k, beta = x @ retriever.key_weight.t(), (x @ retriever.strength_weight.t()).sigmoid()[:, :, 0]
    q = retriever.embedding[queries] @ retriever.query_weight.t()
    expected = retriever.memory(k, q, beta, sequences.values, SIZE)
    torch.testing.assert_close(retriever(sequences, queries), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    ("losses", "end"),
    [
        ([0.5, 0.1, 0.00099, 0.0], ("solved", 300)),
        ([0.5, 0.001], (None, 200)),  # not below the target
        ([0.5, 0.2] + [0.3] * 20, ("no progress", 1_200)),
        ([0.5] + [0.499] * 20, ("no progress", 1_100)),  # less than a hundredth is none
        ([0.5] + [0.4999 - 0.001 * i for i in range(20)], (None, 2_100)),  # slow, but progress
        ([0.5, math.nan, 0.1], ("not a number", 200)),
        ([0.5 - 0.01 * i for i in range(30)], ("limit", 2_500)),
    ],
)
def test_training_ends_at_the_target_without_progress_or_at_the_limit(losses: list, end: tuple) -> None:
    rule = training.StopRule(max_steps=2_500)
    judged = ((rule.judge(100 * number, loss), 100 * number) for number, loss in enumerate(losses, 1))
    reason, step = next((one for one in judged if one[0]), (None, 100 * len(losses)))
    best = min(loss for loss in losses[: step // 100] if math.isfinite(loss))  # by small steps, too
    assert (reason, step, rule.best_loss, rule.best_step) == (*end, best, 100 * (losses.index(best) + 1))


@pytest.mark.parametrize(("evaluate_length", "pairs"), [("", 10), ("S", 5)])
def test_an_evaluation_is_the_mean_over_all_queries_whatever_its_batches(
    evaluate_length: str, pairs: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    point = training.Point(2, "sum-dpfp-1", 5, evaluate_length=evaluate_length)
    retriever = models.Retriever(models.MODELS[2]["sum-dpfp-1"], 5)
    torch.manual_seed(3)
    losses = []
    for s in [retrieval.draw_sequences(2, 5, 1, length=pairs) for _ in range(20)]:
        memory = dict(zip(s.keys[0].tolist(), s.values[0].tolist(), strict=True))
        off = retriever(s, torch.tensor([list(memory)])) - F.one_hot(torch.tensor([list(memory.values())]), 5)
        losses += (0.5 * off.square().sum(-1))[0].tolist()
    monkeypatch.setattr(training, "AT_ONCE", 1)  # one sequence at a time
    torch.manual_seed(3)
    assert math.isclose(training.evaluate(retriever, point), sum(losses) / len(losses), rel_tol=1e-5)


def test_training_is_repeatable_and_learns(monkeypatch: pytest.MonkeyPatch) -> None:
    first, again = (training.train_point(training.Point(1, "softmax", 6)) for _ in range(2))
    other = training.train_point(training.Point(1, "softmax", 6, seed=2, max_steps=200))
    assert first["stopped"] == "solved" and first["best_loss"] < training.TARGET
    assert first["curve"] == again["curve"] and other["curve"] != first["curve"][:2]
    assert first["steps"] == first["best_step"] == first["curve"][-1][0] == 100 * len(first["curve"])
    # A loss that is no number is kept as None.
    monkeypatch.setattr(training, "evaluate", lambda retriever, point: math.nan)
    result = training.train_point(training.Point(1, "softmax", 3, max_steps=2))
    assert (result["stopped"], result["best_loss"], result["curve"]) == ("not a number", None, [[2, None]])
    json.dumps(result, allow_nan=False)


def test_a_points_key_changes_with_all_that_its_result_depends_on(monkeypatch: pytest.MonkeyPatch) -> None:
    base: dict[str, Any] = {"setting": 1, "model": "linear", "size": 20}
    changes = [{}, {"model": "dpfp-1"}, {"size": 21}, {"seed": 2}, {"max_steps": 7}, {"device": "cuda"}]
    changes.append({"evaluate_length": "S"})
    keys = [training.Point(**(base | change)).key for change in changes]
    for constant in ("TARGET", "PATIENCE", "PROGRESS", "BATCH", "EVALUATE_EVERY", "VERSION"):
        monkeypatch.setattr(training, constant, 17)
        keys.append(training.Point(**base).key)
    assert len(set(keys)) == len(keys)


def entry(model: str = "linear", size: int = 20, loss: float | None = 0.25, setting: int = 1, **other: Any) -> dict:
    point = training.Point(setting, model, size, **other)
    end = {"best_loss": loss, "stopped": "not a number" if loss is None else "no progress"}
    course = {"best_step": 100, "steps": 1_100, "curve": [[100, loss], [200, loss]], "seconds": 2.0}
    return {"key": point.key, "point": dict(point.__dict__), **end, **course}


def append(folder: Path, *entries: dict[str, Any]) -> None:
    for value in entries:
        json_lines.append_line(results.file_of(folder, value["point"]["setting"]), value)


def test_results_come_back_as_they_were_appended_and_half_a_line_is_replaced(tmp_path: Path, capsys) -> None:
    path, good = results.file_of(tmp_path, 1), entry()
    assert results.read_results(path) == {}
    append(tmp_path, good, entry("favor-64", loss=None), entry("dpfp-3") | {"key": "of another way of training"})
    linear, favor = results.read_results(path).values()
    assert (linear.point.model, linear.best_loss, linear.curve) == ("linear", 0.25, [(100, 0.25), (200, 0.25)])
    assert (favor.point.model, favor.best_loss) == ("favor-64", None)

    whole = path.read_bytes()
    path.write_bytes(whole + json.dumps(entry("dpfp-1")).encode()[:-30])
    assert list(results.read_results(path).values()) == [linear, favor]
    assert path.stat().st_size > len(whole)  # reading changes nothing
    append(tmp_path, entry("dpfp-2"))
    assert path.read_bytes().startswith(whole)
    assert [result.point.model for result in results.read_results(path).values()] == ["linear", "favor-64", "dpfp-2"]

    # A line that is no result ends the program with its number.
    (tmp_path / program.MARK).touch()
    changes = ({}, {"point": good["point"] | {"model": "lstm"}}, {"curve": [[1]]}, {"best_loss": "low"})
    for broken in ("no json", "", *(json.dumps(good | change) for change in changes)):
        path.write_text(text := "\n".join([json.dumps(good), broken, json.dumps(entry("dpfp-1"))]) + "\n")
        assert program.main(["--draw", "--out", str(tmp_path)]) == 1
        assert capsys.readouterr().err.startswith(f"error: {path}, line 2 ") and path.read_text() == text


@pytest.mark.skipif(DEVICE == ["--cpu"], reason="FASTWEIGHTS_TEST_DEVICE is not cuda")
@pytest.mark.parametrize(("setting", "model"), [(s, model) for s in models.MODELS for model in models.MODELS[s]])
def test_on_a_gpu_recorded_steps_train_as_steps_one_by_one(setting, model, monkeypatch: pytest.MonkeyPatch) -> None:
    point = training.Point(setting, model, 20, max_steps=100, device="cuda")
    recorded = training.train_point(point)["best_loss"]
    monkeypatch.setattr(training, "UNRECORDED", point.max_steps)
    assert training.train_point(point)["best_loss"] == pytest.approx(recorded, rel=1e-2)


def test_a_table_shows_the_median_of_the_seeds_or_how_far_they_lie_apart() -> None:
    losses = {"dpfp-1": (0.2, 0.21, 0.2099), "dpfp-2": (0.0005, 0.0009, 0.0001), "dpfp-3": (0.03, 0.0002, 0.01)}
    found = [entry(name, loss=loss, seed=n) for name, each in losses.items() for n, loss in enumerate(each, 1)]
    found.append(entry("favor-64", loss=None))
    read = [
        results.Result(training.Point(**e.pop("point")), **{k: v for k, v in e.items() if k != "key"}) for e in found
    ]
    _, *cells = report.loss_table(read).splitlines()[2].strip("| ").split("|")
    assert [cell.strip() for cell in cells] == ["0.2099", "< 0.001", "< 0.001 to 0.0300", "not a number"]


def test_learning_curves_have_the_seeds_median_and_range_and_the_last_losses_of_trainings_that_ended() -> None:
    trainings = [[(100, 0.5), (200, 0.1)], [(100, 0.3), (200, 0.2), (300, 0.0)], [(100, 0.4), (200, None)]]
    found = [
        results.Result(training.Point(2, "tanh", 20, seed), 0.1, 100, 300, "limit", curve, 1.0)
        for seed, curve in enumerate(trainings, 1)
    ]
    drawn = figures._learning_curves(2, 20, found)
    assert drawn == {"tanh": [(100, 0.4, 0.3, 0.5), (200, 0.2, 0.1, 0.4), (300, 0.1, figures.SMALLEST, 0.4)]}


def test_of_four_features_of_two_numbers_one_is_above_zero() -> None:
    """Eq. 33 to 36 of the paper, r(+-k_1) r(+-k_2)."""
    k, n, found = dpfp_surfaces()
    products = [a.relu() * b.relu() for a, b in ((k, -n), (n, k), (-k, n), (-n, -k))]
    assert torch.equal(found, torch.stack(products))
    assert ((found > 0).sum(0) == ((k != 0) & (n != 0))).all()


@pytest.mark.slow
def test_figures_are_of_any_part_of_the_grid_and_of_a_seed_the_point_that_may_go_on_longest_counts(tmp_path, capsys):
    """A quick look with --max-steps, or the same seed on a GPU, is not to move the median."""
    lines = [entry(loss=0.1), entry(loss=0.5, max_steps=100), entry(loss=0.4, device="cuda"), entry(loss=0.2, seed=2)]
    lines += [entry("dpfp-1", 60, 0.6), entry("dpfp-1", 60, 0.3, max_steps=30_000, device="cuda")]
    for values in (lines, [*lines[::-1], entry("tanh", 40, 0.0, setting=2), entry("favor-64", loss=None)]):
        results.file_of(tmp_path, 1).unlink(missing_ok=True)
        append(tmp_path, *values)
        drawn = program.draw(tmp_path, tmp_path / "figures")
        shown = capsys.readouterr().out
        assert (
            "Setting 1" in shown and "0.1000 to 0.2000" in shown and "0.3000" in shown and ": 3 of the points" in shown
        )
    assert "Setting 2" in shown and "| FAVOR+, 64 features |" in shown
    assert [path.name for path in drawn] == [f"synthetic-figure{number}.png" for number in (1, 2, 3, 4, 5)]
    assert all(path.read_bytes().startswith(b"\x89PNG") for path in drawn)


def test_the_demo_ends_in_two_figures_a_table_and_what_they_show(tmp_path: Path, capsys) -> None:
    """DPFP-1 fails above S = 100, the linear model above 20, the sum rule always."""
    (tmp_path / demo.MARK).touch()
    highest = {"softmax": 1_000, "linear": 20, "dpfp-1": 100, "sum-dpfp-1": 0, "delta-dpfp-1": 1_000}
    for point in demo.POINTS:
        loss = 0.0005 if point.size <= highest[point.model] else 0.125
        append(tmp_path, entry(point.model, point.size, loss, setting=point.setting))
    assert demo.main(["--out", str(tmp_path)]) == 0
    shown = capsys.readouterr().out
    assert f"{len(demo.POINTS)} of {len(demo.POINTS)} points: done before" in shown
    rows = [[cell.strip() for cell in row.split("|")[1:-1]] for row in shown.splitlines() if row.startswith("|")]
    assert [row[-1] for row in rows[2:6]] == ["< 0.001", "< 0.001", "< 0.001", "0.1250"] and rows[0][-1] == "DPFP-1"
    assert rows[-3::2] == [["S", "sum rule, DPFP-1", "delta rule, DPFP-1"], ["20", "0.1250", "< 0.001"]]
    above = "Above 0.001: softmax at none of these sizes, linear (ELU + 1) makes errors from S = 60 on, DPFP-1 makes "
    assert f"{above}errors from S = 140 on." in shown
    assert "ends at 0.1250; the delta rule, which replaces it, at < 0.001." in shown
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["synthetic-figure2.png", "synthetic-figure3.png"]


@pytest.mark.slow
def test_an_interrupted_grid_goes_on_where_it_was(tmp_path: Path, capsys, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "out"
    path = results.file_of(out, 1)
    arguments = ["--setting", "1", "--models", "softmax", "linear", "--out", str(out), "--max-steps", "100"]
    # Points of 6 keys have less than a hundredth of the work of those of 4,000.
    large = [*arguments, "--sizes", "6", "4000", "--jobs", "2"]
    lines = interrupt(EXAMPLES / "synthetic" / "run.py", large, lambda lines: len(lines) == 2)
    assert [line[:5] for line in lines] == ["[1/4]", "[2/4]"]  # a log has nothing else
    with steps.claim(out, program.MARK):  # a worker that still ran would hold it
        pass
    before = path.read_bytes()
    assert before.count(b"\n") == 2
    path.write_bytes(before + before[:50])
    again = [*arguments, "--sizes", "6", "8", "--jobs", "1"]
    with monkeypatch.context() as patch:
        patch.setattr(sys.stdout, "isatty", lambda: True)
        assert program.main(again) == 0
    shown = capsys.readouterr().out
    half, done = shown.splitlines()[:2]
    assert "ended with half a line, which is dropped" in half and done == "2 of 4 points: done before"
    assert "[1/2]" in shown and "[2/2]" in shown
    assert "S = 8: begins\n> 0 waiting, about " in shown and "\x1b[2F\x1b[J" in shown
    assert path.read_bytes().startswith(before)
    finished = [(result.point.model, result.point.size) for result in results.read_results(path).values()]
    assert sorted(finished) == [("linear", 6), ("linear", 8), ("softmax", 6), ("softmax", 8)]

    assert program.main(again) == 0
    assert capsys.readouterr().out == "4 of 4 points: done before\n"


def test_a_worker_that_dies_ends_the_grid_with_its_point_and_its_last_words(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "worker.py").write_text("import sys\ninput()\nsys.exit('out of memory')\n")
    monkeypatch.setattr(grid, "WORKER", tmp_path / "worker.py")
    with pytest.raises(steps.StepError, match=r"(?s)the process for setting 1, softmax, S = 6 ended.*out of memory"):
        grid.Grid(tmp_path, 1, sys.stdout).run([training.Point(1, "softmax", 6)])
    assert not (tmp_path / "setting1.jsonl").exists()
