"""`roll-agent-proxy`: an endpoint for agents in front of any policy, which records the sampled episodes."""

import argparse
import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

from rollgym.clients.process.modules import add_version
from rollgym.command_line import CommandParser
from rollgym.extras import missing_extra
from rollgym.suggestions import alternatives
from rollgym.trainer.config.agents import ToolFormats
from rollgym.trainer.config.inference import INFERENCE_SERVERS, SERVERS
from rollgym.trainer.core.errors import ConfigError, TrainerError
from rollgym.trainer.core.run_files import output_lock
from rollgym.trainer.run.command import port
from rollgym.user_paths import user_path

if TYPE_CHECKING:
    from rollgym.trainer.inference.base import InferenceClient
    from rollgym.trainer.rollout.agents.policy_service import PolicyService

_TOKEN = "ROLLGYM_PROXY_TOKEN"
_UPSTREAM_KEY = "ROLLGYM_UPSTREAM_KEY"
_LOOPBACK = ("127.0.0.1", "::1", "localhost")
_EPILOG = f"""
An agent needs nothing but OPENAI_BASE_URL=http://HOST:PORT/s/NAME/v1, where
any NAME makes a session; or OPENAI_BASE_URL=http://HOST:PORT/v1 and
OPENAI_API_KEY=NAME. POST /s/NAME/reward takes {{"reward": 1, "success": true}}.
POST /s/NAME/end ends the session, and its record is written: ids,
log-probabilities and versions of every token.

environment variables:
  {_TOKEN}   where it is set, sessions open only by POST /sessions
                        with it as the bearer token
  {_UPSTREAM_KEY}  API key of the server behind
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return the exit code."""
    options = parse(arguments)
    try:
        return asyncio.run(_run(options))
    except (TrainerError, ConnectionError, TimeoutError) as error:
        sys.stderr.write(f"roll-agent-proxy: {error}\n")
        return getattr(error, "exit_code", 2)
    except ModuleNotFoundError as error:
        if (missing := missing_extra(error, "the proxy")) is None:
            raise
        sys.stderr.write(f"roll-agent-proxy: {missing}\n")
        return 2
    except KeyboardInterrupt:
        return 130


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Return the options of a command line."""
    return _parser().parse_args(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = CommandParser(
        prog="roll-agent-proxy",
        description="An OpenAI-compatible endpoint in front of a policy.\nIt records what agents sample, by tokens.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_version(parser)
    model = parser.add_argument_group("the policy")
    model.add_argument("--model", required=True, help="folder or hub name: its tokenizer and chat template")
    servers = alternatives([each.title for each in INFERENCE_SERVERS])
    model.add_argument(
        "--upstream", metavar="URL", help=f"{servers} server; without it the model is run here"
    )
    model.add_argument("--dialect", choices=SERVERS.names(), default="vllm", help="what the server speaks")
    model.add_argument("--name", default="policy", help="what the policy is called in the API")
    model.add_argument("--max-length", type=_positive, help="longest row in tokens; default: the model's own")
    model.add_argument(
        "--template-kwargs", type=_object, default={}, help="JSON: variables of the chat template"
    )
    model.add_argument(
        "--tool-format",
        default="auto",
        type=lambda text: text.replace("_", "-"),  # qwen_xml is a former name
        choices=ToolFormats().names(),
    )
    sampling = parser.add_argument_group("sampling")
    sampling.add_argument(
        "--max-new-tokens", type=_positive, default=1024, help="longest reply (default 1024)"
    )
    sampling.add_argument(
        "--temperature", type=float, default=1.0, help="where the agent does not say (default 1)"
    )
    sampling.add_argument("--top-p", type=float, default=1.0)
    sampling.add_argument("--top-k", type=int, default=0)
    sampling.add_argument("--seed", type=int, default=0, help="seed of all random streams")
    sampling.add_argument(
        "--sampling",
        choices=("agent", "run", "refuse"),
        default="agent",
        help="an agent's own temperature and the like: heeded (default), passed over, or refused",
    )
    serving = parser.add_argument_group("serving")
    serving.add_argument("--host", default="127.0.0.1")
    serving.add_argument("--port", type=port, default=8040, help="default 8040; 0 takes a free one")
    serving.add_argument(
        "--output", type=user_path, default=Path("agent_episodes.jsonl"), help="where records are added"
    )
    serving.add_argument("--idle-s", type=float, default=600.0, help="a session unused for so long ends")
    serving.add_argument("--max-body-mb", type=_positive, default=32, help="largest request in MiB")
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"'{text}' is no whole number above 0")
    return int(text)


def _object(text: str) -> dict[str, Any]:
    try:
        value = json.loads(text)
    except ValueError:
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"'{text}' is no JSON object")
    return value


async def _run(options: argparse.Namespace) -> int:
    from transformers.utils.logging import disable_progress_bar

    from rollgym.trainer.core.shutdown import GracefulShutdown, InterruptedRunError

    disable_progress_bar()  # its output is for people who start agents
    shutdown = GracefulShutdown()
    shutdown.say = lambda text: None
    try:
        with shutdown.watching():
            await _serve(options)
    except InterruptedRunError:
        return 0
    return 0


async def _serve(options: argparse.Namespace) -> None:
    token = os.environ.get(_TOKEN)
    if options.host not in _LOOPBACK and token is None:
        raise ConfigError(f"--host {options.host} is open to others: set {_TOKEN}, or serve loopback only")
    _require_sampling(options)
    with output_lock(options.output):
        await _serve_alone(options, token)


async def _serve_alone(options: argparse.Namespace, token: str | None) -> None:
    # Imported late: torch and transformers take seconds, and --help needs neither.
    from rollgym.trainer.core.run_files import LineFile
    from rollgym.trainer.rollout.agents.endpoint import agents_app
    from rollgym.trainer.rollout.agents.http import serve_app
    from rollgym.trainer.rollout.agents.proxy import ProxySessions

    file = LineFile(options.output)

    def write(record: Mapping[str, Any]) -> None:
        file.write(dict(record))
        file.flush()

    async with opened_policy(options) as service:
        sessions = ProxySessions(service, write, token, options.idle_s, time.time)
        app = agents_app(sessions, options.max_body_mb << 20, sessions.routes())
        served = False
        try:
            async with serve_app(app, options.host, options.port) as url:
                served = True
                _say(f"roll-agent-proxy serving on {url}, records in {options.output}")
                await asyncio.Event().wait()
        finally:
            sessions.close()
            file.close()
            if served:
                _say(f"{sessions.written} episodes written to {options.output}")


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _require_sampling(options: argparse.Namespace) -> None:
    if not 0 <= options.temperature <= 100 or not 0 < options.top_p <= 1 or options.top_k < 0:
        raise ConfigError("--temperature is from 0 to 100, --top-p above 0 and at most 1, --top-k at least 0")
    if not options.idle_s > 0:
        raise ConfigError("--idle-s is above 0")


@asynccontextmanager
async def opened_policy(options: argparse.Namespace) -> AsyncIterator["PolicyService"]:
    """Open the inference, and give the service that answers agents."""
    from rollgym.trainer.config.model import check_model_path
    from rollgym.trainer.inference.base import SamplingParams
    from rollgym.trainer.models.load import load_config, load_model, load_tokenizer, model_folder
    from rollgym.trainer.run.inference import open_engine, open_server

    check_model_path(options.model, "--model")
    folder = model_folder(options.model, "--model")
    tokenizer = load_tokenizer(folder)
    if options.upstream is None:
        model = load_model(folder)
        longest = options.max_length or _longest(model.config)
        async with open_engine(model, longest, tokenizer) as engine:
            yield _service(options, engine, tokenizer, model, longest)
        return
    config = load_config(folder)
    named: Any = SimpleNamespace(generation_config=_generation_config(folder), config=config)
    _say(f"asking {options.upstream} what it can do")
    async with open_server(options.upstream, options.dialect, _UPSTREAM_KEY) as client:
        served = client.capabilities.max_length or _longest(config)
        if options.max_length is not None and options.max_length > served:
            raise ConfigError(
                f"--max-length {options.max_length}: {options.upstream} takes rows of up to {served} tokens"
            )
        longest = options.max_length or min(served, _longest(config))
        reads_seeds = client.capabilities.reads_seeds
        service = _service(options, client, tokenizer, named, longest, reads_seeds=reads_seeds)
        client.check_sampling(service.sampling)
        if options.sampling == "agent" and client.capabilities.inexact(SamplingParams(1, 0.5, 0.5)):
            _say(SERVERS[options.dialect].inexact)
        yield service


def _longest(config: Any) -> int:
    return int(getattr(config, "max_position_embeddings", None) or 4096)


def _generation_config(folder: Path) -> Any:
    from transformers import GenerationConfig

    if not (folder / "generation_config.json").exists():
        return None
    return GenerationConfig.from_pretrained(folder, local_files_only=True)


def _service(
    options: argparse.Namespace,
    client: "InferenceClient",
    tokenizer: Any,
    model: Any,
    max_length: int,
    *,
    reads_seeds: bool = True,
) -> "PolicyService":
    from rollgym.trainer.inference.base import SamplingParams
    from rollgym.trainer.models.load import stop_ids, vocabulary_of
    from rollgym.trainer.rollout.agents.policy_service import PolicyService
    from rollgym.trainer.rollout.agents.replies import format_of_template
    from rollgym.trainer.rollout.agents.splicing import SplicingRenderer
    from rollgym.trainer.rollout.prompts import ChatRenderer

    renderer = ChatRenderer(
        tokenizer, options.template_kwargs, stop_ids(model), vocabulary=vocabulary_of(model)
    )
    renderer.template.say = _say
    sampling = SamplingParams(
        max_new_tokens=options.max_new_tokens,
        temperature=options.temperature,
        top_p=options.top_p,
        top_k=options.top_k,
        stop_token_ids=renderer.stop_token_ids,
    )
    automatic = options.tool_format == "auto"
    return PolicyService(
        client=client,
        renderer=SplicingRenderer(renderer),
        sampling=sampling,
        max_length=max_length,
        model=options.name,
        tool_format=format_of_template(str(tokenizer.chat_template)) if automatic else options.tool_format,
        wishes=options.sampling,
        seed=options.seed,
        purpose="proxy",
        reads_seeds=reads_seeds,
    )


if __name__ == "__main__":
    sys.exit(main())
