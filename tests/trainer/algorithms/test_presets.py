import operator
import re
from pathlib import Path

import pytest
from pydantic import ValidationError

from rollgym.trainer.algorithms.advantage_settings import GaeAdvantage
from rollgym.trainer.algorithms.presets import FORMER_NAMES, PAPERS, PRESETS, resolve_preset
from rollgym.trainer.algorithms.settings import AlgorithmSettings


@pytest.mark.parametrize("name", PRESETS)
def test_presets_read_back_equal(name):
    preset = resolve_preset(name, {})
    assert preset == PRESETS[name]
    assert AlgorithmSettings.model_validate(preset.model_dump(mode="json")) == preset


def test_overrides_merge_into_parts():
    settings = resolve_preset("gigpo", {"kl": {"coefficient": 0.5}, "advantage": {"step_weight": 0.8}})
    assert settings.kl.coefficient == 0.5
    assert settings.kl.estimator == "k3"
    assert settings.advantage.kind == "gigpo"
    assert settings.advantage.step_weight == 0.8
    assert settings.advantage.turn_discount == 0.95


def test_another_kind_replaces_the_part():
    settings = resolve_preset("starpo_s", {"filter": {"kind": "zero_variance"}})
    assert settings.filter.kind == "zero_variance"


def test_settings_of_advantages_are_understood_by_their_former_names():
    with pytest.warns(FutureWarning, match="advantage.trace is called advantage.gae_lambda now"):
        former = resolve_preset("ppo", {"advantage": {"trace": 0.9, "token_discount": 0.8}})
    assert former == resolve_preset("ppo", {"advantage": {"gae_lambda": 0.9, "gamma": 0.8}})
    with pytest.warns(FutureWarning):
        alone = GaeAdvantage(kind="gae", trace=0.5)
    assert alone.gae_lambda == 0.5
    with pytest.raises(ValueError, match="'trace' is the former name of 'gae_lambda', which is given, too"):
        resolve_preset("ppo", {"advantage": {"trace": 0.9, "gae_lambda": 0.9}})


def test_the_readme_says_how_many_there_are():
    readme = (Path(__file__).parents[3] / "README.md").read_text()
    numbers = re.findall(r"(\d+) (?:algorithm )?presets\b", readme)
    assert numbers
    assert set(numbers) == {str(len(PRESETS))}


def test_presets_are_never_changed_by_overrides():
    before = PRESETS["ppo"].model_dump()
    resolve_preset("ppo", {"critic": {"value_clip": None}})
    assert PRESETS["ppo"].model_dump() == before


def test_unknown_preset_is_refused_with_a_hint():
    with pytest.raises(ValueError, match="did you mean 'grpo'"):
        resolve_preset("grppo", {})


def test_paper_numbers():
    assert PRESETS["starpo_s"].surrogate.clip_high == 0.28
    assert PRESETS["starpo_s"].filter.fraction == 0.25
    assert PRESETS["starpo_s"].kl.coefficient == 0
    assert PRESETS["starpo_s"].critic is not None
    assert PRESETS["gigpo"].advantage.turn_discount == 0.95
    assert PRESETS["gigpo"].kl.coefficient == 0.01
    assert PRESETS["ppo"].entropy_coefficient == 0.001
    assert PRESETS["grpo"].aggregation.mode == "seq-mean-token-mean"
    dapo = PRESETS["dapo"]
    assert (dapo.surrogate.clip_low, dapo.surrogate.clip_high, dapo.filter.refill) == (0.2, 0.28, True)
    assert (dapo.reward.overlong.max_tokens, dapo.reward.overlong.buffer_tokens) == (20480, 4096)
    assert (dapo.aggregation.mode, dapo.kl.coefficient) == ("token-mean", 0.0)
    gspo = PRESETS["gspo"]
    assert (gspo.ratio.level, gspo.surrogate.clip_low, gspo.surrogate.clip_high) == ("sequence", 3e-4, 4e-4)
    assert PRESETS["decoupled_ppo"].correction.cap == 5.0


ISSUED = (
    "ppo grpo dr_grpo dapo gspo gspo_token cispo gmpo sapo reinforce reinforce_pp reinforce_pp_baseline rloo remax opo "
    "gpg raft_pp reinforce_rej topr tis kimi dro lite_ppo starpo starpo_s gigpo hgpo bi_level_gae agentic_reinforce "
    "decoupled_ppo dppo clip_cov kl_cov m2po gdpo spo grpo_roc"
)


def test_every_algorithm_of_the_field_has_a_preset_with_a_source():
    assert set(ISSUED.split()) <= set(PRESETS)
    assert all(paper.source and paper.line and len(paper.line) <= 60 for paper in PAPERS.values())


