"""The one table of problem codes, held against what is raised, what is asked of it, and what programs rely on."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollgym.clients.protocol.errors import CODES, GONE, PROBLEMS, RETRY_LATER, codes_of
from rollgym.env_server.http.openapi import MAKES, ON_SESSION, RUNS, SCORES
from tests.support.processes import ROOT

FLOORS = ("clients", "env_server", "envs", "integrations", "sandbox", "trainer")
TABLE = ROOT / "clients" / "protocol" / "errors.py"
FEW = 2
"""So many codes beside each other are two cases of one decision; more are a list that a new code is forgotten in."""


@pytest.fixture(scope="module")
def trees() -> list[tuple[Path, ast.Module]]:
    assert f'"{PROBLEMS[0].code}"' in TABLE.read_text(encoding="utf-8"), "the table itself must be left out"
    files = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py")) if path != TABLE]
    texts = [(path, path.read_text(encoding="utf-8")) for path in files]
    return [(path, ast.parse(text)) for path, text in texts if any(f'"{code}"' in text for code in CODES)]


def texts_of(node: ast.AST) -> list[str]:
    """The texts that are written in an expression."""
    found = (each.value for each in ast.walk(node) if isinstance(each, ast.Constant))
    return [value for value in found if isinstance(value, str)]


def raised(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """The codes that are written where a problem is made."""
    for call in ast.walk(tree):
        if isinstance(call, ast.Call) and ast.unparse(call.func).endswith("ProblemError") and call.args:
            first = call.args[0].value if isinstance(call.args[0], ast.Starred) else call.args[0]
            code = first.elts[0] if isinstance(first, ast.Tuple) else first
            if isinstance(code, ast.Constant):
                yield call.lineno, str(code.value)


def lists_of_codes(tree: ast.Module) -> Iterator[tuple[int, list[str]]]:
    """Where more than a few codes are written beside each other."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            elements = [each for each in node.keys if each is not None]
        elif isinstance(node, ast.Set | ast.List | ast.Tuple):
            elements = node.elts
        else:
            continue
        values = [each.value for each in elements if isinstance(each, ast.Constant)]
        codes = [value for value in values if isinstance(value, str) and value in CODES]
        if len(codes) > FEW:
            yield node.lineno, codes


def test_each_code_is_declared_once() -> None:
    assert len(CODES) == len(PROBLEMS)


def test_every_code_that_is_raised_is_declared(trees: list[tuple[Path, ast.Module]]) -> None:
    found = [(path, line, code) for path, tree in trees for line, code in raised(tree)]
    assert len({code for *_, code in found}) > len(CODES) / 2
    assert [each for each in found if each[2] not in CODES] == []


def test_every_declared_code_is_used(trees: list[tuple[Path, ast.Module]]) -> None:
    unused = set(CODES) - {text for _, tree in trees for text in texts_of(tree)}
    assert unused == set(), (
        "no module outside clients/protocol/errors.py names them: raise them, or take them out"
    )


def test_nobody_keeps_a_list_of_codes_by_hand(trees: list[tuple[Path, ast.Module]]) -> None:
    found = [(str(path), line, codes) for path, tree in trees for line, codes in lists_of_codes(tree)]
    assert found == [], "ask clients/protocol/errors.py for what they have in common"


def test_a_list_of_codes_is_found() -> None:
    tree = ast.parse('A = {"busy", "too_large", "internal"}\nB = ("busy", "too_large")\nC = {"busy": 1}')
    assert [line for line, _ in lists_of_codes(tree)] == [1]


def test_what_clients_do_by_code() -> None:
    assert {"rate_limited", "at_capacity", "draining", "overloaded"} == RETRY_LATER
    assert {"session_gone", "unknown_session"} == GONE
    assert codes_of(lambda problem: problem.is_final) == {
        *("invalid_request", "invalid_kwargs", "too_large", "unknown_op", "unknown_env", "not_found"),
        *("method_not_allowed", "unsupported_media_type", "fork_unsupported", "not_stateless"),
        *("unauthorized", "forbidden", "env_exists"),
    }


def test_what_servers_and_gateways_do_by_code() -> None:
    assert codes_of(lambda problem: problem.told_to_agents) == {
        *("not_reset", "episode_over", "busy", "env_error", "step_timeout"),
        *("invalid_action", "invalid_request"),
    }
    assert codes_of(lambda problem: problem.forbids_restoring) == {
        *("too_large", "invalid_request", "invalid_kwargs", "session_gone"),
    }
    assert codes_of(lambda problem: problem.kept_from_clients) == {"unauthorized", "forbidden", "internal"}


def test_what_the_description_says_of_calls() -> None:
    assert {"unknown_session", "session_gone", "draining"} == ON_SESSION
    ran = {"env_error", "step_timeout", "upstream_error", "overloaded"}
    assert ON_SESSION | ran | {"busy", "not_reset"} == RUNS
    assert {"at_capacity", "draining", "invalid_kwargs", "request_mismatch"} | ran == MAKES
    assert {"unknown_env", "not_stateless", "draining"} | ran == SCORES


def test_what_was_not_done_is_the_servers_and_not_final() -> None:
    for problem in PROBLEMS:
        assert not (problem.retry_later and problem.is_final), problem
        assert problem.meaning, problem
