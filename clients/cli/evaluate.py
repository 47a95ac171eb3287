"""`roll-env eval`: how well a model behind an OpenAI-compatible API plays an environment."""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import orjson
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from rollgym.clients.cli.arguments import (
    CONNECT_TIMEOUT_S,
    PATIENCE_S,
    UsageError,
    add_kwargs_argument,
    add_server_arguments,
    parse_kwargs,
    read_number,
    read_seed,
    server_url,
    target_served_here,
)
from rollgym.clients.client.client import EnvClient
from rollgym.clients.evaluation.chat import ChatModel, EndpointError
from rollgym.clients.evaluation.player import Evaluation, NotPlayableError, evaluate
from rollgym.clients.evaluation.results_folder import ResultsFolder
from rollgym.clients.evaluation.summary import EvaluatedEpisode, Prices, Summary, summarise, summary_lines
from rollgym.clients.process.local_server import LocalServer
from rollgym.clients.process.terminal import visible
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import MAX_SEED
from rollgym.user_paths import user_path

_KEY_VARIABLE, _URL_VARIABLE = "OPENAI_API_KEY", "OPENAI_BASE_URL"
_OPENAI = "https://api.openai.com/v1"
_RESULTS = Path("runs")


def add_parser(commands: Any) -> None:
    """Add the command to the parser."""
    parser = commands.add_parser("eval", help="evaluate a model behind an OpenAI-compatible API")
    parser.add_argument(
        "target", metavar="ENV", help="An id of the server's catalog, or `module:Class` (not with --url)."
    )
    parser.add_argument("--model", required=True, metavar="NAME", help="The model's name at the API.")
    parser.add_argument(
        "--base-url",
        metavar="URL",
        help=f"The API's address; {_URL_VARIABLE} if it is set, else {_OPENAI}.",
    )
    parser.add_argument(
        "--api-key-env",
        metavar="VARIABLE",
        help=f"The environment variable that holds the API key (default {_KEY_VARIABLE}).",
    )
    parser.add_argument("-n", "--episodes", type=_positive, default=20, help="How many (default 20).")
    parser.add_argument(
        "--seed", type=read_seed, default=0, help="Seed of the first; the others follow it (default 0)."
    )
    parser.add_argument(
        "--max-turns",
        type=_positive,
        default=64,
        help="Replies after which an episode is cut off (default 64).",
    )
    parser.add_argument("--concurrency", type=_positive, default=8, help="Episodes at a time (default 8).")
    parser.add_argument("--temperature", type=read_number, help="Of the sampling; the API's if not given.")
    parser.add_argument("--max-tokens", type=_positive, help="Longest reply; the API's if not given.")
    parser.add_argument("--extra", metavar="JSON", help="Further fields of each request, as one JSON object.")
    parser.add_argument("--system", default="", metavar="TEXT", help="A system message that comes first.")
    parser.add_argument(
        "--retries", type=_count, default=5, help="Repeats of a request that fails for a while (default 5)."
    )
    parser.add_argument(
        "--timeout-s", type=_seconds, default=300.0, help="How long one reply may take (default 300)."
    )
    parser.add_argument("--price-in", type=_price, help="What a million prompt tokens cost.")
    parser.add_argument("--price-out", type=_price, help="What a million completion tokens cost.")
    parser.add_argument(
        "-o",
        "--output",
        type=user_path,
        metavar="DIR",
        help="A new folder for results (default: one in runs/).",
    )
    add_server_arguments(parser)
    add_kwargs_argument(parser)
    parser.set_defaults(run=run)


def run(options: argparse.Namespace) -> int:
    """Play, write the results and print the summary; the exit code is 1 if nothing was played."""
    if options.seed + options.episodes > MAX_SEED:
        raise UsageError("--seed: the seeds of all episodes must lie below 2**53")
    kwargs = parse_kwargs(options.kwarg)
    prices = _prices(options)
    model = _model(options)
    if options.url is not None:
        if ":" in options.target:
            raise UsageError("--url is a running server: name an id of its catalog")
        with server_url(options) as url:
            return _Run(options, model, prices, kwargs).on(url, options.target, kwargs)
    env_id, client_kwargs, arguments = target_served_here(options, kwargs)
    with LocalServer(["--log-level", "error", *arguments]) as server:
        return _Run(options, model, prices, kwargs).on(server.url, env_id, client_kwargs)


