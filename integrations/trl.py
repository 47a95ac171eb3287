"""Environments of a server for TRL's `GRPOTrainer`, as its `environment_factory`.

TRL plays an environment by calls of tools: the public methods of a class, by their type hints and docstrings. The
class that is made here has a method for each tool that the environment declares, or one method `act` where the
environment is played by text.
"""

from __future__ import annotations

import inspect
import json
import keyword
import math
import re
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.clients.protocol.tool_calls import ToolDeclaration, answer_text
from rollgym.clients.replies.formats.calls import UnwritableCallError
from rollgym.integrations.tool_play import OVER, action_of, opening_text, playable_tools

if TYPE_CHECKING:
    from datasets import Dataset

_RESERVED = frozenset({"reset", "get_reward"})
_TYPES: Mapping[str, type] = {
    "string": str,
    "integer": int,
    "number": float,
    "boolean": bool,
    "array": list,
    "object": dict,
}


def environment_factory(
    url: str,
    env_id: str,
    env_kwargs: Mapping[str, Any] | None = None,
    *,
    token: str | None = None,
    timeout_s: float = 600.0,
) -> type[RemoteToolEnvironment]:
    """Return the class that TRL's `GRPOTrainer` takes as its `environment_factory`.

    The environment gives the reward: the sum over the episode, which TRL logs under the class's name. All members of a
    group must play one task, so the data set needs a column `seed`; `tasks` makes one.

    Args:
        url: The server's address.
        env_id: One of the server's catalog; its actions and observations are text.
        env_kwargs: What the environment's `kwargs_schema` allows.
        token: Bearer token.
        timeout_s: How long one call may take, with all reconnects and retries.

    Raises:
        ProblemError: The server refuses, for example `unknown_env`.
        ConnectionError: The server cannot be reached.
        ValueError: The environment is not played by text, or a tool cannot be a method.

    Examples:
        >>> trainer = GRPOTrainer(
        ...     model="Qwen/Qwen3-0.6B",
        ...     args=GRPOConfig(max_completion_length=1024),
        ...     train_dataset=tasks(512),
        ...     environment_factory=environment_factory("http://127.0.0.1:8000", "FrozenLake-v0"),
        ... )
    """

    def connect() -> RemoteEnv:
        return RemoteEnv(url, env_id, env_kwargs, token=token, timeout_s=timeout_s)

    probe = connect()
    try:
        for space in (probe.action_space, probe.observation_space):
            if not isinstance(space, UnicodeText):
                raise ValueError(f"{env_id} is not played by text: serve it with --gymnasium-text")
        _, info = probe.reset(seed=0)
    finally:
        probe.close()
    methods: dict[str, Any] = {tool.name: _tool_method(tool) for tool in playable_tools(info)}
    # TRL logs the reward under this name.
    name = re.sub(r"\W", "_", env_id)
    return type(name, (RemoteToolEnvironment,), methods | {"_connect": staticmethod(connect)})


def tasks(count: int, *, first_seed: int = 0, prompt: str = "") -> Dataset:
    """Return a data set for `GRPOTrainer`: a row for each seed.

    TRL appends what the environment's `reset` returns, the instruction and the first observation, to the prompt.

    Args:
        count: How many tasks.
        first_seed: Seed of the first; the others follow it.
        prompt: What the user message begins with.
    """
    from datasets import Dataset

    message = [{"role": "user", "content": prompt}]
    return Dataset.from_list(
        [{"prompt": message, "seed": seed} for seed in range(first_seed, first_seed + count)]
    )


