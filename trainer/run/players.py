"""What plays episodes with the policy: inference, prompts, slots, and the player with or without an agent.

An agent that is a program or a service calls the endpoint that is opened for it.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from transformers import PreTrainedModel

from rollgym.trainer.cluster.cluster import Cluster
from rollgym.trainer.config.agents import agent_kind, command_line
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.plugins import Plugin, load_plugin
from rollgym.trainer.inference.base import InferenceClient, SamplingParams
from rollgym.trainer.inference.forwarding import GenerationQueue
from rollgym.trainer.learn.weights.publisher import WeightPublisher
from rollgym.trainer.models.picture_processor import PictureProcessor
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.rollout.actors import ModelActor
from rollgym.trainer.rollout.agent import Session, play_episode
from rollgym.trainer.rollout.agents.black_box import BlackBoxPlayer, open_black_box
from rollgym.trainer.rollout.agents.policy_service import PolicyService
from rollgym.trainer.rollout.agents.replies import format_of_template
from rollgym.trainer.rollout.agents.runners import AgentRunner, ProgramRunner, ServiceRunner
from rollgym.trainer.rollout.agents.sandboxed import (
    PORT,
    SandboxedRunner,
    SandboxPlan,
    absolute_words,
    open_agent_sandbox,
)
from rollgym.trainer.rollout.agents.splicing import SplicingRenderer
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.episodes import PlayEpisode, play_coroutine
from rollgym.trainer.rollout.log_replay import LoggedClient, LogReplay
from rollgym.trainer.rollout.prompts import ChatRenderer, PromptBuilder, prompt_maker
from rollgym.trainer.rollout.slots import BoundedSlots, DeterministicBatcher, EpisodeSlots
from rollgym.trainer.run.backends import policy_backend
from rollgym.trainer.run.environments import server_urls
from rollgym.trainer.run.inference import open_inference
from rollgym.trainer.run.policy import Policy, build_policy
from rollgym.trainer.run.probe import try_pictures
from rollgym.trainer.tasks.task import Task


@dataclass(frozen=True, slots=True)
class Players:
    """What is needed to play episodes with the policy.

    Attributes:
        client: The inference client.
        slots: Notified of every episode's start and end.
        make_prompts: Makes the prompt builder of one episode.
        publisher: Publishes weights to the inference engines.
        updating: Held while the policy's weights change.
    """

    client: InferenceClient
    slots: EpisodeSlots
    make_prompts: Callable[[], PromptBuilder]
    publisher: WeightPublisher
    updating: Callable[[], AbstractAsyncContextManager[None]]


def sampling_params(settings: RunSettings, renderer: ChatRenderer, *, greedy: bool = False) -> SamplingParams:
    """Return how replies are drawn in training, or the greedy variant of it."""
    return SamplingParams(
        max_new_tokens=settings.rollout.max_new_tokens,
        temperature=0.0 if greedy else settings.rollout.temperature,
        top_p=1.0 if greedy else settings.rollout.top_p,
        top_k=0 if greedy else settings.rollout.top_k,
        stop_token_ids=renderer.stop_token_ids,
        routed_experts=settings.inference.routed_experts and not greedy,
    )


@asynccontextmanager
async def open_players(
    settings: RunSettings,
    policy: Policy,
    pool: EnvironmentPool,
    console: RunConsole,
    log_replay: LogReplay | None = None,
    *,
    trains_meanwhile: bool = False,
    cluster: Cluster | None = None,
) -> AsyncIterator[Players]:
    """Open the inference of a run, and the prompt builders and slots in front of it.

    Args:
        settings: The run.
        policy: The policy that plays.
        pool: The environments; in deterministic mode, as many episodes run at one time as every server allows.
        console: Shows in which ways the chat template needs changed conversations.
        log_replay: The rollout log, for replaying and for recording training's replies.
        trains_meanwhile: Whether the policy is trained while it plays. Only then the engine needs weights of its own.
        cluster: Places the processes of roles; without it, all of them are this process.

    Raises:
        ConfigError: If engine and training do not agree on log-probabilities.
    """
    torch.set_num_threads(settings.threads)
    make_prompts = prompt_maker(policy.renderer, settings.prompt)
    policy.renderer.template.say = console.say
    if settings.prompt.tools == "template":
        policy.renderer.require_tools()

    prompt = policy.renderer.prompt([{"role": "user", "content": "Which way?"}])
    opening = open_inference(
        settings,
        policy.model,
        policy.tokenizer,
        prompt,
        console,
        trains_meanwhile=trains_meanwhile,
        cluster=cluster,
        build=partial(_sampled_model, settings),
    )
    async with opening as inference:
        if isinstance(policy.renderer.pictures, PictureProcessor):
            policy.renderer.pictures = await try_pictures(
                settings, policy.model, inference.client, policy.renderer
            )
        logged = inference.client if log_replay is None else LoggedClient(inference.client, log_replay)
        rollout = settings.rollout
        limits = rollout.max_concurrent_by_environment
        # An agent's episode that waited for its place would hold a session meanwhile, and its time would run.
        agents = settings.agents.concurrency if rollout.black_box else None
        total = min((each for each in (rollout.max_concurrent_episodes, agents) if each), default=None)
        client: InferenceClient
        slots: EpisodeSlots
        if settings.deterministic:
            bounds = [total, *limits.values(), await pool.places(server_urls(settings))]
            batcher = DeterministicBatcher(logged, min(bound for bound in bounds if bound is not None))
            client, slots = batcher, batcher
        else:
            client = logged
            if settings.inference.embedded:  # servers have lines of their own
                client = GenerationQueue(logged, rollout.max_concurrent_sequences)
            slots = BoundedSlots(total, limits)
        publisher = WeightPublisher([client], inference.folders, inference.check)
        yield Players(client, slots, make_prompts, publisher, inference.updating)


def _sampled_model(settings: RunSettings) -> PreTrainedModel:
    """Build a model that receives the policy's weights, with adapters if those are trained."""
    model = settings.model.model_copy(update={"lora": None})
    return build_policy(settings.model_copy(update={"model": model})).model


