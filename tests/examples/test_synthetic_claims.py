"""What Schlag et al. (2021) say of their synthetic experiments, held against the committed results.

Sec. 6.1 and Appendix D. A claim that does not come out is not here but in docs/synthetic.md, with the curves.
"""

from __future__ import annotations

from importlib import import_module

import pytest
import torch

from .conftest import EXAMPLES

models, results, retrieval, training = (
    import_module(f"synthetic.{name}") for name in ("models", "results", "retrieval", "training")
)

REQUIRED = {1: (20, 60, 100, 140, 200, 300, 400, 500, 600), 2: (20, 60, 100, 140, 180)}
DPFP = {"dpfp-1": 128, "dpfp-2": 256, "dpfp-3": 384}
"""The capacity of each."""
FILES = [results.file_of(EXAMPLES / "synthetic" / "results", setting) for setting in REQUIRED]
FINISHED = [result for file in FILES for result in results.read_results(file).values()]
FIRST = {(r.point.setting, r.point.model, r.point.size): r for r in FINISHED if r.point.seed == 1}


def loss(*point: object) -> float:
    """The lowest evaluation loss of a setting, model and size."""
    best = FIRST[point].best_loss
    return float("inf") if best is None else best


def test_all_models_were_trained_at_all_sizes_to_the_end_that_the_paper_names() -> None:
    """Below the target, or without progress: not at the limit of steps, and with numbers."""
    assert {(s, model, size) for s in REQUIRED for model in models.MODELS[s] for size in REQUIRED[s]} <= FIRST.keys()
    assert {result.stopped for result in FIRST.values()} == {"solved", "no progress"}
    assert results.one_of_each_seed(FINISHED) == FINISHED


# --- Setting 1


def test_the_linear_model_holds_20_pairs_and_makes_errors_from_60_on() -> None:
    """S = 40 was not asked for; with two of three seeds it is held."""
    assert loss(1, "linear", 20) < training.TARGET
    rest = [loss(1, "linear", size) for size in REQUIRED[1][1:]]
    assert rest[0] > 10 * training.TARGET and rest == sorted(rest)
    assert rest[1] > 0.1  # at S = 100


@pytest.mark.parametrize("model", DPFP)
def test_dpfp_holds_three_quarters_of_its_capacity_and_breaks_above_it(model: str) -> None:
    capacity = DPFP[model]
    assert all(loss(1, model, size) < training.TARGET for size in REQUIRED[1] if size <= 0.75 * capacity)
    above = [loss(1, model, size) for size in REQUIRED[1] if size > capacity]
    assert above[0] > 10 * training.TARGET and above == sorted(above)


@pytest.mark.parametrize("size", REQUIRED[1])
def test_a_larger_capacity_is_never_worse_and_no_memory_better_than_softmax(size: int) -> None:
    """Down to the target, where training ends."""
    by_capacity = [max(loss(1, model, size), training.TARGET) for model in ("linear", *DPFP)]
    assert by_capacity == sorted(by_capacity, reverse=True)
    best = min(loss(1, name, size) for name in models.MODELS[1] if name != "softmax")
    assert max(loss(1, "softmax", size), training.TARGET) <= max(best, training.TARGET)


def test_favor_never_comes_to_the_target_but_is_better_with_more_features() -> None:
    favor = [[loss(1, f"favor-{m}", size) for m in (64, 128, 512)] for size in REQUIRED[1]]
    assert min(map(min, favor)) > 10 * training.TARGET
    for size, (few, more, most) in zip(REQUIRED[1], favor, strict=True):
        assert few > more > most or size > 200


def test_softmax_holds_400_pairs_and_struggles_from_500_on() -> None:
    assert all(loss(1, "softmax", size) < training.TARGET for size in REQUIRED[1] if size <= 400)
    assert training.TARGET < loss(1, "softmax", 500) < loss(1, "softmax", 600) < 0.1


def weights(steps: int, size: int) -> dict[str, tuple[float, float]]:
    """What FAVOR+ with 64 features, trained for `steps`, and exact attention of its queries and keys weigh values with.

    For each the weight of the right value and the sum of all weights' squares, means over all queries.
    """
    point = training.Point(1, "favor-64", size)
    torch.manual_seed(point.seed)
    retriever = models.Retriever(models.MODELS[1][point.model], size)
    optimizer = torch.optim.Adam(retriever.parameters(), lr=training.LEARNING_RATE)
    for _ in range(steps):
        training.train_step(retriever, optimizer, point)
    found = {}
    favor, exact = retriever.memory, models.MODELS[1]["softmax"].build()
    for name, memory in (("favor", favor), ("exact", exact)):
        retriever.memory = memory
        torch.manual_seed(1)
        sequences = retrieval.draw_sequences(1, size, training.EVALUATED)
        queries, values, _ = retrieval.all_queries(sequences)
        with torch.no_grad():
            # Values are one-hot, and each is there once: these are the weights.
            read = retriever.eval()(sequences, queries)
        found[name] = (read.gather(2, values[..., None]).mean().item(), read.square().sum(2).mean().item())
    return found


def test_favor_puts_its_weight_on_wrong_values_before_any_training() -> None:
    (favor, favor_square), (_, exact_square) = weights(0, 300).values()
    assert 0.3 < favor_square < 0.5 and 0.2 < exact_square < 0.35 and favor < 0.005


@pytest.mark.slow
def test_favor_does_not_find_what_exact_attention_of_its_keys_would() -> None:
    (favor, _), (exact, _) = weights(600, 20).values()
    assert exact > 0.95 and 0.4 < favor < 0.6


# --- Setting 2


@pytest.mark.parametrize("size", REQUIRED[2])
def test_the_delta_rule_is_better_than_the_papers_other_rules_of_which_the_sum_fails(size: int) -> None:
    others = [loss(2, name, size) for name in ("sum-dpfp-1", "tanh", "tanh-dpfp-1")]
    assert loss(2, "delta-dpfp-1", size) < min(others)
    assert others[0] > 0.1


@pytest.mark.parametrize("model", ["tanh-bare", "tanh-dpfp-1-bare"])
def test_without_layer_normalisation_the_other_memory_holds_few_pairs(model: str) -> None:
    """Which the paper does not try."""
    assert loss(2, model, 20) < training.TARGET
    assert training.TARGET < loss(2, model, 60) < 2 * training.TARGET
    assert min(loss(2, model, size) for size in REQUIRED[2] if size >= 100) > 0.49
