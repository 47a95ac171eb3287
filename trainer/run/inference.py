"""Builds the inference of a run from settings: the engine in this process, or servers, which may be remote."""

import asyncio
import os
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    contextmanager,
    nullcontext,
)
from dataclasses import dataclass
from functools import partial
from pathlib import Path, PurePath
from typing import Any

import torch
from huggingface_hub import try_to_load_from_cache
from huggingface_hub.errors import HFValidationError
from transformers import PreTrainedConfig, PreTrainedModel

from rollgym.trainer.cluster.cluster import Cluster
from rollgym.trainer.cluster.placement import ACTOR_INFERENCE
from rollgym.trainer.cluster.server_host import InferenceProgram
from rollgym.trainer.config.checks import check_broadcast
from rollgym.trainer.config.inference import LaunchSettings, ServerName, read_servers
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.device import torch_device
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import InferenceClient, SamplingParams
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.inference.errors import WrongKeyError
from rollgym.trainer.inference.server_client.client import ServerClient
from rollgym.trainer.inference.server_client.updates import TensorCarrier
from rollgym.trainer.inference.server_pool.members import FileRoster, ServerRoster
from rollgym.trainer.inference.server_pool.pool import ServerPool
from rollgym.trainer.inference.servers.dialect import (
    InspectedServer,
    ServedModel,
    ServerCapabilities,
    check_same_model,
    config_in,
    server_program,
)
from rollgym.trainer.inference.servers.launch import (
    RestartingServers,
    choose_ports,
    launched,
    require_program,
    server_processes,
)
from rollgym.trainer.learn.weights.broadcast import TensorBroadcast
from rollgym.trainer.learn.weights.checksums import ChecksumCheck
from rollgym.trainer.learn.weights.folders import ModelLayout, WeightFolders
from rollgym.trainer.learn.weights.publisher import ModelWeights
from rollgym.trainer.learn.weights.verification import WeightCheck, probe_prompts, tolerance_for
from rollgym.trainer.models.load import model_folder
from rollgym.trainer.models.weights import base_tensors
from rollgym.trainer.run.probe import probe_log_probabilities

_MEGABYTE = 2**20
_NUMBERS = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}


class RunServerClient(ServerClient):
    """The client of a server that must meet a run's requirements.

    Args:
        url: The server's root.
        settings: The run.
        carrier: Carries tensors, if weights are broadcast.
        policy: Configuration of the policy's model; None if unknown.
    """

    def __init__(
        self,
        url: str,
        settings: RunSettings,
        carrier: TensorCarrier | None,
        policy: PreTrainedConfig | None = None,
    ) -> None:
        inference, weights = settings.inference, settings.weights
        way = weights.chosen(inference)
        assert not inference.embedded
        assert way != "in_process"
        super().__init__(
            url,
            inference.kind,
            way=way,
            pause_mode=weights.pause,
            carrier=carrier,
            api_key=os.environ.get(inference.api_key_variable),
            admin_api_key=os.environ.get(inference.admin_key_variable),
            patience_s=inference.lost_after_s,
            watch_every_s=inference.look_every_s,
            stalled_after_s=inference.stalled_after_s,
            vocabulary=None if policy is None else int(policy.get_text_config().vocab_size),
        )
        rollout = settings.rollout
        self._inference = inference
        self._policy = {} if policy is None else policy.to_dict()
        self._longest = settings.model.max_length
        self._sampling = SamplingParams(
            rollout.max_new_tokens, rollout.temperature, rollout.top_p, rollout.top_k
        )

    async def connect(self) -> ServerCapabilities:
        """Ask the server what it can do.

        Raises:
            ConfigError: If its rows are shorter than the run's, or it lacks something else that the run needs.
            ServerGoneError: If the server does not answer.
        """
        with self._keys_named():
            await self._check_model()
            capabilities = await super().connect()
        self._check_length(capabilities.max_length)
        self.check_sampling(self._sampling)
        return capabilities

    async def _check_model(self) -> None:
        """Check which model is served, before any other request.

        Raises:
            ConfigError: If it is seen to be another than the policy.
        """
        if not self._policy:
            return
        seen = await super().look()
        served = await asyncio.to_thread(_config_of, seen.source)
        check_same_model(self._policy, served or seen.config, self.url, seen.model)

    async def look(self) -> InspectedServer:
        """Ask the server for its identity, and change nothing there.

        Raises:
            ConfigError: If it does not meet the run's requirements.
            ServerGoneError: If the server does not answer.
        """
        with self._keys_named():
            seen = await super().look()
        self._check_length(seen.max_length)
        return seen

    @contextmanager
    def _keys_named(self) -> Iterator[None]:
        """Name the source of the key that a server rejects."""
        try:
            yield
        except WrongKeyError as error:
            named = f"set the environment variable {self._inference.api_key_variable}"
            if self._inference.what.admin_key:
                named += f", and {self._inference.admin_key_variable} where its admin routes have their own"
            raise WrongKeyError(f"{error}; {named}") from error

    def _check_length(self, longest: int | None) -> None:
        if longest is not None and longest < self._longest:
            raise ConfigError(
                f"{self.url} takes rows of up to {longest} tokens, and model.max_length is {self._longest}: lower it, "
                f"or start the server with {server_program(self._inference.kind).row_switch(self._longest)} or more"
            )