class _Run:
    """One evaluation of the command line."""

    def __init__(
        self,
        options: argparse.Namespace,
        model: ChatModel,
        prices: Prices | None,
        kwargs: dict[str, Any],
    ) -> None:
        self._options = options
        self._model = model
        self._prices = prices
        self._kwargs = kwargs
        self._seeds = range(options.seed, options.seed + options.episodes)
        self._episodes: list[EvaluatedEpisode] = []

    def on(self, url: str, env_id: str, kwargs: dict[str, Any]) -> int:
        """Evaluate on a server, and keep the results, even if it is interrupted."""
        options = self._options
        evaluation = Evaluation(
            env_id, self._seeds, kwargs, options.max_turns, options.concurrency, options.system
        )
        began = time.perf_counter()
        stopped: BaseException | None = None
        with self._folder() as folder, self._progress() as show:

            def finished(episode: EvaluatedEpisode) -> None:
                self._episodes.append(episode)
                folder.add(episode)
                show(episode)

            try:
                asyncio.run(self._play(url, evaluation, finished))
            except (KeyboardInterrupt, EndpointError, NotPlayableError, ProblemError, OSError) as error:
                stopped = error
            summary = summarise(
                self._episodes,
                asked=len(self._seeds),
                retried=self._model.retried,
                prices=self._prices,
                seconds=time.perf_counter() - began,
            )
            if not self._episodes:
                folder.discard()
            else:
                try:
                    folder.finish(summary)
                except OSError as error:
                    stopped = stopped or error
        if self._episodes:
            self._print(summary, folder.directory)
        return self._exit_code(stopped, summary, folder.directory)

    def _exit_code(self, stopped: BaseException | None, summary: Summary, directory: Path) -> int:
        match stopped:
            case None:
                return 0 if summary.results else 1
            case KeyboardInterrupt():
                said, code = "interrupted; what came is kept" if self._episodes else "interrupted", 130
            case EndpointError() | NotPlayableError():
                said, code = str(stopped), 1
            case OSError() if not isinstance(stopped, ConnectionError | TimeoutError):
                said, code = f"{directory} cannot be written: {stopped.strerror}", 1
            case _:
                raise stopped
        print(f"roll-env eval: {visible(said)}", file=sys.stderr)
        return code

    async def _play(
        self, url: str, evaluation: Evaluation, finished: Callable[[EvaluatedEpisode], None]
    ) -> None:
        async with (
            EnvClient(
                url, token=self._options.token, connect_timeout_s=CONNECT_TIMEOUT_S, timeout_s=PATIENCE_S
            ) as client,
            self._model as model,
        ):
            await evaluate(client, model, evaluation, finished)

    def _folder(self) -> ResultsFolder:
        options = self._options
        directory = options.output or _free_folder(options.target, options.model)
        config = {
            "name": f"{options.target} played by {options.model}",
            "environment": options.target,
            "env_kwargs": self._kwargs,
            "server": options.url,
            "model": options.model,
            "base_url": self._model.base_url,
            "sampling": dict(self._model.sampling),
            "system": options.system,
            "episodes": options.episodes,
            "first_seed": options.seed,
            "max_turns": options.max_turns,
        }
        try:
            return ResultsFolder(
                directory, config, options.target.partition(":")[2] or options.target, self._kwargs
            )
        except FileExistsError:
            raise UsageError(f"--output: {directory} holds files already; name a new folder") from None
        except OSError as error:
            raise UsageError(f"--output: cannot write {directory}: {error.strerror}") from error

    @contextmanager
    def _progress(self) -> Iterator[Callable[[EvaluatedEpisode], None]]:
        """Show on stderr how far it is: a bar in a terminal, else a line for each episode."""
        console = Console(stderr=True)
        columns = (
            TextColumn("episodes"),
            BarColumn(30),
            TextColumn("{task.completed:.0f} of {task.total:.0f}"),
            TimeElapsedColumn(),
            TextColumn("{task.fields[solved]} solved"),
        )
        with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
            task = progress.add_task("episodes", total=len(self._seeds), solved=0)

            def show(episode: EvaluatedEpisode) -> None:
                solved = sum(bool(each.success) for each in self._episodes)
                progress.update(task, completed=len(self._episodes), solved=solved)
                if not console.is_terminal:
                    print(self._line(episode), file=sys.stderr, flush=True)

            yield show

    def _line(self, episode: EvaluatedEpisode) -> str:
        turns = f"{len(episode.turns)} turn{'s' if len(episode.turns) != 1 else ''}"
        detail = f" ({visible(episode.detail[:100])})" if episode.detail else ""
        return (
            f"{len(self._episodes)} of {len(self._seeds)}: seed {episode.seed} "
            f"{episode.outcome.value.replace('_', ' ')}, reward {episode.reward:g}, {turns}, "
            f"{episode.seconds:.1f} s{detail}"
        )

    def _print(self, summary: Summary, directory: Path) -> None:
        options = self._options
        last = self._seeds[-1]
        print(
            f"{options.target} played by {visible(options.model)}: {summary.played} of {summary.asked} episodes, "
            f"seeds {self._seeds[0]} to {last}, {summary.seconds:.1f} s"
        )
        for name, text in summary_lines(summary):
            print(f"  {name:9} {text}")
        print(f"  {'results':9} {directory}")
        print(f"  {'page':9} roll-train report {directory}")


