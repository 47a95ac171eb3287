"""Builds the parts of a run from its settings and ties them together."""

import os
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from clients.client.client import TOKEN_VARIABLE
from trainer.assembly.inference import open_inference
from trainer.assembly.probe import try_pictures
from trainer.assembly.teachers import distillation_head
from trainer.backends.base import Scorer
from trainer.backends.heads import Head, PolicyHead, ValueHead
from trainer.backends.optimizer import Schedule
from trainer.backends.prefix_costs import sharing_costs
from trainer.backends.reference import FrozenModel, PolicyWithoutAdapters
from trainer.backends.torch_backend import TorchBackend
from trainer.cluster.cluster import Cluster
from trainer.config.checks import why_blind
from trainer.config.run import RunSettings
from trainer.core.console import RunConsole
from trainer.core.device import DTYPES, torch_device
from trainer.core.embedded_server import embedded_server
from trainer.core.errors import ConfigError
from trainer.core.plugins import load_plugin
from trainer.core.seeding import derive_seed
from trainer.inference.base import InferenceClient, SamplingParams
from trainer.inference.forwarding import GenerationQueue
from trainer.learn.weights.publisher import WeightPublisher
from trainer.models.load import load_model, load_tokenizer, model_folder
from trainer.models.lora import ADAPTER_CONFIG, add_lora, load_adapter
from trainer.models.pictures import BLIND, PictureProcessor, load_pictures, sees
from trainer.models.reward_model import RewardModel
from trainer.models.tiny import TinyPolicySettings, build_tiny_model, tiny_pictures
from trainer.models.tokenizer import IMAGE, build_tiny_tokenizer, stop_ids
from trainer.models.value_head import ValueModel
from trainer.models.weights import place, twin_of
from trainer.rollout.actors import ModelActor
from trainer.rollout.batcher import DeterministicBatcher
from trainer.rollout.context import context_policy
from trainer.rollout.environments import OPERATION_TIMEOUT_S, EnvironmentPool
from trainer.rollout.logged_client import LoggedClient
from trainer.rollout.outages import OutageReport
from trainer.rollout.prompts import PromptBuilder
from trainer.rollout.recall import Recall
from trainer.rollout.rendering import ChatRenderer
from trainer.rollout.slots import BoundedSlots, EpisodeSlots
from trainer.tasks.curriculum import CurriculumTaskSource
from trainer.tasks.dataset import load_streams
from trainer.tasks.sources import (
    EnvironmentStream,
    InterleavedTaskSource,
    MixtureTaskSource,
    OwnTaskSource,
    TaskStream,
)
from trainer.tasks.task import TaskSource

_STREAM_BLOCK = 1000

Serve = Callable[[Sequence[str]], AbstractAsyncContextManager[str]]
"""Serves the built-in environments and those named while its context is open, and gives the server's URL."""


@dataclass(frozen=True, slots=True)
class Policy:
    """A model, its tokenizer and how conversations are rendered for it."""

    model: PreTrainedModel
    tokenizer: Any
    renderer: ChatRenderer

    @property
    def processor(self) -> Any:
        """What lies beside the model in its folder: its tokenizer, in the processor of one that sees."""
        pictures = self.renderer.pictures
        return pictures.processor if isinstance(pictures, PictureProcessor) else self.tokenizer


@dataclass(frozen=True, slots=True)
class Players:
    """What plays episodes with the policy.

    Attributes:
        client: Where replies are sampled.
        slots: Told of every episode's start and end.
        make_prompts: Makes the prompt builder of one episode.
        publisher: Brings weights to where replies are sampled.
        updating: Entered for as long as the policy's weights change.
    """

    client: InferenceClient
    slots: EpisodeSlots
    make_prompts: Callable[[], PromptBuilder]
    publisher: WeightPublisher
    updating: Callable[[], AbstractAsyncContextManager[None]]


def build_policy(
    settings: RunSettings, directory: Path | None = None, *, trained: bool = False, computes: bool = True
) -> Policy:
    """Load the policy from `directory` (or the path in the settings), or build the tiny one, and add its adapters.

    Args:
        settings: The run.
        directory: A model's folder, or one with adapters only.
        trained: Whether all its weights will be trained. Then they are kept in float32 until a backend has them.
        computes: Whether anybody computes with it in this process. If not, it stays in the host's memory.

    Raises:
        ConfigError: If there is no such model, device or attention.
    """
    device = torch_device(settings.model.device)
    if not computes:
        device = torch.device("cpu")
    dtype = torch.float32 if trained and settings.model.lora is None else DTYPES[settings.model.dtype]
    adapter = directory if directory is not None and (directory / ADAPTER_CONFIG).exists() else None
    path = directory if adapter is None else None
    if path is None and settings.model.path:
        path = model_folder(settings.model.path)
    if path is not None:
        model = load_model(path, dtype, settings.model.attention)
        model.name_or_path = settings.model.path or str(path)
        tokenizer = load_tokenizer(path)
        pictures = (why_blind(settings) or load_pictures(path, tokenizer)) if sees(model) else BLIND
    else:
        vision = settings.model.vision
        tokenizer = build_tiny_tokenizer(sees=vision is not None)
        model = _tiny_model(settings, tokenizer)
        pictures = BLIND if vision is None else tiny_pictures(vision, tokenizer)
    place(model, dtype, device)
    model.config.dtype = DTYPES[settings.model.dtype]
    if settings.model.lora is not None and (directory is None or adapter is not None):
        add_lora(model, settings.model.lora, derive_seed(settings.seed, "adapters"))
    if adapter is not None:
        load_adapter(model, adapter)
    return Policy(model, tokenizer, chat_renderer(settings, tokenizer, stop_ids(model), pictures))