def _config_of(source: str | None) -> Mapping[str, Any]:
    """Return the configuration of the folder or name that a server was started from, if this machine has it, too."""
    if source is None:
        return {}
    file: object = Path(source) / "config.json"
    if not Path(source).is_absolute():
        try:
            file = try_to_load_from_cache(source, "config.json")
        except HFValidationError:
            return {}
    if not isinstance(file, str | Path):
        return {}
    try:
        return config_in(Path(file).read_text(encoding="utf-8"))
    except (OSError, ValueError):  # no text, or no path: names come from outside
        return {}


@dataclass(frozen=True, slots=True)
class Inference:
    """The inference of a run: the engine in this process, or a client of servers.

    Attributes:
        client: The inference client.
        folders: Target folders of weights for servers; None for the engine in this process.
        check: The check of servers; None for the engine in this process.
        updating: Held while the policy's weights change.
    """

    client: InferenceClient
    folders: WeightFolders | None = None
    check: WeightCheck | None = None
    updating: Callable[[], AbstractAsyncContextManager[None]] = nullcontext


@asynccontextmanager
async def open_inference(
    settings: RunSettings,
    model: PreTrainedModel,
    tokenizer: Any,
    prompt: Sequence[int],
    console: RunConsole,
    *,
    trains_meanwhile: bool = False,
    cluster: Cluster | None = None,
    build: Callable[[], PreTrainedModel] | None = None,
) -> AsyncIterator[Inference]:
    """Open the inference of a run.

    Servers answer once weights were published to them.

    Args:
        settings: The run.
        model: The policy.
        tokenizer: Its tokenizer.
        prompt: Token ids of a conversation to try with.
        console: Shows servers that start, fail and come back.
        trains_meanwhile: Whether the policy is trained while replies are sampled.
        cluster: Places the processes of roles; without it, the embedded engine is in this process.
        build: Builds the policy in another process, with any weights; needed if engines are processes.

    Raises:
        ConfigError: If the embedded engine and training do not agree on log-probabilities, or a server lacks something.
        RunError: If a server does not start.
        ConnectionError: If no server answers.
    """
    async with AsyncExitStack() as stack:
        temperature, longest = settings.rollout.temperature, settings.model.max_length
        if settings.inference.embedded and cluster is not None and build is not None:
            engines = await cluster.engines(build)
            if engines is not None:  # they outlive this run's try, and end with their cluster
                await engines.sync(ModelWeights(model), engines.version)
                await probe_log_probabilities(model, engines, prompt, temperature, longest)
                yield Inference(engines)
                return
        if settings.inference.embedded:
            engine = TorchEngine(
                model,
                max_rows=settings.rollout.max_concurrent_sequences,
                max_length=settings.model.max_length,
                shares_weights=not trains_meanwhile,
                tokenizer=tokenizer,
            )
            await stack.enter_async_context(engine)
            await probe_log_probabilities(model, engine, prompt, temperature, longest)
            asleep = settings.inference.sleep_level > 0
            yield Inference(engine, updating=partial(engine.standing_still, asleep=asleep))
            return
        layout = ModelLayout(model, tokenizer, separate_head=settings.weights.separate_head)
        folders = stack.enter_context(_folders(settings, layout))
        check = _check(settings, model, tokenizer, prompt, layout)
        device = torch_device(settings.model.device)
        urls: Sequence[str] = settings.inference.urls
        roster, starts = None, RestartingServers()
        if settings.inference.urls_file is not None:
            roster = FileRoster(Path(settings.inference.urls_file), console.explain)
            urls = await roster.names()
        if settings.inference.launch is not None:
            urls = await _launch(
                settings, settings.inference.launch, model, folders, console, stack, cluster, starts
            )
        here = "127.0.0.1" if cluster is None else cluster.here
        meet = partial(_server_client, settings, policy=model.config, device=device, layout=layout, here=here)
        pool = ServerPool(
            {url: meet(url) for url in urls},
            roster=None if roster is None else ServerRoster(roster.names, meet),
            max_concurrent=settings.inference.max_concurrent_requests,
            patience_s=settings.inference.patience_s,
            update_timeout_s=settings.inference.update_timeout_s,
            check=check,
            attempts=settings.weights.attempts,
            look_every_s=settings.inference.look_every_s,
            say=console.explain,
            starts=starts,
        )
        await stack.enter_async_context(pool)
        level = settings.inference.sleep_level
        updating = partial(_asleep, pool, level) if level else nullcontext
        yield Inference(pool, folders, check, updating)