@pytest.mark.parametrize(
    ("name", "numbers"),
    [
        # Each from the source that the preset names.
        ("dr_grpo", {"aggregation.horizon": 3000, "advantage.scale": "none"}),
        ("cispo", {"surrogate.weight_high": 1.28, "surrogate.weight_low": 0.0, "minibatches": 16}),
        ("raft_pp", {"minibatches": 2, "advantage.baseline": "none", "reward.turn_low": 0.0}),
        ("gmpo", {"surrogate.clip_low": 0.4, "surrogate.clip_high": 0.4, "ratio.level": "sequence"}),
        ("sapo", {"surrogate.tau_positive": 1.0, "surrogate.tau_negative": 1.05}),
        ("kimi", {"surrogate.coefficient": 0.1}),
        (
            "dppo",
            {"surrogate.low": 0.2, "surrogate.high": 0.2, "surrogate.penalty": 1e-3, "proximal": "behaviour"},
        ),
        ("clip_cov", {"selection.fraction": 2e-4, "selection.low": 1.0, "selection.high": 5.0}),
        ("kl_cov", {"selection.fraction": 2e-4, "selection.coefficient": 1.0, "surrogate.clip_high": None}),
        ("m2po", {"selection.threshold": 0.04, "surrogate.clip_high": None, "proximal": "behaviour"}),
        ("high_entropy", {"selection.fraction": 0.2, "surrogate.clip_high": 0.28}),
        ("hgpo", {"advantage.history": 2, "advantage.length_weight": 1.0, "kl.coefficient": 0.01}),
        ("spo", {"advantage.rho_low": 0.875, "advantage.rho_high": 0.96, "advantage.half_kl": 0.06}),
        ("reinforce_rej", {"reward.scale": 2.0, "reward.offset": -1.0, "filter.refill": False}),
        ("rloo", {"advantage.baseline": "leave_one_out", "kl.coefficient": 0.03, "kl.placement": "reward"}),
        (
            "agentic_reinforce",
            {"advantage.turn_discount": 0.95, "advantage.clip": 0.2, "advantage.whiten": True},
        ),
        ("bi_level_gae", {"advantage.turn_discount": 0.95, "critic.value_clip": 0.5}),
        ("grpo_roc", {"episodes.size": 16, "surrogate.clip_high": 0.28}),
    ],
)
def test_numbers_of_each_paper(name, numbers):
    for path, expected in numbers.items():
        assert operator.attrgetter(path)(PRESETS[name]) == expected, path


@pytest.mark.parametrize(("former", "name"), FORMER_NAMES.items())
def test_former_names_are_still_understood(former, name):
    assert resolve_preset(former, {}) == PRESETS[name]


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"advantage": {"kind": "gae"}}, "reads a critic"),
        ({"critic": {}}, "never reads a critic"),
        ({"surrogate": {"kind": "reinforce"}, "minibatches": 2}, "no ratio"),
        ({"surrogate": {"kind": "reinforce"}, "ratio": {"level": "sequence"}}, "no ratio"),
        ({"proximal": "behaviour", "correction": {"kind": "truncate"}}, "nothing to correct"),
        ({"kl": {"coefficient": 0.1, "estimator": "k1"}}, "zero in expectation"),
        ({"kl": {"placement": "reward", "straight_through": True}}, "no gradient"),
        ({"aggregation": {"horizon": 5}}, "horizon"),
        ({"aggregation": {"mode": "seq-mean-token-sum-norm"}}, "horizon"),
        ({"reward": {"turn_low": 1.0, "turn_high": 0.0}}, "turn_low"),
        ({"correction": {"kind": "band", "low": 2.0, "high": 1.0}}, "low must be below"),
        ({"surrogate": {"kind": "weighted", "weight_low": 2.0, "weight_high": 1.0}}, "weight_low"),
        ({"reward": {"overlong": {"max_tokens": 4, "buffer_tokens": 8}}}, "buffer_tokens"),
        ({"surrogate": {"dual_clip": 0.5}}, "greater than 1"),
        ({"advantage": {"omega": 1.0}}, "unknown key 'omega'"),
        ({"filter": {"kind": "zero_variance", "fraction": 0.2}}, "unknown key 'fraction'"),
        ({"minibatch": 2}, "did you mean 'minibatches'"),
    ],
)
def test_contradictions_are_refused(overrides, message):
    with pytest.raises(ValidationError, match=message):
        resolve_preset("grpo", overrides)


@pytest.mark.parametrize(
    ("overrides", "needed"),
    [
        ({}, False),
        ({"epochs": 2}, True),
        ({"minibatches": 2}, True),
        ({"epochs": 2, "proximal": "behaviour"}, False),
        ({"kl": {"coefficient": 0.1, "placement": "reward"}}, True),
    ],
)
def test_a_forward_pass_is_asked_for_only_where_it_says_something(overrides, needed):
    assert resolve_preset("grpo", overrides).needs_old_logprobs is needed
