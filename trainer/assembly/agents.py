"""Opens what an agent needs that is a program or a service: the endpoint, and who sets it to work."""

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from trainer.agents.black_box import BlackBoxPlayer, open_black_box
from trainer.agents.replies import ToolFormat, format_of_template
from trainer.agents.runners import AgentRunner, ProgramRunner, ServiceRunner
from trainer.agents.session import PolicyService
from trainer.agents.splicing import SplicingRenderer
from trainer.assembly.build import Players, Policy, sampling_params
from trainer.config.agents import agent_kind, command_line
from trainer.config.run import RunSettings
from trainer.core.console import RunConsole


@asynccontextmanager
async def open_agent(
    settings: RunSettings, policy: Policy, players: Players, console: RunConsole
) -> AsyncIterator[BlackBoxPlayer | None]:
    """Serve the endpoint while the context is open, where `rollout.agent` needs one; None where it does not.

    Raises:
        ConfigError: If the endpoint's address cannot be used.
    """
    if settings.rollout.agent is None or not settings.rollout.black_box:
        yield None
        return
    agents = settings.agents
    opening = open_black_box(
        policy_service(settings, policy, players),
        agent_runner(settings),
        time.time,
        host=agents.host,
        port=agents.port,
        public_url=agents.public_url,
        max_body_bytes=agents.max_body_mb << 20,
    )
    async with opening as player:
        console.say(f"agents reach the policy at {player.url}")
        yield player


def policy_service(settings: RunSettings, policy: Policy, players: Players) -> PolicyService:
    """Return what answers the agents of a run."""
    return PolicyService(
        client=players.client,
        renderer=SplicingRenderer(policy.renderer),
        sampling=sampling_params(settings, policy.renderer),
        max_length=settings.model.max_length,
        model=settings.agents.model,
        tool_format=_tool_format(settings, policy),
        wishes=settings.agents.sampling,
        seed=settings.seed,
        purpose="train",
    )


def _tool_format(settings: RunSettings, policy: Policy) -> ToolFormat:
    if settings.agents.tool_format == "auto":
        return format_of_template(str(policy.tokenizer.chat_template))
    return settings.agents.tool_format


def agent_runner(settings: RunSettings) -> AgentRunner:
    """Return who sets the agent of `rollout.agent` to work."""
    agent, agents = settings.rollout.agent or "", settings.agents
    if agent_kind(agent) == "service":
        return ServiceRunner(agent, agents.concurrency)
    return ProgramRunner(command_line(agent), agents.concurrency, agents.environment, agents.grace_s)
