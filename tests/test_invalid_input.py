"""The check that a setting is a finite number within its limits."""

import math

import numpy as np
import pytest

from fairseq_fastweights.invalid_input import InvalidInput, check_number


@pytest.mark.parametrize(
    ("value", "limits"),
    [
        (0, {}),
        (-1.5, {}),
        (0, {"least": 0, "most": 1}),
        (1.0, {"least": 0, "most": 1}),
        (1e-9, {"above": 0}),
        (0.999, {"least": 0, "below": 1}),
        (np.float32(0.5), {"least": 0}),
        (np.int64(3), {"least": 1, "whole": True}),
        (10**400, {"least": 1, "whole": True}),
    ],
)
def test_a_number_within_its_limits_passes(value, limits):
    check_number("x", value, **limits)


@pytest.mark.parametrize(
    ("value", "limits", "allowed"),
    [
        (math.nan, {}, "a finite number"),
        (math.inf, {"least": 0}, "a finite number of at least 0"),
        (-math.inf, {"most": 0}, "a finite number of at most 0"),
        (math.nan, {"least": 0, "most": 1}, "a finite number from 0 to 1"),
        (-1, {"least": 0, "most": 1}, "from 0 to 1"),
        (2, {"least": 0, "most": 1}, "from 0 to 1"),
        (0, {"above": 0}, "above 0"),
        (1, {"least": 0, "below": 1}, "at least 0 and below 1"),
        (True, {}, "a finite number"),
        (10**400, {"least": 0}, "a finite number of at least 0"),
        (None, {}, "a finite number"),
        ("1", {}, "a finite number"),
        (1j, {}, "a finite number"),
        (1.0, {"least": 1, "whole": True}, "an integer of at least 1"),
        (0, {"least": 1, "whole": True}, "at least 1"),
        (np.float64("nan"), {}, "a finite number"),
    ],
)
def test_any_other_is_refused_by_name(value, limits, allowed):
    with pytest.raises(InvalidInput) as error:
        check_number("x", value, **limits)
    assert str(error.value) == f"x is {value!r}; it must be {allowed}"
