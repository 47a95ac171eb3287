"""Format-v0: what every rule rates, its bounds, and the tasks that it draws."""

import json
import math
import time
from collections import Counter

import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.core.splits import split_of_text
from rollgym.envs.verifiers.formats.environment import FAMILIES, FormatEnv
from rollgym.envs.verifiers.formats.rules import RULES, ReadReply, rate, read_rules
from tests.support.form_answers import answer

ENVIRONMENT = FormatEnv()
SCHEMA = {
    "type": "object",
    "properties": {"name": {"$ref": "#/$defs/name"}, "age": {"type": "integer"}},
    "required": ["name"],
    "$defs": {"name": {"type": "string", "pattern": "^[A-Z]"}},
}
REPEATED = "a b c a b c a b c"


def rated(response, rule, tokens=None, **arguments):
    return rate(ReadReply(response, tokens), read_rules([{"rule": rule, **arguments}]))[0]


@pytest.mark.parametrize(
    ("rule", "arguments", "response", "expected"),
    [
        ("think_answer", {}, "<think>a</think><answer>b</answer>", 1),
        ("think_answer", {}, " <think>a</think>\n<answer>b</answer>\n", 1),
        ("think_answer", {"think": "reasoning"}, "<reasoning>a</reasoning><answer>b</answer>", 1),
        ("think_answer", {}, "<think>a</think>so <answer>b</answer>", 0),
        ("think_answer", {}, "<think>a</think><answer></answer>", 0),
        ("think_answer", {}, "<think>a</think><think>a</think><answer>b</answer>", 0),
        ("think_answer", {}, "<answer>b</answer><think>a</think>", 0),
        ("think_answer", {}, "</think>a<think><answer>b</answer>", 0),
        ("tag_counts", {"tags": {"<a>": 1, "</a>": 1, "<b>": 0, "<c>": 2}}, "<a><a></a><c><c>", 0.75),
        ("single_boxed", {}, "<think>\\boxed{1}</think>so \\boxed{\\frac{1}{2}}", 1),
        ("single_boxed", {}, "\\boxed{1} or \\boxed{2}", 0),
        ("single_boxed", {}, "\\boxed{ }", 0),
        ("single_boxed", {}, "\\boxed{1", 0),
        ("json_schema", {"schema": SCHEMA}, '<think>?</think>```json\n{"name": "Ada"}\n```', 1),
        ("json_schema", {"schema": SCHEMA}, '{"name": "ada"}', 0),
        ("json_schema", {"schema": SCHEMA}, '{"name": "Ada", "age": 1.5}', 0),
        ("json_schema", {"schema": SCHEMA}, 'Sure: {"name": "Ada"}', 0),
        ("json_schema", {"schema": {}}, "NaN", 0),
        ("json_schema", {"schema": {}}, "[" * 100_000, 0),
        ("regex", {"pattern": "[0-9]{3}"}, "so 123!", 1),
        ("regex", {"pattern": "[0-9]{3}", "whole": True}, "so 123!", 0),
        ("regex", {"pattern": "(\\([{(]{900}\\)){20}|[]a{9}]b{900,}|a"}, "]", 0),
        ("regex", {"pattern": "(?:[a-z]{100} ){100}|b"}, "b", 1),
        ("exact", {"text": "yes"}, "<think>no</think> yes\n", 1),
        ("exact", {"text": "yes"}, "yes.", 0),
        ("length_within", {"least": 2, "most": 3}, "a b", 1),
        ("length_within", {"most": 3, "unit": "characters"}, "a bc", 0),
        ("length_within", {"most": 3, "unit": "tokens", "tokens": 4}, "a", 0),
        ("length_target", {"target": 4}, "a b c", 0.75),
        ("length_target", {"target": 1000, "per_unit": 0.0003, "unit": "tokens", "tokens": 2000}, "a", 0.7),
        ("length_target", {"target": 1}, "a b c", 0),
        ("length_cosine", {"most": 4}, "a b", 0.5),
        ("length_cosine", {"most": 4, "floor": 0.5}, "a b", 0.75),
        ("length_cosine", {"most": 4, "floor": 0.5}, "a b c d e", 0.5),
        ("overlong", {"most": 20480, "buffer": 4096, "unit": "tokens", "tokens": 16384}, "a", 1),
        ("overlong", {"most": 20480, "buffer": 4096, "unit": "tokens", "tokens": 18432}, "a", 0.5),
        ("overlong", {"most": 20480, "buffer": 4096, "unit": "tokens", "tokens": 20481}, "a", 0),
        ("overlong", {"most": 1, "buffer": 0}, "a b", 0),
        ("repetition", {}, REPEATED, 3 / 7),
        ("repetition", {"n": 2, "penalty": 0.5}, REPEATED, 1 - 0.5 * 5 / 8),
        ("repetition", {"least": 0.5}, REPEATED, 0),
        ("repetition", {}, "a b", 1),
        ("long_block", {"most": 5}, "abcde fg", 1),
        ("long_block", {"most": 5}, "abcdef", 0),
        ("script", {"script": "Greek"}, "ήλιος, sun", 5 / 8),
        ("script", {"script": "Greek", "least": 0.9}, "ήλιος, sun", 0),
        ("script", {"script": "Han"}, "12", 0),
    ],
)
def test_a_rule(rule, arguments, response, expected):
    found = rated(response, rule, **arguments)
    assert found == pytest.approx(expected)


