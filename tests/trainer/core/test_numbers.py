"""Every number that comes from outside is looked at where it enters."""

import math
from decimal import Decimal
from fractions import Fraction

import numpy as np
import pytest
import torch

from rollgym.trainer.core.errors import InvalidNumberError
from rollgym.trainer.core.numbers import LARGEST, finite_number, not_finite


@pytest.mark.parametrize(
    "value",
    [
        1,
        0.5,
        np.float32(0.5),
        np.int64(2),
        torch.tensor(0.5),
        np.array(3.0),
        Fraction(1, 2),
        Decimal("0.1"),
    ],
)
def test_numbers_of_every_library_are_numbers(value):
    assert finite_number(value, "it") == float(value)


@pytest.mark.parametrize(
    "value",
    [
        *(math.nan, math.inf, -math.inf, np.float64("nan"), torch.tensor(math.nan), 10**400, 2 * LARGEST),
        pytest.param(10**5000, id="huge"),
        *(True, False, np.True_, torch.tensor(True), "1.0", b"1", None, [1.0], {}, 1j, object()),
        *(np.array([1.0, 2.0]), torch.ones(2), "9" * 1_000_000),
    ],
)
def test_what_is_no_number_is_refused_by_name(value):
    with pytest.raises(InvalidNumberError, match=r"^the reward ") as refused:
        finite_number(value, "the reward")
    assert len(str(refused.value)) < 200


def test_tensors_that_are_not_finite_are_found_however_deep():
    state = {
        "model": {"a": torch.ones(2), "b": torch.tensor([1.0, math.nan])},
        "optimizer": {"state": {0: {"exp_avg": torch.tensor(math.inf), "step": torch.tensor(3)}}, "lr": 0.1},
        "groups": [{"lr": math.inf}, {"betas": (0.9, 0.95)}],
    }
    assert list(not_finite(state)) == ["model.b", "optimizer.state.0.exp_avg", "groups.0.lr"]
