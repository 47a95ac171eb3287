"""Inference servers as processes of the run: started, waited for, started again, and ended with it."""

import asyncio
import importlib.util
import os
import re
import shutil
import socket
import sys
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import httpx

from trainer.config.inference import InferenceSettings, LaunchSettings, vllm_lora_rank
from trainer.core.errors import ConfigError, RunError
from trainer.inference.keeper import GRACE_S

SERVED_NAME = "policy"
"""What the model is called on servers that we start."""

_LOOK_EVERY_S = 0.5
_SAY_EVERY_S = 30.0
_FIRST_WAIT_S, _LONGEST_WAIT_S = 1.0, 60.0
"""Until a server that ended by itself is started again: one that cannot start would use up its restarts at once."""
_LAST_LINES = 20
_LINE_WIDTH = 300
_READ_AT_END = 2**16
"""Bytes of what a server said that are looked through: vLLM says why its engine ended far above its last lines."""
_EXCEPTION = re.compile(r"\b[A-Z]\w*(Error|Exception): \S")
_UNKNOWN_SWITCH = re.compile(r"unrecognized arguments|no such option", re.I)
_SHORT_OF_MEMORY = re.compile(
    r"out of memory|OutOfMemory|memory utilization|KV cache memory|mem-fraction-static", re.I
)
"""What vLLM, SGLang and torch say where a device's memory does not suffice."""