class RemoteToolEnvironment:
    """One environment on a server, as TRL plays it; `environment_factory` makes the classes that are used.

    TRL makes one instance for each rollout of a batch, and uses it again for the next batch.
    """

    _connect: Callable[[], RemoteEnv]

    def __init__(self) -> None:
        self._env = type(self)._connect()
        self._info: Mapping[str, Any] = {}
        self._reward = 0.0
        self._over = True
        self._failed = False

    def reset(self, **row: Any) -> str:
        """Begin the episode of a row of the data set; return the instruction and the first observation.

        Raises:
            ValueError: The row has no seed.
        """
        seed = row.get("seed")
        if isinstance(seed, bool) or not isinstance(seed, int):
            raise ValueError(
                "the data set needs a column 'seed' of whole numbers, so that all members of a group play one task: "
                "train_dataset=rollgym.integrations.trl.tasks(512)"
            )
        self._reward, self._over, self._failed = 0.0, False, False
        observation, info = self._env.reset(seed=seed)
        self._info = info
        return opening_text(observation, info)

    def get_reward(self) -> float | None:
        """Return the sum of the episode's rewards; None, which TRL leaves out of the group, if it failed."""
        return None if self._failed else self._reward

    def _call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool in the environment, and return what the model is told."""
        if self._over:
            return OVER
        try:
            action = action_of(name, arguments, self._info)
        except UnwritableCallError as error:
            return f"error: {error}. Nothing was run."
        try:
            observation, reward, terminated, truncated, info = self._env.step(action)
            if not math.isfinite(reward):
                raise RuntimeError(f"the reward of a step is {reward}")
        except BaseException:
            # TRL tells the model what went wrong, and goes on. The reward so far is not the model's doing.
            self._failed = self._over = True
            raise
        self._reward += reward
        self._over = terminated or truncated
        said = answer_text(observation, info)
        return f"{said}\n{OVER}" if self._over else said


def _tool_method(tool: ToolDeclaration) -> Callable[..., str]:
    """Return a method whose signature and docstring say what a tool's declaration says.

    Raises:
        ValueError: The tool's name, or that of a parameter, cannot be written in Python.
    """
    if not _is_name(tool.name) or tool.name in _RESERVED:
        raise ValueError(f"the tool {tool.name!r} cannot be a method of a TRL environment: rename it")
    properties = tool.parameters.get("properties")
    properties = properties if isinstance(properties, Mapping) else {}
    required = tool.parameters.get("required")
    required = required if isinstance(required, Sequence) else ()
    parameters: dict[str, inspect.Parameter] = {}
    meanings: dict[str, str] = {}
    # In Python, parameters without a default come first.
    for name in sorted(properties, key=lambda each: each not in required):
        if not _is_name(name):
            raise ValueError(f"the parameter {name!r} of the tool {tool.name!r} cannot be written in Python")
        schema = properties[name] if isinstance(properties[name], Mapping) else {}
        annotation: Any = _type_of(schema)
        default: Any = inspect.Parameter.empty
        if name not in required:
            default = schema.get("default")
            annotation = annotation if default is not None else annotation | None
        parameters[name] = inspect.Parameter(
            name, inspect.Parameter.POSITIONAL_OR_KEYWORD, default=default, annotation=annotation
        )
        meanings[name] = _meaning_of(name, schema)

    def method(self: RemoteToolEnvironment, **arguments: Any) -> str:
        # A parameter that the model left out is left out of the call.
        given = {name: value for name, value in arguments.items() if value is not None or name in required}
        return self._call(tool.name, given)

    return _described(method, tool.name, tool.description or tool.name, parameters, meanings)


def _described(
    method: Callable[..., str],
    name: str,
    description: str,
    parameters: Mapping[str, inspect.Parameter],
    meanings: Mapping[str, str],
) -> Callable[..., str]:
    """Give a method the name, signature and Google docstring from which Transformers makes the tool's schema."""
    own = inspect.Parameter("self", inspect.Parameter.POSITIONAL_OR_KEYWORD)
    signature = inspect.Signature([own, *parameters.values()], return_annotation=str)

    def described(self: RemoteToolEnvironment, *values: Any, **named: Any) -> str:
        arguments = signature.bind(self, *values, **named).arguments
        del arguments["self"]
        return method(self, **arguments)

    changed: Any = described
    changed.__name__ = changed.__qualname__ = name
    changed.__signature__ = signature
    changed.__annotations__ = {each.name: each.annotation for each in parameters.values()} | {"return": str}
    lines = [_one_line(description), ""]
    if meanings:
        lines += ["Args:", *(f"    {parameter}: {meaning}" for parameter, meaning in meanings.items()), ""]
    lines += ["Returns:", "    What the environment says."]
    changed.__doc__ = "\n".join(lines)
    return described


def _meaning_of(name: str, schema: Mapping[str, Any]) -> str:
    meaning = _one_line(str(schema.get("description") or name.replace("_", " ").capitalize()))
    choices = schema.get("enum")
    # Transformers reads choices from the end of a parameter's description.
    return f"{meaning} (choices: {json.dumps(choices)})" if isinstance(choices, list) else meaning


def _type_of(schema: Mapping[str, Any]) -> Any:
    kind = schema.get("type")
    if kind == "array" and isinstance(items := schema.get("items"), Mapping):
        return list[_type_of(items)]  # type: ignore[misc]
    return _TYPES.get(kind, str) if isinstance(kind, str) else str


def _is_name(name: str) -> bool:
    return name.isidentifier() and not keyword.iskeyword(name) and not name.startswith("_") and name != "self"


def _one_line(text: str) -> str:
    """Return a text in one line: its own lines would look like sections of the docstring."""
    return " ".join(text.split())