async def bring_weights(settings: RunSettings, policy: Policy, players: Players) -> None:
    """Publish the policy to its servers, if nothing is trained; the embedded engine has it already."""
    if not settings.inference.embedded:
        await players.publisher.publish(policy_backend(settings, policy.model), 0)


def model_actor(
    settings: RunSettings, policy: Policy, players: Players, purpose: str, *, greedy: bool = False
) -> ModelActor:
    """Return a player of one episode that asks the policy."""
    return ModelActor(
        players.client,
        players.make_prompts(),
        sampling_params(settings, policy.renderer, greedy=greedy),
        settings.model.max_length,
        settings.seed,
        purpose,
        settings.rollout.groups_per_step,
        keeps_next_prompt=settings.algorithm.bootstraps and purpose == "train",
    )


_SHOWN_FOLDER = "/var/tmp"
"""Folder of the endpoint's socket, which sandboxes mount; their `/tmp` is private."""


@dataclass(frozen=True, slots=True)
class PolicyPlayer:
    """Plays episodes with the policy: by `rollout.agent`, or by the built-in player if that is not set.

    Attributes:
        settings: The run.
        policy: The policy's tokenizer and renderer.
        players: The inference client and prompt builders.
        coroutine: The agent, if it is a user's coroutine.
        black_box: The agent, if it is a program or a service.
    """

    settings: RunSettings
    policy: Policy
    players: Players
    coroutine: Plugin | None
    black_box: BlackBoxPlayer | None

    def playing(self, purpose: str, max_turns: int, *, greedy: bool = False) -> PlayEpisode:
        """Return the player of episodes that are not trained on.

        Args:
            purpose: Name of the family of random streams.
            max_turns: Turns after which an episode is truncated.
            greedy: Whether the most likely tokens are taken, regardless of an agent's request.
        """
        if self.black_box is not None:
            return _with_black_box(self.black_box, self._sampling(greedy), purpose, max_turns, greedy=greedy)

        async def play(session: Session, task: Task) -> Trajectory:
            actor = model_actor(self.settings, self.policy, self.players, purpose, greedy=greedy)
            if self.coroutine is None:
                return await play_episode(session, task, 0, actor, max_turns)
            known = self.policy.vocabulary
            return await play_coroutine(self.coroutine, session, task, 0, actor, max_turns, vocabulary=known)

        return play

    @property
    def slots(self) -> EpisodeSlots:
        """Notified of every episode's start and end."""
        return self.players.slots

    @property
    def concurrency(self) -> int:
        """How many episodes are worth to be played at one time."""
        most = self.settings.rollout.max_concurrent_sequences
        return most if self.black_box is None else min(most, self.settings.agents.concurrency)

    @property
    def timeout_s(self) -> float | None:
        """How long an episode may take; None if its player always ends by itself."""
        return None if self.settings.rollout.agent is None else self.settings.rollout.episode_timeout_s

    def _sampling(self, greedy: bool) -> SamplingParams:
        return sampling_params(self.settings, self.policy.renderer, greedy=greedy)


