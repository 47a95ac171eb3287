"""Checks without a server: the environment as a Gymnasium environment, and as one for language models."""

from __future__ import annotations

import inspect
import math
import os
import re
import subprocess
import warnings
from collections.abc import Iterator, Mapping
from itertools import zip_longest
from typing import Any

import gymnasium
import orjson
from gymnasium import spaces
from gymnasium.utils.env_checker import check_env

from rollgym.clients.checks.report import Finding, Status, shortened_repr
from rollgym.clients.checks.target import CheckTarget
from rollgym.clients.checks.trace import (
    MAX_EPISODE_STEPS,
    SEEDS,
    RandomActions,
    digests_of_episode,
    first_difference,
    trace,
)
from rollgym.clients.process.modules import python_module
from rollgym.clients.protocol.spaces import UnicodeText, describe_space, parse_space
from rollgym.clients.protocol.values import EncodeError, decode_value, encode_value

_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
_PROCESS_TIMEOUT_S = 120.0
ODD_TEXTS = (
    *("", " ", "\n", "x" * 10_000, "<answer></answer>", "<answer>", "</answer><answer>", "\x00", "漢字😀√"),
    *("<think>" * 50, "null", "-1", "{}", "<answer>no such action</answer>", "||", "%s %d {0}"),
)
"""Worst-case texts of models."""


def check_gymnasium(target: CheckTarget) -> Iterator[Finding]:
    """Run Gymnasium's own environment checker."""
    env = target.build()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        check_env(env.unwrapped)
    env.close()
    env.close()
    notes = {_COLOURS.sub("", str(each.message)).removeprefix("WARN: ") for each in caught}
    # A class that was built by hand has no spec, which is not a fault.
    notes = {note for note in notes if "not having a spec" not in note}
    if notes:
        yield Finding("Gymnasium's check_env", Status.WARN, "passes, but says: " + "; ".join(sorted(notes)))
    else:
        yield Finding("Gymnasium's check_env", Status.PASS)


def check_spaces(target: CheckTarget) -> Iterator[Finding]:
    """See that the spaces go over the wire."""
    env = target.build()
    for name, space in (("action space", env.action_space), ("observation space", env.observation_space)):
        if parse_space(describe_space(space)) == space:
            yield Finding(f"{name} on the wire", Status.PASS, str(space))
        else:
            yield Finding(f"{name} on the wire", Status.FAIL, f"{space} comes back as another", _OUR_SPACES)
    env.close()


_TEXT = (UnicodeText, spaces.Text)
_OUR_SPACES = "use the space types of Gymnasium, or clients' UnicodeText, as they are"


def check_play(target: CheckTarget) -> Iterator[Finding]:
    """Play at random and check all answers."""
    env = target.build()
    play = _Play(env)
    for seed in SEEDS:
        play.run(seed)
    env.close()
    yield play.finding(
        "observations lie in the space", "return what `observation_space` promises, dtype and shape too"
    )
    yield play.finding("observations survive the wire", _OUR_SPACES)
    yield play.finding(
        "rewards are finite numbers", "return a float; report failures by an exception, not by NaN"
    )
    yield play.finding("terminated and truncated are bools", "`bool(...)` around what numpy gives")
    yield play.finding(
        "info goes over the wire", "keep to str, int, float, bool, None, bytes, lists, dicts and arrays"
    )
    speaks = isinstance(env.observation_space, _TEXT) or isinstance(env.action_space, _TEXT)
    yield play.finding(
        'success in info["success"]',
        "say in info of every step, or at least of the last, whether the task is solved: a bool, apart from "
        "`terminated`",
        failing=Status.FAIL if speaks else Status.WARN,
    )
    yield play.finding(
        'instruction in info["instruction"]',
        "let reset's info tell a model that has never seen the environment what to do and how to answer",
        failing=Status.FAIL if speaks else Status.WARN,
    )
    if play.ended:
        yield Finding("episodes end", Status.PASS)
    else:
        yield Finding(
            "episodes end",
            Status.WARN,
            f"none of {len(SEEDS)} episodes of random play ended in {MAX_EPISODE_STEPS} steps",
            "truncate after a number of steps (`max_episode_steps`)",
        )


