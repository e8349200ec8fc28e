"""How all figures look: names do not lie on one another, and a model has one colour."""

from itertools import combinations

import pytest
from common import figures


@pytest.mark.parametrize(
    ("wanted", "placed"),
    [
        ([0.5], [0.5]),
        ([0.8, 0.2], [0.8, 0.2]),
        ([0.5, 0.5, 0.5], [0.4, 0.5, 0.6]),
        ([0.9, 0.3, 0.34], [0.9, 0.27, 0.37]),  # no others move
        ([0.0, 1.0, 0.98], [0.0, 1.0, 0.9]),  # none leaves the axes
        ([0.0, 0.02, 0.13], [0.0, 0.1, 0.2]),  # a block moves those that it comes to touch
    ],
)
def test_names_lie_apart_and_as_near_as_there_is_room(wanted: list[float], placed: list[float]) -> None:
    assert figures.spread(wanted, 0.1, 0.0, 1.0) == pytest.approx(placed)


def test_no_name_is_written_over_another_or_over_a_point() -> None:
    figure, axes = figures.new_figure()
    figures.draw_points(axes, {"sum": (1, 1), "delta": (1, 1.03, 0.9, 1.2), "gated": (1.01, 1.02), "decay": (9, 2)})
    figure.draw_without_rendering()
    names = [text.get_window_extent() for text in axes.texts]
    assert len(names) == 4 and not any(one.overlaps(other) for one, other in combinations(names, 2))
    dots = axes.transData.transform([(1, 1), (1, 1.03), (1.01, 1.02), (9, 2)])
    assert not any(name.contains(*dot) for name in names for dot in dots)