def _with_black_box(
    black_box: BlackBoxPlayer, sampling: SamplingParams, purpose: str, max_turns: int, *, greedy: bool
) -> PlayEpisode:
    # Nothing is learnt from these episodes.
    service = replace(black_box.service, purpose=purpose, sampling=sampling, unstructured="")
    if greedy:  # an agent that asks for the temperature of training does nothing wrong
        service = replace(service, wishes="run")
    player = replace(black_box, service=service)

    async def play(session: Session, task: Task) -> Trajectory:
        return await player.play(session, task, 0, 0, max_turns)

    return play


@asynccontextmanager
async def open_player(
    settings: RunSettings, policy: Policy, players: Players, console: RunConsole
) -> AsyncIterator[PolicyPlayer]:
    """Open the player of the policy's episodes, and serve the endpoint that its agent needs, if any.

    Raises:
        ConfigError: If the endpoint's address cannot be used, or the agent is unknown.
    """
    rollout, agents = settings.rollout, settings.agents
    if rollout.agent is None or not rollout.black_box:
        coroutine = None if rollout.agent is None else load_plugin(rollout.agent, "rollout.agent")
        yield PolicyPlayer(settings, policy, players, coroutine, None)
        return
    async with AsyncExitStack() as stack:
        runner, socket = agent_runner(settings), None
        if runner is None:
            socket = stack.enter_context(_socket_folder()) / "endpoint"
            runner = await asyncio.to_thread(_sandboxed_runner, settings, socket)
        opening = open_black_box(
            policy_service(settings, policy, players),
            runner,
            time.time,
            host=agents.host,
            port=agents.port,
            public_url=agents.public_url if socket is None else f"http://127.0.0.1:{PORT}",
            max_body_bytes=agents.max_body_mb << 20,
            unix=socket,
        )
        black_box = await stack.enter_async_context(opening)
        console.say(f"agents reach the policy at {black_box.url}" + (" in their sandbox" if socket else ""))
        yield PolicyPlayer(settings, policy, players, None, black_box)


@contextmanager
def _socket_folder() -> Iterator[Path]:
    with TemporaryDirectory(prefix="rollgym-agents-", dir=_SHOWN_FOLDER) as name:
        folder = Path(name)
        folder.chmod(0o755)  # programs in a sandbox are another user
        yield folder


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
        unstructured=why_unstructured(settings),
    )


def why_unstructured(settings: RunSettings) -> str:
    """Return why agents of a run cannot ask for structured output; empty if they can."""
    if not settings.compares_sampling:
        return ""
    whose = "algorithm.proximal or algorithm.correction compares those at sampling with the policy's: take proximal "
    whose += "'recomputed' without correction"
    if settings.distill is not None:
        whose = (
            "distill.estimate 'sampled' compares those at sampling with the student's: take another estimate"
        )
    return (
        "log-probabilities of structured outputs are of what they leave of the vocabulary, and "
        f"{whose}, or have the agent ask for plain text"
    )


def _tool_format(settings: RunSettings, policy: Policy) -> str:
    if settings.agents.tool_format != "auto":
        return settings.agents.tool_format
    try:
        return format_of_template(str(policy.tokenizer.chat_template))
    except ValueError as error:
        raise ConfigError(f"{error}; uninstall it, or name a format in agents.tool_format") from error


def agent_runner(settings: RunSettings) -> AgentRunner | None:
    """Return the runner of the agent of `rollout.agent`; None if it runs in a sandbox."""
    agent, agents = settings.rollout.agent or "", settings.agents
    if agent_kind(agent) == "service":
        return ServiceRunner(agent, agents.concurrency)
    if agents.sandboxed:
        return None
    return ProgramRunner(command_line(agent), agents.concurrency, agents.environment, agents.grace_s)


def _sandboxed_runner(settings: RunSettings, socket: Path) -> SandboxedRunner:
    agents = settings.agents
    words = command_line(settings.rollout.agent or "", here=not agents.runs_images)
    words = words if agents.runs_images else absolute_words(words)
    plan = SandboxPlan(
        agents.sandbox,
        agents.sandbox_read_only,
        agents.sandbox_memory_mb,
        agents.sandbox_disk_mb,
        settings.rollout.episode_timeout_s + agents.grace_s,
    )
    sandbox = open_agent_sandbox(plan, words, socket, agents.concurrency)
    return SandboxedRunner(
        sandbox, words, socket, agents.concurrency, agents.environment, agents.grace_s, plan.limits
    )
