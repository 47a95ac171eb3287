"""Environments of a server for verl's tool agent loop: tasks as Parquet, tools as YAML, and the reward function.

verl calls `execute` of a tool with the data of the trajectory, which here hold the episode: it begins with the first
call, and all tools of the trajectory share it.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import yaml

from rollgym.clients.client.client import EnvClient
from rollgym.clients.client.env import RemoteEnv
from rollgym.clients.client.session import EnvSession
from rollgym.clients.protocol.spaces import UnicodeText
from rollgym.clients.protocol.tool_calls import answer_text
from rollgym.clients.replies.formats.calls import UnwritableCallError
from rollgym.extras import import_extra
from rollgym.integrations.tool_play import OVER, action_of, opening_text, playable_tools

if TYPE_CHECKING:
    from verl.tools.schemas import ToolResponse

_EPISODE = "_rollgym_episode"
_IDLE_TIMEOUT_S = 600.0


def write_run_files(
    directory: Path,
    url: str,
    env_id: str,
    env_kwargs: Mapping[str, Any] | None = None,
    *,
    count: int,
    first_seed: int = 0,
    token: str | None = None,
) -> tuple[Path, Path]:
    """Write what a run of verl needs of an environment: `tasks.parquet` and `tools.yaml`.

    The environment begins each task once: verl wants the prompt (the instruction and the first observation) before the
    episode.

    Args:
        directory: Where they are written.
        url: The server's address.
        env_id: One of the server's catalog; its actions and observations are text.
        env_kwargs: What the environment's `kwargs_schema` allows.
        count: How many tasks, one or more.
        first_seed: Seed of the first; the others follow it.
        token: Bearer token. It is written nowhere: verl's workers take theirs from ROLLGYM_TOKEN.

    Returns:
        The paths: `data.train_files`, and `actor_rollout_ref.rollout.multi_turn.tool_config_path`.

    Raises:
        ProblemError: The server refuses.
        ValueError: There is no task; or the environment is not played by text, or not deterministic, so that the
            episode would not be the one of its prompt.
    """
    pyarrow, parquet = import_extra("pyarrow", "data"), import_extra("pyarrow.parquet", "data")
    if count < 1:
        raise ValueError(f"count is {count}: a run has at least one task")
    env = RemoteEnv(url, env_id, env_kwargs, token=token)
    try:
        for space in (env.action_space, env.observation_space):
            if not isinstance(space, UnicodeText):
                raise ValueError(f"{env_id} is not played by text: serve it with --gymnasium-text")
        if not env.session.env.deterministic:
            raise ValueError(
                f"{env_id} is not deterministic: the episode that a seed begins would not be the one of its prompt"
            )
        rows = []
        for seed in range(first_seed, first_seed + count):
            observation, info = env.reset(seed=seed)
            tools = playable_tools(info)
            rows.append(_row(env_id, seed, opening_text(observation, info), [tool.name for tool in tools]))
    finally:
        env.close()
    directory.mkdir(parents=True, exist_ok=True)
    tasks_path, tools_path = directory / "tasks.parquet", directory / "tools.yaml"
    parquet.write_table(pyarrow.Table.from_pylist(rows), tasks_path)
    config = {"type": "native", "url": url, "env_id": env_id, "env_kwargs": dict(env_kwargs or {})}
    entries = [
        {
            "class_name": f"{EnvironmentTool.__module__}.{EnvironmentTool.__name__}",
            "config": config,
            "tool_schema": tool.as_openai(),
        }
        for tool in tools
    ]
    tools_path.write_text(yaml.safe_dump({"tools": entries}, sort_keys=False), encoding="utf-8")
    return tasks_path, tools_path


def compute_score(
    data_source: str, solution_str: str, ground_truth: str, extra_info: Mapping[str, Any] | None = None
) -> float:
    """Return the episode's reward, for verl's `custom_reward_function`: the sum of what the tools returned."""
    return float(sum((extra_info or {}).get("tool_rewards") or ()))


class EnvironmentTool:
    """A tool of an environment, with the methods of verl's `BaseTool`; `tools.yaml` names it.

    Args:
        config: `url`, `env_id` and `env_kwargs`.
        tool_schema: What the model is told; its name says which tool of the environment is called.
    """

    def __init__(self, config: Mapping[str, Any], tool_schema: Any) -> None:
        self.config = config
        self.tool_schema = tool_schema
        self.name: str = tool_schema.function.name
        self._client: EnvClient | None = None

    def get_openai_tool_schema(self) -> Any:
        """Return what the model is told."""
        return self.tool_schema

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Return a name for the call: verl creates an instance for each, and the episode outlives it."""
        from verl.tools.schemas import ToolResponse

        return instance_id or uuid4().hex, ToolResponse()

    async def execute(
        self, instance_id: str, parameters: dict[str, Any], **kwargs: Any
    ) -> tuple[ToolResponse, float, dict[str, Any]]:
        """Call the tool in the trajectory's episode.

        Returns:
            What the environment says, the reward of the step, and no metrics.

        Raises:
            ValueError: The data have no seed for this tool.
            RuntimeError: The reward is not finite.
        """
        from verl.tools.schemas import ToolResponse

        data = kwargs["agent_data"]
        episode: _Episode | None = getattr(data, _EPISODE, None)
        if episode is None:
            episode = _Episode()
            setattr(data, _EPISODE, episode)
        # The calls of one reply come at once.
        async with episode.lock:
            if episode.over:
                return ToolResponse(text=OVER), 0.0, {}
            # Until the step is answered: verl tells the model of an error, and goes on.
            episode.over = True
            session = episode.session or await self._begin(episode, data)
            try:
                action = action_of(self.name, parameters, episode.info)
            except UnwritableCallError as error:
                episode.over = False
                return ToolResponse(text=f"error: {error}. Nothing was run."), 0.0, {}
            observation, reward, terminated, truncated, info = await session.step(action)
            if not math.isfinite(reward):
                raise RuntimeError(f"the reward of a step is {reward}")
            text = answer_text(observation, info)
            episode.over = terminated or truncated
            if episode.over:
                text = f"{text}\n{OVER}"
                await session.close()
            return ToolResponse(text=text), reward, {}

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        """Return 0: rewards come with the calls."""
        return 0.0

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Do nothing: the episode goes on with the next call."""

    async def _begin(self, episode: _Episode, data: Any) -> EnvSession:
        seed = ((data.tools_kwargs.get(self.name) or {}).get("create_kwargs") or {}).get("seed")
        if seed is None:
            raise ValueError(
                f"the data have no seed for the tool {self.name!r}: rollgym.integrations.verl.write_run_files"
            )
        if self._client is None:
            self._client = EnvClient(self.config["url"])
        # verl does not say when a trajectory ends, so the server closes the sessions of those that were cut off.
        session = await self._client.make(
            self.config["env_id"], self.config.get("env_kwargs"), idle_timeout_s=_IDLE_TIMEOUT_S
        )
        _, episode.info = await session.reset(int(seed))
        episode.session = session
        return session


@dataclass(slots=True)
class _Episode:
    """The episode of a trajectory."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    session: EnvSession | None = None
    info: Mapping[str, Any] = field(default_factory=dict)
    over: bool = False


def _row(env_id: str, seed: int, prompt: str, tools: list[str]) -> dict[str, Any]:
    """Return a row as verl's data sets have them."""
    return {
        "data_source": env_id,
        "agent_name": "tool_agent",
        "prompt": [{"role": "user", "content": prompt}],
        "reward_model": {"style": "rule", "ground_truth": ""},
        "extra_info": {
            "index": seed,
            "seed": seed,
            "need_tools_kwargs": True,
            "tools_kwargs": {name: {"create_kwargs": {"seed": seed}} for name in tools},
        },
    }
