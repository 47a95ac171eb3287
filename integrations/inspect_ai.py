"""Environments and verifiers of a server in Inspect AI: tasks, a solver and scorers.

`environment_task` evaluates a model on the episodes of an environment. `verifier_task` lets a verifier of the server
score answers, and offers the tools of an environment through the server's MCP endpoint.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rollgym.clients.client.client import EnvClient
from rollgym.clients.evaluation.chat import ModelReply, RequestedCall
from rollgym.clients.evaluation.player import Conversation
from rollgym.clients.protocol.addresses import server_token

if TYPE_CHECKING:
    from inspect_ai import Task
    from inspect_ai.model import ChatMessage, ModelOutput
    from inspect_ai.scorer import Scorer
    from inspect_ai.solver import Generate, Solver, TaskState
    from inspect_ai.tool import Tool

_STORE = "rollgym"


def environment_task(
    url: str,
    env_id: str,
    env_kwargs: Mapping[str, Any] | None = None,
    *,
    episodes: int = 20,
    first_seed: int = 0,
    max_turns: int = 64,
    token: str | None = None,
) -> Task:
    """Return a task of Inspect whose samples are episodes of an environment.

    Args:
        url: The server's address.
        env_id: One of the server's catalog; its actions and observations are text.
        env_kwargs: What the environment's `kwargs_schema` allows.
        episodes: How many samples.
        first_seed: Seed of the first; the others follow it.
        max_turns: Replies after which an episode is cut off.
        token: Bearer token.

    Examples:
        >>> eval(environment_task("http://127.0.0.1:8000", "ToolUse-v0"), model="openai/gpt-4.1-mini")
    """
    from inspect_ai import Task
    from inspect_ai.dataset import MemoryDataset, Sample

    samples = [
        Sample(id=seed, input=f"{env_id}, seed {seed}", metadata={"seed": seed})
        for seed in range(first_seed, first_seed + episodes)
    ]
    return Task(
        name=env_id,
        dataset=MemoryDataset(samples, name=env_id),
        solver=play_environment(url, env_id, env_kwargs, max_turns=max_turns, token=token),
        scorer=environment_scorer(),
    )


def verifier_task(
    url: str,
    env_id: str,
    items: Sequence[Mapping[str, Any]],
    *,
    prompt_field: str = "question",
    instruction: str = "",
    tools_of: str | None = None,
    message_limit: int | None = 50,
    token: str | None = None,
) -> Task:
    """Return a task of Inspect whose answers a verifier of the server scores.

    Args:
        url: The server's address.
        env_id: A stateless environment of the server's catalog.
        items: Task fields, as the verifier takes them.
        prompt_field: The field that the model is asked.
        instruction: Stands before it.
        tools_of: An environment whose tools the model may call, through the server's MCP endpoint.
        message_limit: Messages of a sample. A model with tools answers by calling `submit`, and Inspect asks one that
            does not for ever.
        token: Bearer token.

    Raises:
        ValueError: An item has no such field.
    """
    from inspect_ai import Task
    from inspect_ai.agent import react
    from inspect_ai.dataset import MemoryDataset, Sample
    from inspect_ai.solver import generate
    from inspect_ai.tool import mcp_server_http

    for index, item in enumerate(items):
        if not isinstance(item.get(prompt_field), str):
            raise ValueError(f"items[{index}] has no text {prompt_field!r}: name the field with prompt_field")
    samples = [
        Sample(input=f"{instruction}\n\n{item[prompt_field]}".strip(), metadata=dict(item)) for item in items
    ]
    solver: Any = generate()
    if tools_of is not None:
        server = mcp_server_http(
            name=tools_of, url=f"{url.rstrip('/')}/mcp/{tools_of}", authorization=server_token(token)
        )
        solver = react(tools=[server])
    return Task(
        name=env_id,
        dataset=MemoryDataset(samples, name=env_id),
        solver=solver,
        scorer=verifier_scorer(url, env_id, token=token),
        message_limit=message_limit,
    )


def play_environment(
    url: str,
    env_id: str,
    env_kwargs: Mapping[str, Any] | None = None,
    *,
    max_turns: int = 64,
    token: str | None = None,
) -> Solver:
    """Return a solver that plays the episode of the seed in a sample's metadata.

    Inspect's limits of messages, tokens and time hold as always. An error of the environment is an error of the sample,
    not a wrong answer.
    """
    from inspect_ai.solver import solver

    @solver(name="play_environment")
    def play() -> Solver:
        async def solve(state: TaskState, generate: Generate) -> TaskState:
            async with EnvClient(url, token=token) as client:
                session = await client.make(env_id, env_kwargs)
                observation, info = await session.reset(int(state.metadata["seed"]))
                conversation = Conversation(observation, info)
                state.messages = _messages(conversation, 0)
                state.tools = [
                    _tool(tool.name, tool.description, tool.parameters) for tool in conversation.tools
                ]
                # Kept from the start: a limit of Inspect ends the solver, and what was reached by then is scored.
                played: dict[str, Any] = {"reward": 0.0, "success": info.get("success")}
                state.store.set(_STORE, played)
                for _ in range(max_turns):
                    state = await generate(state, tool_calls="none")
                    if state.completed:
                        break
                    action = conversation.hear(_reply(state.output))
                    heard = len(conversation.messages)
                    if action is None:
                        state.messages += _messages(
                            conversation, heard - len(state.output.message.tool_calls or ())
                        )
                        continue
                    observation, reward, terminated, truncated, info = await session.step(action)
                    played["reward"] += reward
                    played["success"] = info.get("success")
                    state.store.set(_STORE, played)
                    conversation.observe(observation, info)
                    state.messages += _messages(conversation, heard)
                    if terminated or truncated:
                        break
            return state

        return solve

    return play()


def environment_scorer() -> Scorer:
    """Return a scorer of what `play_environment` left: `success`, as the environment says, and `reward`.

    An environment that says nothing of success leaves it unscored, and Inspect's means do not count it.
    """
    from inspect_ai.scorer import Score, mean, scorer, stderr

    # Inspect names metrics of several values by their keys.
    @scorer(name="environment", metrics={"success": [mean(), stderr()], "reward": [mean(), stderr()]})
    def made() -> Scorer:
        async def score(state: TaskState, target: Any) -> Score:
            found = state.store.get(_STORE, None)
            if found is None:
                raise RuntimeError("no episode was played: the task's solver is not play_environment")
            success = found["success"]
            # Inspect takes NaN for a value that was not scored.
            scored = math.nan if success is None else float(bool(success))
            return Score(value={"success": scored, "reward": found["reward"]})

        return score

    return made()


def verifier_scorer(url: str, env_id: str, *, token: str | None = None) -> Scorer:
    """Return a scorer that asks a verifier of the server; a sample's metadata are the task fields.

    A verifier that fails or runs out of time is an error of the sample, not a wrong answer.
    """
    from inspect_ai.scorer import Score, mean, scorer, stderr

    @scorer(name=env_id, metrics=[mean(), stderr()])
    def made() -> Scorer:
        async def score(state: TaskState, target: Any) -> Score:
            async with EnvClient(url, token=token) as client:
                item = {**state.metadata, "response": state.output.completion}
                (verdict,) = await client.verify(env_id, [item])
            if verdict.outcome in ("error", "timeout"):
                raise RuntimeError(f"{env_id} could not score ({verdict.outcome}): {verdict.detail}")
            return Score(
                value=verdict.score,
                answer=state.output.completion,
                explanation=str(verdict.detail or verdict.outcome),
            )

        return score

    return made()


def _reply(output: ModelOutput) -> ModelReply:
    message = output.message
    calls = tuple(
        RequestedCall(call.id, call.function, json.dumps(call.arguments)) for call in message.tool_calls or ()
    )
    return ModelReply(content=message.text, calls=calls, finish_reason=str(output.stop_reason))


def _messages(conversation: Conversation, first: int) -> list[ChatMessage]:
    """Return messages of the conversation, from an index on, as Inspect has them."""
    from inspect_ai.model import ChatMessageTool, ChatMessageUser

    found: list[ChatMessage] = []
    for message in conversation.messages[first:]:
        if message["role"] == "tool":
            found.append(ChatMessageTool(content=message["content"], tool_call_id=message["tool_call_id"]))
        else:
            found.append(ChatMessageUser(content=message["content"]))
    return found


def _tool(name: str, description: str, parameters: Mapping[str, Any]) -> Tool:
    """Return a declaration; the solver gives calls to the environment, and Inspect never calls it."""
    from inspect_ai.tool import ToolDef, ToolParams

    async def never(**arguments: Any) -> str:
        raise RuntimeError("the environment runs calls")

    properties = {
        # Inspect refuses parameters without a description.
        parameter: {"description": parameter.replace("_", " "), **schema}
        for parameter, schema in (parameters.get("properties") or {}).items()
    }
    schema = {"properties": properties, "required": parameters.get("required") or []}
    return ToolDef(never, name, description or name, ToolParams.model_validate(schema)).as_tool()