@asynccontextmanager
async def _asleep(pool: ServerPool, level: int) -> AsyncIterator[None]:
    """Let servers that share the trainer's devices sleep; the weights that are published inside wake them."""
    await pool.sleep(keep_weights=level == 1)
    yield


def _folders(settings: RunSettings, layout: ModelLayout) -> WeightFolders:
    weights = settings.weights
    seen_as = weights.directory_on_servers
    return WeightFolders(
        Path(weights.directory or Path(settings.output_dir) / "weights"),
        layout,
        weights.bucket_mb * _MEGABYTE,
        None if seen_as is None else PurePath(seen_as),
    )


def _check(
    settings: RunSettings, model: PreTrainedModel, tokenizer: Any, prompt: Sequence[int], layout: ModelLayout
) -> WeightCheck:
    inference = settings.inference
    dtype = str(model.dtype).removeprefix("torch.") if inference.dtype == "auto" else inference.dtype
    vocabulary = min(len(tokenizer), model.config.get_text_config().vocab_size)
    tolerance = tolerance_for(dtype, inference.quantization, settings.weights.tolerance)
    longest = settings.model.max_length
    whole = inference.quantization is None and settings.weights.transport != "adapter"
    checksums = None
    if settings.weights.checksums and whole and inference.what.tells_checksums:
        checksums = ChecksumCheck(_NUMBERS.get(dtype, model.dtype), layout.arrange)
    return WeightCheck(
        probe_prompts(prompt, vocabulary, longest, tolerance),
        settings.rollout.temperature,
        tolerance,
        settings.seed,
        max_length=longest,
        checksums=checksums,
    )


async def _launch(
    settings: RunSettings,
    launch: LaunchSettings,
    model: PreTrainedModel,
    folders: WeightFolders,
    console: RunConsole,
    stack: AsyncExitStack,
    cluster: Cluster | None,
    starts: RestartingServers,
) -> list[str]:
    """Start the servers and return their addresses."""
    adapters = settings.weights.transport == "adapter"
    served = ServedModel(
        _start_folder(settings, model, folders),
        settings.model.max_length,
        lora_rank=settings.model.lora.rank if adapters and settings.model.lora is not None else 0,
        # One more is loaded while replies of all others that may be in use are still in flight.
        adapters=settings.rollout.max_staleness + 2,
        broadcast=settings.weights.collective if settings.weights.transport == "broadcast" else "",
    )
    if cluster is not None:
        urls = await cluster.servers(InferenceProgram(settings.inference, launch, served))
        if urls is not None:
            return urls
        if (role := cluster.placement.role(ACTOR_INFERENCE)) is not None:
            seen = [",".join(map(str, process)) for process in role.processes]
            launch = launch.model_copy(update={"devices": seen})
    logs = Path(settings.output_dir) / "inference"
    processes = server_processes(settings.inference, launch, served, choose_ports(launch), logs)
    return await stack.enter_async_context(
        launched(
            processes,
            startup_timeout_s=launch.startup_timeout_s,
            restarts=launch.restarts,
            say=console.say,
            status=console.status,
            starts=starts,
        )
    )