class LaunchError(RunError):
    """An inference server did not start; the message holds what it said last."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """What a server is started with.

    Attributes:
        folder: The model's.
        max_length: Longest row in tokens.
        lora_rank: Largest rank of the adapters that it will be given; 0 for none.
        adapters: Adapters that it holds at once.
        broadcast: What weights are broadcast by; empty where they are not.
    """

    folder: Path
    max_length: int
    lora_rank: int = 0
    adapters: int = 1
    broadcast: str = ""


@dataclass(frozen=True, slots=True)
class ServerProcess:
    """A server that is to be started.

    Attributes:
        command: Its command line.
        environment: Variables that are set for it, beside those that we have.
        url: Where it will answer.
        log: File that what it says is appended to.
        name: What it is called in messages.
    """

    command: tuple[str, ...]
    url: str
    log: Path
    environment: Mapping[str, str] = field(default_factory=dict)
    name: str = "inference server"


def server_processes(
    inference: InferenceSettings, launch: LaunchSettings, model: ServedModel, ports: Sequence[int], logs: Path
) -> list[ServerProcess]:
    """Return the servers that settings ask for. No I/O.

    Args:
        inference: Which servers, and what is asked of them.
        launch: How they are started.
        model: What they serve.
        ports: One for each.
        logs: Folder of what they say.

    Raises:
        ConfigError: If a server of this kind takes no adapters of such a rank.
    """
    build = _BUILDERS[inference.kind]
    processes = []
    for number, port in enumerate(ports):
        words, variables = build(inference, launch, model, port)
        variables |= launch.environment
        if launch.devices:
            variables[launch.devices_variable] = launch.devices[number]
        log = logs / f"{inference.kind}-{number}.log"
        command = (*words, *launch.arguments)
        processes.append(ServerProcess(command, _url(launch.host, port), log, variables))
    return processes


def _url(host: str, port: int) -> str:
    """Where a server that listens on `host` is reached from this machine."""
    host = {"0.0.0.0": "127.0.0.1", "::": "::1"}.get(host, host)
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"


def _vllm(
    inference: InferenceSettings, launch: LaunchSettings, model: ServedModel, port: int
) -> tuple[list[str], dict[str, str]]:
    words = [
        *(launch.command or [sys.executable, "-m", "vllm.entrypoints.cli.main"]),
        *("serve", str(model.folder), "--served-model-name", SERVED_NAME),
        *("--host", launch.host, "--port", str(port)),
        *("--max-model-len", str(model.max_length), "--dtype", inference.dtype),
        *("--tensor-parallel-size", str(launch.tensor_parallel)),
        # Log-probabilities of the distribution that tokens are drawn from, and requests of token ids.
        *("--logprobs-mode", "processed_logprobs", "--enable-scale-out"),
        # How tokens are drawn is said by each request, never by a file of the model's.
        *("--generation-config", "vllm", "--disable-uvicorn-access-log"),
    ]
    # Pauses and weight updates are routes of this mode alone.
    variables = {"VLLM_SERVER_DEV_MODE": "1"}
    if launch.memory_fraction is not None:
        words += ["--gpu-memory-utilization", str(launch.memory_fraction)]
    if inference.quantization is not None:
        words += ["--quantization", inference.quantization]
    if model.broadcast:
        words += ["--weight-transfer-config", f'{{"backend": "{model.broadcast}"}}']
    if inference.sleep_level:
        words.append("--enable-sleep-mode")
    if inference.routed_experts:
        words.append("--enable-return-routed-experts")
    if model.lora_rank:
        words += ["--enable-lora", "--max-lora-rank", str(vllm_lora_rank(model.lora_rank))]
        words += ["--max-loras", str(model.adapters)]
        variables["VLLM_ALLOW_RUNTIME_LORA_UPDATING"] = "1"
    if key := os.environ.get(inference.api_key_variable):
        variables["VLLM_API_KEY"] = key
    return words, variables


def _sglang(
    inference: InferenceSettings, launch: LaunchSettings, model: ServedModel, port: int
) -> tuple[list[str], dict[str, str]]:
    words = [
        *(launch.command or [sys.executable, "-m", "sglang.launch_server"]),
        *("--model-path", str(model.folder), "--served-model-name", SERVED_NAME),
        *("--host", launch.host, "--port", str(port)),
        *("--context-length", str(model.max_length), "--dtype", inference.dtype),
        *("--tp-size", str(launch.tensor_parallel)),
        # Without it each event of a stream repeats all tokens so far, and replies are not told as they are drawn.
        "--incremental-streaming-output",
    ]
    if launch.memory_fraction is not None:
        words += ["--mem-fraction-static", str(launch.memory_fraction)]
    if inference.quantization is not None:
        words += ["--quantization", inference.quantization]
    if inference.sleep_level:
        words.append("--enable-memory-saver")
    if inference.routed_experts:
        words.append("--enable-return-routed-experts")
    if model.lora_rank:
        words += ["--enable-lora", "--max-lora-rank", str(model.lora_rank), "--lora-target-modules", "all"]
        words += ["--max-loras-per-batch", str(model.adapters)]
    if key := os.environ.get(inference.api_key_variable):
        words += ["--api-key", key]
    # Otherwise whoever asks for its health has it draw a token, and waits for as long as it is paused.
    return words, {"SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "false"}


def require_program(inference: InferenceSettings, launch: LaunchSettings) -> None:
    """Look whether the servers' program is there.

    Raises:
        ConfigError: If it is not; the message says how to get it.
    """
    if launch.command:
        if shutil.which(launch.command[0]) is None:
            raise ConfigError(f"inference.launch.command: there is no program {launch.command[0]}")
    elif importlib.util.find_spec(inference.kind) is None:
        raise ConfigError(
            f"inference.launch: {inference.kind} is not installed beside the trainer: install "
            f"rollgym[{inference.kind}], name the program of another environment by inference.launch.command, or name "
            "servers that run by inference.urls"
        )


def choose_ports(launch: LaunchSettings) -> list[int]:
    """Return the servers' ports: those that the settings name, or free ones.

    Raises:
        ConfigError: If one that they name is taken.
    """
    wanted = [0 if launch.port is None else launch.port + number for number in range(launch.count)]
    # All are held until the last is chosen: no two are one.
    with ExitStack() as held:
        return [_bound(held, launch.host, port) for port in wanted]


def _bound(held: ExitStack, host: str, port: int) -> int:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    place = held.enter_context(socket.socket(family, socket.SOCK_STREAM))
    place.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        place.bind((host, port))
    except OSError as error:
        raise ConfigError(
            f"inference.launch: cannot listen on {host}:{port}: {error.strerror}; leave inference.launch.port out, and "
            "free ones are taken"
        ) from error
    number: int = place.getsockname()[1]
    return number


@asynccontextmanager
async def launched(
    processes: Sequence[ServerProcess],
    *,
    startup_timeout_s: float,
    restarts: int,
    say: Callable[[str], None],
    status: Callable[[str | None], None],
    gone: Callable[[str], None] = lambda _: None,
) -> AsyncIterator[list[str]]:
    """Run servers while the context is open, and give their addresses once all of them answer.

    A server that ends by itself is started again. None outlives this process, however that one ends.

    Args:
        processes: The servers.
        startup_timeout_s: How long one may take until it answers.
        restarts: How often each is started again.
        say: Told of what stays.
        status: Told of what changes: how far the start is.
        gone: Told of a server that has ended by itself once too often.

    Raises:
        LaunchError: If one ends before it answers, or takes too long.
    """
    servers = [_Server(process, startup_timeout_s, say) for process in processes]
    watches: list[asyncio.Task[None]] = []
    try:
        for server in servers:
            await server.start()
            process = server.process
            say(f"starting the {process.name} on {process.url}; what it says: {process.log}")
        waits = [asyncio.ensure_future(server.ready(status)) for server in servers]
        try:
            await asyncio.gather(*waits)
        finally:
            for wait in waits:
                wait.cancel()
            await asyncio.gather(*waits, return_exceptions=True)
            status(None)
        watches = [asyncio.ensure_future(server.restart_if_it_ends(restarts, gone)) for server in servers]
        yield [server.process.url for server in servers]
    finally:
        for watch in watches:
            watch.cancel()
        await asyncio.gather(*watches, return_exceptions=True)
        await asyncio.gather(*(server.stop() for server in servers))


class _Server:
    """One server and the keeper that holds it."""

    def __init__(self, process: ServerProcess, startup_timeout_s: float, say: Callable[[str], None]) -> None:
        self.process = process
        self._startup_timeout_s = startup_timeout_s
        self._say = say
        self._keeper: asyncio.subprocess.Process | None = None
        self._begin = 0

    async def start(self) -> None:
        """Start the process; it answers later."""
        log = self.process.log
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._begin = output.tell()
            self._keeper = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "trainer.inference.keeper", *self.process.command),
                stdin=asyncio.subprocess.PIPE,
                stdout=output,
                stderr=asyncio.subprocess.STDOUT,
                env=os.environ | self.process.environment,
                # A Ctrl-C goes to all processes of the terminal's group; this one is still needed to end in order.
                start_new_session=True,
            )

    async def ready(self, status: Callable[[str | None], None] = lambda _: None) -> None:
        """Wait until it answers.

        Raises:
            LaunchError: If it ends first, or takes too long.
        """
        assert self._keeper is not None
        ended = asyncio.ensure_future(self._keeper.wait())
        answers = asyncio.ensure_future(self._answers(status))
        try:
            await asyncio.wait(
                {ended, answers}, timeout=self._startup_timeout_s, return_when=asyncio.FIRST_COMPLETED
            )
            if ended.done():
                raise LaunchError(f"{self._named()} ended with code {ended.result()}{self._last_words()}")
            if not answers.done():
                raise LaunchError(
                    f"{self._named()} did not answer within {self._startup_timeout_s:g} s "
                    f"(inference.launch.startup_timeout_s){self._last_words()}"
                )
            answers.result()
        finally:
            for task in (ended, answers):
                task.cancel()
            await asyncio.gather(ended, answers, return_exceptions=True)

    async def restart_if_it_ends(self, restarts: int, gone: Callable[[str], None]) -> None:
        """Start it again whenever it ends by itself, so many times, each time later; then tell that it is gone."""
        what, wait_s = await self._ended(), _FIRST_WAIT_S
        for left in range(restarts, 0, -1):
            again = f"it is started again in {wait_s:g} s ({left} times more at most)"
            self._say(f"{what}; {again}{self._last_words()}")
            await asyncio.sleep(wait_s)
            wait_s = min(2 * wait_s, _LONGEST_WAIT_S)
            try:
                await self.start()
            except OSError as error:
                what = f"{self._named()} could not be started: {error}"
            else:
                what = await self._ended()
        what = f"{what} once too often{self._last_words()}"
        self._say(what)
        gone(what)

    async def _ended(self) -> str:
        """Wait until it has ended, and return what is to be said of it."""
        assert self._keeper is not None
        return f"{self._named()} ended by itself, with code {await self._keeper.wait()}"

    async def stop(self) -> None:
        """End it, and wait until it and its processes have ended."""
        keeper = self._keeper
        if keeper is None or keeper.returncode is not None:
            return
        assert keeper.stdin is not None
        keeper.stdin.close()
        try:
            await asyncio.wait_for(keeper.wait(), 2 * GRACE_S)
        except TimeoutError:
            with suppress(ProcessLookupError):
                keeper.kill()
            await keeper.wait()

    async def _answers(self, status: Callable[[str | None], None]) -> None:
        began = said = time.monotonic()
        async with httpx.AsyncClient(base_url=self.process.url, timeout=5.0, trust_env=False) as client:
            while True:
                with suppress(httpx.HTTPError):
                    if (await client.get("/health")).status_code == httpx.codes.OK:
                        break
                now = time.monotonic()
                lines = self._lines()
                status(f"{self.process.url} starts, {now - began:.0f} s: {lines[-1] if lines else ''}")
                if now - said >= _SAY_EVERY_S:
                    said = now
                    self._say(f"{self.process.url} has been starting for {now - began:.0f} s")
                await asyncio.sleep(_LOOK_EVERY_S)
        self._say(f"{self.process.url} answers after {time.monotonic() - began:.0f} s")

    def _named(self) -> str:
        return f"the {self.process.name} on {self.process.url}"

    def _last_words(self) -> str:
        told = self._lines()
        before, lines = told[:-_LAST_LINES], told[-_LAST_LINES:]
        if not lines:
            return ""
        said = "; the last lines of " + "\n  ".join([f"{self.process.log}:", *lines])
        # An engine is a process of its own, whose end the last lines only tell of.
        causes = [line for line in before if _EXCEPTION.search(line)][-1:]
        if causes:
            said += f"\nSaid before: {causes[0]}"
        if any(map(_UNKNOWN_SWITCH.search, lines)):
            said += (
                "\nIt is of a release that does not know a switch: runs start vLLM 0.31 and SGLang 0.5.20 or newer; "
                "start an older one yourself and give its address by inference.urls"
            )
        if any(map(_SHORT_OF_MEMORY.search, [*lines, *causes])):
            said += (
                "\nMemory does not suffice: look for what else is on the device, set inference.launch.memory_fraction "
                "or tensor_parallel, or lower model.max_length"
            )
        return said

    def _lines(self) -> list[str]:
        """What it said last since it was started, by lines; none where it cannot be read any more."""
        try:
            with self.process.log.open("rb") as log:
                size = log.seek(0, os.SEEK_END)
                log.seek(max(self._begin, size - _READ_AT_END))
                text = log.read().decode(errors="replace")
        except OSError:
            return []
        return [line[:_LINE_WIDTH] for line in text.splitlines() if line.strip()]


_BUILDERS = {"vllm": _vllm, "sglang": _sglang}