def test_the_cosine_falls_all_the_way():
    rates = [rated("a " * length, "length_cosine", most=20) for length in range(22)]
    assert rates == sorted(rates, reverse=True)
    assert rates[5] == pytest.approx((1 + math.cos(math.pi / 4)) / 2)
    assert (rates[0], rates[20], rates[21]) == (1.0, 0.0, 0.0)


RULED = [{"rule": "exact", "text": "a"}, {"rule": "length_target", "target": 2}]


@pytest.mark.parametrize(
    ("response", "task", "score", "outcome"),
    [
        ("a", {"rules": RULED}, 0.5, "partial"),
        ("b", {"rules": RULED}, 0.0, "wrong"),
        ("b", {"rules": RULED, "reward": "mean"}, 0.25, "partial"),
        ("b c", {"rules": [RULED[0], RULED[1] | {"weight": 3}], "reward": "mean"}, 0.75, "partial"),
        ("b c", {"rules": RULED[1:]}, 1.0, "correct"),
        (" ", {"rules": [{"rule": "long_block"}]}, 0.0, "unparsable"),
    ],
)
def test_scores(response, task, score, outcome):
    verdict = ENVIRONMENT.score(response, task)
    assert (verdict.score, verdict.outcome) == (pytest.approx(score), outcome)


