import pytest

from deploy.tests.fleet import Fleet


@pytest.fixture(scope="session")
def fleet() -> Fleet:
    return Fleet()
