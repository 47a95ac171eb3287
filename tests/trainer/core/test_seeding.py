"""Named streams: equal everywhere, different from one another."""

import subprocess
import sys

from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.core.seeding import MAX_WIRE_SEED, derive_seed, generator


def test_streams_do_not_depend_on_the_process():
    program = "from rollgym.trainer.core.seeding import derive_seed; print(derive_seed(7, 'task', 3))"
    seen = {
        subprocess.run(
            [sys.executable, "-c", program],
            env={"PYTHONHASHSEED": salt},
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        for salt in ("1", "2")
    }
    assert seen == {f"{derive_seed(7, 'task', 3)}\n"}


@given(seed=st.integers(0, 2**60), index=st.integers(0, 10**6))
def test_seeds_fit_the_wire_and_names_matter(seed, index):
    value = derive_seed(seed, "task", index)
    assert 0 <= value < MAX_WIRE_SEED
    assert value != derive_seed(seed, "task", str(index))
    assert value != derive_seed(seed, "task", index + 1)
    assert derive_seed(seed, "ab", "c") != derive_seed(seed, "a", "bc")


def test_a_generator_is_private():
    first = generator(0, "a").random(3).tolist()
    generator(0, "b").random(100)
    assert generator(0, "a").random(3).tolist() == first