class _Play:
    """Random play, and the faults found in it, by check."""

    def __init__(self, env: gymnasium.Env[Any, Any]) -> None:
        self._env = env
        self._problems: dict[str, list[str]] = {}
        self.ended = False

    def finding(self, check: str, remedy: str, *, failing: Status = Status.FAIL) -> Finding:
        problems = self._problems.get(check, [])
        if not problems:
            return Finding(check, Status.PASS)
        more = f" (and {len(problems) - 1} times more)" if len(problems) > 1 else ""
        return Finding(check, failing, problems[0] + more, remedy)

    def run(self, seed: int) -> None:
        env = self._env
        actions = RandomActions(env.action_space, seed)
        observation, info = env.reset(seed=seed)
        self._look(f"reset with seed {seed}", observation, info)
        instruction = info.get("instruction")
        if not isinstance(instruction, str) or not instruction.strip():
            self._note('instruction in info["instruction"]', f"reset with seed {seed} gives {instruction!r}")
        for step in range(1, MAX_EPISODE_STEPS + 1):
            observation, reward, terminated, truncated, info = env.step(actions.choose(info))
            where = f"step {step} with seed {seed}"
            self._look(where, observation, info)
            # The annotations promise numbers and bools; whether they are is the question.
            number: Any = reward
            flags: dict[str, Any] = {"terminated": terminated, "truncated": truncated}
            if not hasattr(number, "__float__") or not math.isfinite(float(number)):
                self._note("rewards are finite numbers", f"{where} gives {number!r}")
            for name, flag in flags.items():
                if type(flag) is not bool:
                    self._note("terminated and truncated are bools", f"{where} gives {name}={flag!r}")
            if terminated or truncated:
                self.ended = True
                if type(info.get("success")) is not bool:
                    self._note('success in info["success"]', f"{where} ends with {info.get('success')!r}")
                return

    def _look(self, where: str, observation: Any, info: Mapping[str, Any]) -> None:
        space = self._env.observation_space
        if observation not in space:
            self._note("observations lie in the space", f"{where} gives {shortened_repr(observation)}")
        try:
            wire = encode_value(space, observation, binary=False)
            if encode_value(space, decode_value(space, wire), binary=False) != wire:
                self._note("observations survive the wire", f"{where} gives {shortened_repr(observation)}")
        except ValueError as error:
            self._note("observations survive the wire", f"{where}: {error}")
        try:
            encode_value(None, info, binary=False)
        except EncodeError as error:
            self._note("info goes over the wire", f"{where}: {error}")

    def _note(self, check: str, problem: str) -> None:
        self._problems.setdefault(check, []).append(problem)


def check_odd_actions(target: CheckTarget) -> Iterator[Finding]:
    """Play typical texts of models."""
    check = "odd replies are answered"
    env = target.build()
    if not isinstance(env.action_space, _TEXT):
        yield Finding(check, Status.SKIP, "the server refuses actions outside the action space")
        env.close()
        return
    for text in ODD_TEXTS:
        env.reset(seed=0)
        try:
            env.step(text)
        except Exception as error:  # noqa: BLE001 - the author's code, whose failures are what is looked for
            yield Finding(
                check,
                Status.FAIL,
                f"{shortened_repr(text)} raises {type(error).__name__}: {error}",
                "a reply that cannot be read is an observation to learn from, never an exception",
            )
            break
    else:
        yield Finding(check, Status.PASS, f"{len(ODD_TEXTS)} of them")
    env.close()


def check_seeds(target: CheckTarget) -> Iterator[Finding]:
    """See that a seed fixes the episode, here and in other processes."""
    env = target.build()
    claims = bool(env.metadata.get("deterministic", False))
    # Two instances that take turns: hidden shared state shows.
    other = target.build()
    first, second = _in_turns(env, other)
    apart = first_difference(first, second)
    env.close()
    other.close()
    failing = Status.FAIL if claims else Status.WARN
    remedy = (
        "draw everything from `self.np_random`, never from global generators, `hash()` or sets; or else do not "
        'claim metadata["deterministic"]'
    )
    check = "equal seeds, equal episodes"
    if apart:
        yield Finding(check, failing, f"two instances were asked the same: {apart}", remedy)
        return
    yield Finding(check, Status.PASS)
    check = "equal in another process"
    elsewhere = _trace_elsewhere(target)
    apart = first_difference(trace(target.build()), elsewhere)
    if apart:
        yield Finding(check, failing, apart, remedy)
        return
    yield Finding(check, Status.PASS)
    if not claims:
        yield Finding(
            "metadata says whether it is deterministic",
            Status.WARN,
            "it seems to be, but does not say so, so lost sessions are not rebuilt",
            'set metadata["deterministic"] = True if seed and actions fix everything',
        )


def _in_turns(
    env: gymnasium.Env[Any, Any], other: gymnasium.Env[Any, Any]
) -> tuple[list[list[str]], list[list[str]]]:
    traces: tuple[list[list[str]], list[list[str]]] = ([], [])
    for seed in SEEDS:
        pairs = list(zip_longest(digests_of_episode(env, seed), digests_of_episode(other, seed)))
        for index, digests in enumerate(traces):
            digests.append([pair[index] for pair in pairs if pair[index] is not None])
    return traces


