"""Everything that plays episodes with the policy: inference, prompts and slots."""

from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from functools import partial

import torch
from transformers import PreTrainedModel

from rollgym.trainer.assembly.backends import policy_backend
from rollgym.trainer.assembly.environments import server_urls
from rollgym.trainer.assembly.inference import open_inference
from rollgym.trainer.assembly.policy import Policy, build_policy
from rollgym.trainer.assembly.probe import try_pictures
from rollgym.trainer.cluster.cluster import Cluster
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.inference.base import InferenceClient, SamplingParams
from rollgym.trainer.inference.forwarding import GenerationQueue
from rollgym.trainer.learn.weights.publisher import WeightPublisher
from rollgym.trainer.models.picture_processor import PictureProcessor
from rollgym.trainer.rollout.actors import ModelActor
from rollgym.trainer.rollout.batcher import DeterministicBatcher
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.logged_client import LoggedClient
from rollgym.trainer.rollout.prompts import PromptBuilder, prompt_maker
from rollgym.trainer.rollout.recall import Recall
from rollgym.trainer.rollout.rendering import ChatRenderer
from rollgym.trainer.rollout.slots import BoundedSlots, EpisodeSlots


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
    recall: Recall | None = None,
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
        recall: The rollout log, for replaying and for recording training's replies.
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
        logged = inference.client if recall is None else LoggedClient(inference.client, recall)
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