def _sampled_model(settings: RunSettings) -> PreTrainedModel:
    """Build a model that the policy's weights are brought to, with adapters added where those are trained."""
    model = settings.model.model_copy(update={"lora": None})
    return build_policy(settings.model_copy(update={"model": model})).model


def _tiny_model(settings: RunSettings, tokenizer: Any) -> PreTrainedModel:
    vision = settings.model.vision
    shape = TinyPolicySettings(
        vocabulary=len(tokenizer),
        hidden_size=settings.model.hidden_size,
        layers=settings.model.layers,
        heads=settings.model.heads,
        max_length=settings.model.max_length,
        end_id=tokenizer.eos_token_id,
        pad_id=tokenizer.pad_token_id,
        vision=None if vision is None else (vision, tokenizer.convert_tokens_to_ids(IMAGE)),
    )
    return build_tiny_model(shape, derive_seed(settings.seed, "model"), settings.model.attention)


def chat_renderer(
    settings: RunSettings,
    tokenizer: Any,
    stops: Iterable[int] = (),
    pictures: PictureProcessor | str = BLIND,
) -> ChatRenderer:
    """Return the renderer of a run's conversations; the tokenizer takes up the run's chat template.

    Args:
        settings: The run.
        tokenizer: The model's.
        stops: Ids that end a reply, beside those that tokenizer and template name.
        pictures: What reads pictures for the model, or why it sees none.

    Raises:
        ConfigError: If the template cannot be read or used.
    """
    if settings.prompt.chat_template is not None:
        try:
            tokenizer.chat_template = Path(settings.prompt.chat_template).read_text(encoding="utf-8")
        except (OSError, ValueError) as error:
            raise ConfigError(f"prompt.chat_template: {error}") from error
    return ChatRenderer(tokenizer, settings.prompt.template_kwargs, stops, pictures)


def policy_head(model: PreTrainedModel, temperature: float) -> PolicyHead:
    """Return what training reads off the policy."""
    return PolicyHead(model, temperature)


def training_head(settings: RunSettings, model: PreTrainedModel) -> Head:
    """Return what updates read off what a run trains: the policy, a student beside its teachers, or a reward model.

    Raises:
        ConfigError: If a teacher cannot be loaded.
    """
    if settings.reward is not None:
        reward_model = RewardModel(model)
        if settings.model.lora is not None:
            add_lora(reward_model.body, settings.model.lora, derive_seed(settings.seed, "adapters"))
        return ValueHead(reward_model)
    if settings.distill is not None and settings.distill.estimate != "sampled":
        return distillation_head(settings, settings.distill, model)
    return policy_head(model, settings.rollout.temperature)


def critic_head(settings: RunSettings, model: PreTrainedModel) -> ValueHead:
    """Return a critic whose body starts with the policy's weights.

    Where the policy trains adapters, the critic trains adapters of its own.
    """
    critic = ValueModel(model)
    if settings.model.lora is not None:
        add_lora(critic.body, settings.model.lora, derive_seed(settings.seed, "critic adapters"))
    return ValueHead(critic)


def policy_backend(settings: RunSettings, model: PreTrainedModel) -> TorchBackend:
    """Return the backend of what a run trains, in this process."""
    schedule = run_schedule(settings, settings.optimizer.learning_rate)
    return _backend(settings, training_head(settings, model), schedule)


def critic_backend(settings: RunSettings, model: PreTrainedModel) -> TorchBackend:
    """Return the backend of a critic, in this process."""
    schedule = run_schedule(settings, settings.optimizer.critic_learning_rate)
    return _backend(settings, critic_head(settings, model), schedule)


def reference_model(settings: RunSettings, model: PreTrainedModel) -> Scorer:
    """Return the policy as the run begins: a second model, or the same one with its adapters off."""
    adapted = settings.model.lora is not None
    frozen = model if adapted else twin_of(model, DTYPES[settings.model.dtype])
    head = policy_head(frozen, settings.rollout.temperature)
    budget = settings.optimizer.tokens_per_micro_batch
    costs = sharing_costs(head, settings.optimizer.shared_prefixes, frozen.device)
    if adapted:
        return PolicyWithoutAdapters(head, budget, costs, warm=settings.warm_start is not None)
    return FrozenModel(head, budget, costs)