LOOP = {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/a"}}}
EVIL = "(x+x+)+y\\1"


@pytest.mark.parametrize(
    ("task", "outcome", "message"),
    [
        ({}, "error", "needs the field 'rules'"),
        ({"rules": []}, "error", "1 to 32 rules"),
        ({"rules": ["exact"]}, "error", "a rule is a mapping"),
        ({"rules": [{"rule": "exact"}]}, "error", "needs the argument 'text'"),
        ({"rules": [{"rule": "exakt"}]}, "error", "no rule 'exakt'; there are think_answer"),
        ({"rules": [{"rule": "exact", "text": "a", "case": 1}]}, "error", "no argument 'case'"),
        ({"rules": [{"rule": "exact", "text": "a", "weight": 2}]}, "error", "in a mean only"),
        ({"rules": [{"rule": "exact", "text": "a", "weight": float("inf")}]}, "error", "the weight of exact"),
        ({"rules": [{"rule": "long_block"}], "reward": "sum"}, "error", "reward must be one of"),
        (
            {"rules": [{"rule": "length_within", "most": 1, "unit": "tokens"}]},
            "error",
            "the task's field 'tokens'",
        ),
        ({"rules": [{"rule": "long_block"}], "tokens": float("inf")}, "error", "a whole number"),
        ({"rules": [{"rule": "regex", "pattern": "("}]}, "error", "no regular expression"),
        ({"rules": [{"rule": "regex", "pattern": "a" * 3000}]}, "error", "at most 2000 characters"),
        ({"rules": [{"rule": "regex", "pattern": "(?:a{1000}){1000}"}]}, "error", "repeats too much"),
        ({"rules": [{"rule": "regex", "pattern": "((a{50}b){1,50}){50}"}]}, "error", "repeats too much"),
        ({"rules": [{"rule": "json_schema", "schema": {"type": "thing"}}]}, "error", "no JSON Schema"),
        (
            {"rules": [{"rule": "json_schema", "schema": {"$dynamicRef": "#"}}]},
            "error",
            "$dynamicRef is not taken",
        ),
        (
            {"rules": [{"rule": "json_schema", "schema": {"$ref": "#/$defs/x"}}]},
            "error",
            "nothing is fetched",
        ),
        ({"rules": [{"rule": "json_schema", "schema": LOOP}]}, "error", "round in circles"),
        ({"rules": [{"rule": "regex", "pattern": EVIL}], "prompt": "x" * 4000}, "timeout", "takes over"),
    ],
)
def test_what_makes_no_sense_or_takes_for_ever_is_no_fault_of_the_response(task, outcome, message):
    verdict = ENVIRONMENT.score('"' + "x" * 4000 + '"', task)
    assert (verdict.outcome, verdict.score) == (outcome, 0.0)
    assert message in verdict.detail


@pytest.mark.parametrize(
    "rule", [{"rule": "regex", "pattern": EVIL}, {"rule": "json_schema", "schema": {"pattern": EVIL}}]
)
def test_a_response_does_not_choose_to_be_played_again(rule):
    verdict = ENVIRONMENT.score('"' + "x" * 4000 + '"', {"rules": [rule], "prompt": "Say anything."})
    assert (verdict.outcome, verdict.score) == ("unparsable", 0.0)
    assert "takes over" in verdict.detail


def test_a_schema_that_makes_no_sense_in_one_place_is_a_fault_of_the_task_on_every_response():
    schema = {"if": {"type": "string"}, "then": {"pattern": EVIL}, "else": {"$ref": "#/$defs/x"}}
    task = {"rules": [{"rule": "json_schema", "schema": schema}], "prompt": "1"}
    for response in ('"' + "x" * 4000 + '"', '"y"', "1"):
        verdict = ENVIRONMENT.score(response, task)
        assert (verdict.outcome, verdict.score) == ("error", 0.0)
        assert "leads nowhere within the schema" in verdict.detail


def test_a_schema_does_not_make_the_verifier_fetch_anything(unused_tcp_port_factory):
    schema = {"$ref": f"http://127.0.0.1:{unused_tcp_port_factory()}/schema.json"}
    assert (
        "nothing is fetched"
        in ENVIRONMENT.score("1", {"rules": [{"rule": "json_schema", "schema": schema}]}).detail
    )


def test_a_schema_has_only_so_much_work():
    part = {"allOf": [{"$ref": "#/$defs/b"}] * 40}
    schema = {"items": part, "$defs": {"b": {"allOf": [{"type": "integer"}] * 40}}}
    verdict = ENVIRONMENT.score(
        "[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14]",
        {"rules": [{"rule": "json_schema", "schema": schema}]},
    )
    assert (verdict.outcome, verdict.score) == ("unparsable", 0.0)
    assert "too much work" in verdict.detail


@pytest.mark.parametrize(
    "dialect", ["http://json-schema.org/draft-07/schema#", "https://json-schema.org/draft/2020-12/schema"]
)
def test_no_part_of_a_schema_picks_a_validator_without_limits(dialect):
    schema = {"properties": {"a": {"$schema": dialect, "pattern": EVIL}, "$schema": {"const": 1}}}
    response = json.dumps({"a": "x" * 5000})
    assert (
        ENVIRONMENT.score(response, {"rules": [{"rule": "json_schema", "schema": schema}]}).outcome
        == "unparsable"
    )
    assert rated('{"$schema": 2}', "json_schema", schema=schema) == 0.0
    assert rated('{"$schema": 1}', "json_schema", schema=schema) == 1.0


def test_every_drawn_task_can_be_done_and_needs_work():
    counts = Counter()
    for family in FAMILIES:
        environment = FormatEnv(families=[family])
        for seed in range(60):
            prompt, info = environment.reset(seed=seed)
            task = environment.task
            verdict = environment.score(answer(task), task)
            assert verdict.outcome == "correct", (verdict.detail, task, answer(task))
            for idle in ("yes", prompt, info["instruction"], "0", ""):
                assert environment.score(idle, task).score == 0.0, (idle, task)
            counts.update(rule["rule"] for rule in task["rules"])
    assert len(counts) == 8


def test_splits_and_seeds():
    seen = {}
    for split in ("train", "valid", "test"):
        environment = FormatEnv(split=split)
        for seed in range(20):
            prompt = environment.reset(seed=seed)[0]
            assert split_of_text(prompt) == split
            assert seen.setdefault(prompt, split) == split
            assert environment.reset(seed=seed)[0] == prompt


def test_an_episode():
    environment = FormatEnv()
    environment.reset(options={"prompt": "Say a.", "rules": RULED})
    _, reward, terminated, truncated, info = environment.step("a")
    assert (reward, terminated, truncated, info["success"], info["outcome"]) == (
        0.5,
        True,
        False,
        False,
        "partial",
    )
    with pytest.raises(ValueError, match="'prompt'"):
        environment.reset(options={"rules": RULED})
    check_env(FormatEnv(render_mode="ansi"))


@pytest.mark.parametrize("kwargs", [{"families": []}, {"families": ["x"]}, {"reward": "x"}, {"split": "x"}])
def test_bad_kwargs_are_refused(kwargs):
    with pytest.raises(ValueError, match="must be"):
        FormatEnv(**kwargs)


ARGUMENTS = {
    "tag_counts": {"tags": {"<a>": 1}},
    "json_schema": {"schema": SCHEMA},
    "regex": {"pattern": "(a|b)*c"},
    "exact": {"text": "a"},
    "length_within": {"most": 5},
    "length_target": {"target": 0},
    "length_cosine": {"most": 5},
    "overlong": {"most": 5, "buffer": 2},
    "script": {"script": "Latin"},
}


@settings(max_examples=60)
@given(response=st.text() | st.text(alphabet='<>/thinkaswer\\boxed{}[]":1 \n`'))
def test_no_text_is_too_odd_for_any_rule(response):
    for name in RULES:
        verdict = ENVIRONMENT.score(response, {"rules": [{"rule": name, **ARGUMENTS.get(name, {})}]})
        assert verdict.outcome in ("correct", "partial", "wrong", "unparsable")
        assert 0.0 <= verdict.score <= 1.0


DIFFERENT = {"type": "array", "uniqueItems": True}
TREE = {"type": "array", "items": {"$ref": "#"}}


@pytest.mark.parametrize(
    ("schema", "response", "expected"),
    [
        (DIFFERENT, '[1, true, 0, false, null, [], {}, [1], [true], "1"]', 1),
        (DIFFERENT, "[1, 1.0]", 0),
        (DIFFERENT, '[{"a": 1, "b": [2]}, {"b": [2.0], "a": 1}]', 0),
        (DIFFERENT, '[{"a": 1}, {"a": true}, {"a": [1]}]', 1),
        ({"uniqueItems": False}, "[1, 1]", 1),
        (TREE, "[" * 20 + "]" * 20, 1),
        ({"multipleOf": 0.01}, "1e999", 0),
        ({"multipleOf": 0.01}, "1.25", 1),
        ({"multipleOf": 0.01}, "19.99", 1),
        ({"multipleOf": 0.01}, "1" + "0" * 400, 1),
        ({"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False}, '{"xy": 1}', 1),
        ({"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False}, '{"xy": "1"}', 0),
        ({"patternProperties": {"^x": {"type": "integer"}}, "additionalProperties": False}, '{"y": 1}', 0),
    ],
)
def test_schemas_hold_what_json_schema_says(schema, response, expected):
    assert rated(response, "json_schema", schema=schema) == expected


@pytest.mark.parametrize(
    ("schema", "response"),
    [
        (DIFFERENT, json.dumps([{"a": number} for number in range(15_000)])),
        (DIFFERENT, json.dumps([[number, "a"] if number % 2 else number for number in range(12_000)])),
        (
            {"items": {"enum": [f"value {each}" for each in range(3_000)]}},
            json.dumps(["value 2999"] * 12_000),
        ),
        ({"uniqueItems": True, "items": DIFFERENT}, "[" * 900 + "]" * 900),
        (TREE, "[" * 900 + "]" * 900),
        ({"multipleOf": 0.01}, "1e999"),
    ],
)
def test_no_response_ends_a_verdict_on_a_schema(schema, response):
    begun = time.process_time()
    verdict = ENVIRONMENT.score(
        response, {"prompt": "Write.", "rules": [{"rule": "json_schema", "schema": schema}]}
    )
    assert time.process_time() - begun < 5
    assert verdict.outcome in ("correct", "wrong", "unparsable"), verdict
    if "$ref" in str(schema):
        assert verdict.outcome == "unparsable"


def test_a_schema_that_goes_round_in_a_circle_is_the_tasks_fault():
    for schema in ({"$ref": "#"}, {"properties": {"a": {"$ref": "#/properties/a"}}}):
        rules = [{"rule": "json_schema", "schema": schema}]
        verdict = ENVIRONMENT.score('{"a": 1}', {"prompt": "Write.", "rules": rules})
        assert verdict.outcome == "error", verdict
