"""Which runs take structured outputs of agents, and why others do not."""

import pytest

from rollgym.trainer.assembly.agents import why_unstructured
from rollgym.trainer.config.load import load_settings


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ([], ""),
        (["rollout.top_p=0.9"], ""),
        (["algorithm.proximal=behaviour"], "algorithm.proximal or algorithm.correction compares"),
        (["algorithm.correction={kind: band}"], "take proximal 'recomputed' without correction"),
    ],
)
def test_runs_that_compare_log_probabilities_at_sampling_take_none(overrides, why):
    settings = load_settings(None, ["tasks=[{env_id: FrozenLake-v0}]", *overrides])
    assert why in why_unstructured(settings)
    assert bool(why) == bool(why_unstructured(settings))
