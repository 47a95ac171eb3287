"""What verifiers of this folder share."""

from contextlib import closing

import pytest

from rollgym.envs.verifiers.mathematics import MathEnv


@pytest.fixture(scope="module")
def hasty():
    pytest.importorskip("math_verify")
    with closing(MathEnv(backend="math-verify", timeout_s=1.0)) as verifier:
        yield verifier