def _trace_elsewhere(target: CheckTarget) -> list[list[str]]:
    """Return the trace of a fresh process with another hash seed."""
    done = subprocess.run(
        python_module(
            "rollgym.clients.checks.trace", target.name, orjson.dumps(dict(target.kwargs)).decode()
        ),
        capture_output=True,
        env=os.environ | target.variables | {"PYTHONHASHSEED": "4711"},
        timeout=_PROCESS_TIMEOUT_S,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(
            f"it failed in another process: {done.stderr.decode(errors='replace').strip()[-500:]}"
        )
    digests: list[list[str]] = orjson.loads(done.stdout)
    return digests


def check_stateless(target: CheckTarget) -> Iterator[Finding]:
    """Check that a stateless environment scores without a session, and ends after one step."""
    env = target.build()
    if env.metadata.get("kind") != "stateless":
        env.close()
        return
    check = "stateless: scores without a session"
    if callable(getattr(env.unwrapped, "score", None)):
        yield Finding(check, Status.PASS)
    else:
        yield Finding(
            check,
            Status.FAIL,
            "it has no `score`",
            "give it `score(response, task)`, which returns score, outcome and detail",
        )
    check = "stateless: one step is all"
    _, info = env.reset(seed=0)
    _, _, terminated, _, _ = env.step(RandomActions(env.action_space, 0).choose(info))
    if terminated:
        yield Finding(check, Status.PASS)
    else:
        yield Finding(check, Status.FAIL, "the first step does not terminate", "terminate at each step")
    env.close()


def check_kwargs(target: CheckTarget) -> Iterator[Finding]:
    """Compare the kwargs that a client may set with those that the class accepts."""
    check = "kwargs_schema fits the signature"
    env = target.build()
    kind = type(env.unwrapped)
    env.close()
    schema = getattr(kind, "kwargs_schema", None)
    if schema is None and not inspect.signature(kind).parameters:
        yield Finding(check, Status.PASS, "no kwargs")
        return
    if schema is None:
        yield Finding(
            check,
            Status.WARN,
            "the class has no kwargs_schema, so clients cannot set anything",
            "give the class `kwargs_schema`: a JSON Schema object of the kwargs that clients may set",
        )
        return
    wrong = list(_schema_faults(kind, schema))
    if wrong:
        remedy = "let schema and `__init__` name the same things, and the schema refuse all others"
        yield Finding(check, Status.FAIL, "; ".join(wrong), remedy)
    else:
        properties = schema.get("properties", {})
        yield Finding(check, Status.PASS, ", ".join(properties) or "no kwargs")
        yield from _check_descriptions(properties)


def _check_descriptions(properties: dict[str, Any]) -> Iterator[Finding]:
    if not properties:
        return
    check = "kwargs are described"
    bare = [
        name
        for name, part in properties.items()
        if not (isinstance(part, dict) and part.get("description") and "default" in part)
    ]
    if bare:
        yield Finding(
            check,
            Status.WARN,
            f"no description or no default: {', '.join(bare)}",
            "say both in the schema, or declare them by annotations of `__init__` (`rollgym.DeclaredKwargs`)",
        )
    else:
        yield Finding(check, Status.PASS)


def _schema_faults(kind: type, schema: Any) -> Iterator[str]:
    if not isinstance(schema, dict) or schema.get("type") != "object":
        yield "it is not a schema of an object"
        return
    if schema.get("additionalProperties") is not False:
        yield "it does not say `additionalProperties: false`"
    properties = schema.get("properties", {})
    parameters = inspect.signature(kind).parameters
    takes_all = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in parameters.values())
    for name, described in properties.items():
        if name not in parameters:
            if not takes_all:
                yield f"`__init__` does not take {name}"
            continue
        default = parameters[name].default
        if "default" in described and default is not inspect.Parameter.empty:
            plain = encode_value(None, default, binary=False)
            if plain != described["default"]:
                yield f"the default of {name} is {default!r} in `__init__` and {described['default']!r} in the schema"
    for name in frozenset(getattr(kind, "operator_kwargs", ())) & set(properties):
        yield f"{name} is the operator's, so clients must not set it"
    operator = frozenset(getattr(kind, "operator_kwargs", ()))
    for name, parameter in parameters.items():
        required = (
            parameter.default is inspect.Parameter.empty and parameter.kind is not parameter.VAR_KEYWORD
        )
        if required and name not in operator and name not in schema.get("required", ()):
            yield f"`__init__` requires {name}, and the schema does not"