def _start_folder(settings: RunSettings, model: PreTrainedModel, folders: WeightFolders) -> Path:
    """Return a folder that servers can be started from: the model's own, if it has one that they can load unchanged."""
    if settings.model.path is not None and not settings.weights.separate_head:
        return model_folder(settings.model.path).absolute()
    return folders.write_start(base_tensors(model))


def _server_client(
    settings: RunSettings,
    url: str,
    policy: PreTrainedConfig,
    device: torch.device,
    layout: ModelLayout,
    here: str,
) -> RunServerClient:
    """Return the client of one server."""
    inference, weights = settings.inference, settings.weights
    carrier = None
    if weights.chosen(inference) == "broadcast":
        assert not inference.embedded
        carrier = TensorBroadcast(
            inference.kind,
            collective=weights.collective,
            host=weights.address or here,
            bucket_bytes=weights.bucket_mb * _MEGABYTE,
            device=device,
            arrange=layout.arrange,
        )
    return RunServerClient(url, settings, carrier, policy)


def check_inference(settings: RunSettings) -> None:
    """Look for the program that servers are started by, and for what weights are sent with, before anything is begun.

    Raises:
        ConfigError: If it is not there.
    """
    if settings.inference.launch is not None:
        require_program(settings.inference, settings.inference.launch)
    check_broadcast(settings)


async def look_at_servers(settings: RunSettings, patience_s: float) -> dict[str, InspectedServer]:
    """Ask the named servers for their identities, by address, and change nothing there.

    Args:
        settings: The run.
        patience_s: How long to wait for a server to be reachable.

    Raises:
        ConfigError: If one is seen not to suit the run.
        ServerGoneError: If one does not answer.
    """
    hurried = settings.inference.model_copy(update={"lost_after_s": patience_s})
    settings = settings.model_copy(update={"inference": hurried})
    named = hurried.urls_file
    urls = hurried.urls if named is None else await asyncio.to_thread(read_servers, Path(named))

    async def look(url: str) -> InspectedServer:
        client = RunServerClient(url, settings, None)
        try:
            return await client.look()
        finally:
            await client.close()

    return dict(zip(urls, await asyncio.gather(*map(look, urls)), strict=True))


_MOST_ROWS = 64
"""Replies that the engine in this process draws at once."""


@asynccontextmanager
async def open_engine(
    model: PreTrainedModel, max_length: int, tokenizer: Any
) -> AsyncIterator[InferenceClient]:
    """Sample from a model in this process while the context is open.

    Args:
        model: The policy.
        max_length: Longest row in tokens.
        tokenizer: Its tokenizer.
    """
    async with TorchEngine(model, max_rows=_MOST_ROWS, max_length=max_length, tokenizer=tokenizer) as engine:
        yield engine


@asynccontextmanager
async def open_server(url: str, dialect: ServerName, key_variable: str) -> AsyncIterator[ServerClient]:
    """Sample from a server, whose weights stay as they are, while the context is open.

    Args:
        url: The server's root.
        dialect: The kind of the server.
        key_variable: Environment variable with its API key, if it requires one.

    Raises:
        ConfigError: If the server lacks a required feature, or rejects the key.
        ServerGoneError: If the server does not answer.
    """
    client = ServerClient(url, dialect, way=None, api_key=os.environ.get(key_variable))
    try:
        await client.connect()
        yield client
    except WrongKeyError as error:
        raise WrongKeyError(f"{error}; set {key_variable}") from error
    finally:
        await client.close()