def _free_folder(target: str, model: str) -> Path:
    """Return a folder in `runs/` that does not exist yet."""
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", f"eval-{target}-{model}")[:100]
    stamp = time.strftime("%Y%m%d-%H%M%S")
    return _RESULTS / f"{name}-{stamp}-{os.getpid()}"


def _model(options: argparse.Namespace) -> ChatModel:
    base_url = options.base_url or os.environ.get(_URL_VARIABLE) or _OPENAI
    try:
        httpx.URL(base_url)
        parts = urlsplit(base_url)
        known = parts.scheme in ("http", "https") and bool(parts.hostname) and (parts.port or 1) > 0
    except (ValueError, httpx.InvalidURL):
        known = False
    if not known or not base_url.isprintable():
        raise UsageError(f"--base-url is an address such as {_OPENAI}, not {base_url[:100]!r}")
    if parts.username or parts.password:
        raise UsageError(
            "--base-url holds a password: put the key into a variable, and name it with --api-key-env"
        )
    sampling = _object(options.extra)
    for name in ("temperature", "max_tokens"):
        if (value := getattr(options, name)) is not None:
            sampling[name] = value
    for name in ("model", "messages", "tools", "stream"):
        if name in sampling:
            raise UsageError(f"--extra: {name!r} is set by the command itself")
    return ChatModel(
        base_url, options.model, _key(options.api_key_env), sampling, options.timeout_s, options.retries
    )


def _key(variable: str | None) -> str | None:
    key = os.environ.get(variable or _KEY_VARIABLE, "").strip()
    if not key:
        if variable is not None:
            raise UsageError(f"--api-key-env: the environment variable {variable} is not set")
        return None
    if not (key.isascii() and key.isprintable()) or " " in key:
        raise UsageError(f"the key in {variable or _KEY_VARIABLE} holds characters that no key has")
    return key


def _prices(options: argparse.Namespace) -> Prices | None:
    if (options.price_in is None) != (options.price_out is None):
        raise UsageError("--price-in and --price-out belong together: give both")
    return None if options.price_in is None else Prices(options.price_in, options.price_out)


def _object(text: str | None) -> dict[str, Any]:
    if text is None:
        return {}
    try:
        found = orjson.loads(text)
    except orjson.JSONDecodeError as error:
        raise UsageError(f"--extra is not JSON: {error}") from error
    if not isinstance(found, dict):
        raise UsageError(f"--extra must be a JSON object, not {type(found).__name__}")
    return found


def _positive(text: str) -> int:
    number = _count(text)
    if number == 0:
        raise argparse.ArgumentTypeError("it must be at least 1")
    return number


def _count(text: str) -> int:
    if not (text.isascii() and text.isdecimal() and len(text) < 10):
        raise argparse.ArgumentTypeError(f"a whole number is needed, not {text[:40]!r}")
    return int(text)


def _price(text: str) -> float:
    number = read_number(text)
    if number < 0:
        raise argparse.ArgumentTypeError("a price is not negative")
    return number


def _seconds(text: str) -> float:
    number = read_number(text)
    if number <= 0:
        raise argparse.ArgumentTypeError("a time is more than 0")
    return number