def warm_start_backend(settings: RunSettings, model: PreTrainedModel, learning_rate: float) -> TorchBackend:
    """Return the backend of the supervised start; its optimizer's state ends with it."""
    return _backend(settings, policy_head(model, 1.0), Schedule(learning_rate, 0, 1, "constant"))


def _backend(settings: RunSettings, head: Head, schedule: Schedule) -> TorchBackend:
    return TorchBackend(
        head,
        settings.optimizer,
        schedule,
        dtype=DTYPES[settings.model.dtype],
        gradient_checkpointing=settings.model.gradient_checkpointing,
        compiled=settings.model.compile,
    )


def run_schedule(settings: RunSettings, peak: float) -> Schedule:
    """Return the learning rate of a run's steps, given the highest."""
    return Schedule(
        peak,
        settings.optimizer.warmup_steps,
        settings.steps * settings.algorithm.updates,
        settings.optimizer.schedule,
    )


def task_source(settings: RunSettings) -> TaskSource:
    """Return the run's stream of tasks; data sets are read for it.

    Raises:
        ConfigError: If a data set cannot be read.
    """
    if settings.rollout.task_source is not None:
        plugin = load_plugin(settings.rollout.task_source, "rollout.task_source")
        return OwnTaskSource(plugin, plugin(settings, settings.seed))
    if not settings.datasets and settings.interleave == "stream":
        return MixtureTaskSource(settings.tasks, settings.seed)
    streams: list[TaskStream] = [EnvironmentStream(entry) for entry in settings.tasks]
    for dataset in settings.datasets:
        streams += load_streams(dataset)
    block = settings.rollout.groups_per_step if settings.interleave == "step" else _STREAM_BLOCK
    if settings.curriculum is not None:
        return CurriculumTaskSource(streams, block, settings.seed, settings.curriculum)
    return InterleavedTaskSource(streams, block, settings.seed)


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


def _server_urls(settings: RunSettings) -> list[str | None]:
    """Return the servers that the settings name; None is the run's default."""
    urls = [entry.url for entry in settings.tasks] + [dataset.url for dataset in settings.datasets]
    for panel in settings.evaluation.panels.values():
        urls.append(panel.url if panel.dataset is None else panel.dataset.url)
    # Where the tasks of a source of the user's are played is known only once they are drawn.
    return [*urls, None] if settings.rollout.task_source is not None else urls


@asynccontextmanager
async def open_environments(
    settings: RunSettings,
    console: RunConsole,
    serve: Serve = embedded_server,
    timeout_s: float = OPERATION_TIMEOUT_S,
    connect_s: float = 15.0,
) -> AsyncIterator[EnvironmentPool]:
    """Connect to the run's environments; start a server on loopback if none is named.

    Args:
        settings: The run.
        console: Where such a server's address is said.
        serve: How it is started.
        timeout_s: How long one operation of an environment may take.
        connect_s: How long a server is waited for at the beginning.
    """
    async with AsyncExitStack() as stack:
        url = settings.env_url
        if url is None and None in _server_urls(settings):
            url = await stack.enter_async_context(serve(settings.serve))
            console.say(f"no --env-url: started an embedded environment server on {url}")
        # In the settings it would be written to the run's directory with all the others.
        token = settings.env_token or os.environ.get(TOKEN_VARIABLE)
        patience_s = settings.rollout.server_timeout_s
        outages = OutageReport(console, patience_s)
        pool = EnvironmentPool(
            url, token, settings.rollout.encoding, timeout_s, outages, patience_s, connect_s
        )
        yield await stack.enter_async_context(pool)


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
    """Open whoever samples, and what leads to it.

    Args:
        settings: The run.
        policy: What plays.
        pool: Where: in deterministic mode, so many episodes run at one time as every server allows.
        console: Where it is said in what way the chat template needs other conversations.
        recall: What the rollout log has, and where training's replies are written.
        trains_meanwhile: Whether the policy is trained while it plays. Only then the engine needs weights of its own.
        cluster: Where the processes of roles are; without it, all of them are this process.

    Raises:
        ConfigError: If engine and training do not agree on log-probabilities.
    """
    torch.set_num_threads(settings.threads)
    context = context_policy(settings.prompt)
    policy.renderer.template.say = console.say
    if settings.prompt.tools == "template":
        policy.renderer.require_tools()

    def make_prompts() -> PromptBuilder:
        return PromptBuilder(policy.renderer, context, settings.prompt)

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
            bounds = [total, *limits.values(), await pool.places(_server_urls(settings))]
            batcher = DeterministicBatcher(logged, min(bound for bound in bounds if bound is not None))
            client, slots = batcher, batcher
        else:
            client = logged
            if settings.inference.embedded:  # servers have lines of their own
                client = GenerationQueue(logged, rollout.max_concurrent_sequences)
            slots = BoundedSlots(total, limits)
        publisher = WeightPublisher([client], inference.folders, inference.check)
        yield Players(client, slots, make_prompts, publisher, inference.updating)


async def bring_weights(settings: RunSettings, policy: Policy, players: Players) -> None:
    """Bring the policy to servers that sample for it, where nothing is trained; the embedded engine has it already."""
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
    )
