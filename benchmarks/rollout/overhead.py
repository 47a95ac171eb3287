"""What the trainer's own loop costs: microseconds of processor time per turn, with 1,000 episodes under way at once.

Counted is the processor time of the trainer's process from the first prompt to the last record: scheduler, sessions,
prompts, requests, records. What servers use is not in it. Rows:

- `loop alone`: inference client and environment answer in this process at once: prompts, records and scheduling only.
- `inference over HTTP`: replies come from the conformance server of the tests (vLLM's dialect, ids in and ids out).
- `served environment, too`: and the environment is served by `roll-serve`, over WebSocket.
- `verifiers`: the loop of `verifiers` 0.1 (MultiTurnEnv, chat completions, asked for ids and log-probabilities) against
  the same inference server, its environment answering in its own process. It needs a venv of its own with
  `pip install "verifiers<0.2"`, whose Python `--verifiers` names.

    python benchmarks/rollout/overhead.py --verifiers /path/to/venv/bin/python
"""

import argparse
import asyncio
import gc
import json
import os
import resource
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path[:0] = [str(ROOT), str(Path(__file__).parent)]

from run import CountingSource  # noqa: E402

from rollgym.clients.measuring.revision import revision  # noqa: E402
from rollgym.trainer.config.run import PromptSettings  # noqa: E402
from rollgym.trainer.inference.base import GenerationRequest, GenerationResult, SamplingParams  # noqa: E402
from rollgym.trainer.inference.forwarding import GenerationQueue  # noqa: E402
from rollgym.trainer.inference.server_client.client import ServerClient  # noqa: E402
from rollgym.trainer.models.tiny import build_tiny_tokenizer  # noqa: E402
from rollgym.trainer.records.group import GroupPlan  # noqa: E402
from rollgym.trainer.records.ledger import Ledger  # noqa: E402
from rollgym.trainer.rollout.actors import ModelActor  # noqa: E402
from rollgym.trainer.rollout.admission import AdmissionWindow  # noqa: E402
from rollgym.trainer.rollout.context import context_policy  # noqa: E402
from rollgym.trainer.rollout.environments import EnvironmentPool  # noqa: E402
from rollgym.trainer.rollout.episodes import EpisodePlayer  # noqa: E402
from rollgym.trainer.rollout.prompts import ChatRenderer, PromptBuilder  # noqa: E402
from rollgym.trainer.rollout.scheduler import RolloutScheduler  # noqa: E402
from rollgym.trainer.rollout.slots import BoundedSlots  # noqa: E402
from rollgym.trainer.tasks.task import Task  # noqa: E402
from tests.support.inference_server.running import InferenceServerProcess  # noqa: E402
from tests.support.processes import env_server  # noqa: E402

GROUP_SIZE = 8
MAX_LENGTH = 4096


@dataclass(frozen=True)
class Size:
    """How much is played."""

    episodes: int
    turns: int
    tokens: int


class InstantClient:
    """Answers at once."""

    version = 0

    def __init__(self, tokens: int) -> None:
        self.result = GenerationResult([40] * tokens, [-1.0] * tokens, [0] * tokens, "length")

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        return self.result


class SmallVocabulary:
    """The server's model knows 300 ids, the tokenizer more: sends each prompt in ids that it knows."""

    def __init__(self, client: ServerClient) -> None:
        self.client = client

    async def generate(self, request: GenerationRequest) -> GenerationResult:
        known = [token % 280 for token in request.prompt_ids]
        return await self.client.generate(replace(request, prompt_ids=known))


class InstantSession:
    """An environment in this process."""

    env = SimpleNamespace(kind="episodic", metadata={})

    def __init__(self, turns: int) -> None:
        self.turns = turns
        self.taken = 0

    async def reset(self, **_: Any) -> tuple[str, dict[str, Any]]:
        return "Where to?", {}

    async def step(self, action: str) -> tuple[str, float, bool, bool, dict[str, Any]]:
        self.taken += 1
        return "You moved. Where to?", 0.0, self.taken == self.turns, False, {}


class InstantPool:
    """Lends such sessions."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    @asynccontextmanager
    async def session(self, task: Task) -> AsyncIterator[InstantSession]:
        yield InstantSession(self.turns)


class Source(CountingSource):
    """Tasks of the served environment."""

    def __init__(self, turns: int) -> None:
        self.turns = turns

    def task(self, index: int) -> Task:
        return Task(index, "Turns-v0", seed=index, kwargs={"turns": self.turns})


def cpu_s() -> float:
    """Processor time that this process has used."""
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


async def play(size: Size, client: Any, pool: Any) -> dict[str, float]:
    """Play all episodes at one time and count what it cost."""
    renderer = ChatRenderer(build_tiny_tokenizer(), {}, frozenset())
    settings = PromptSettings(instruction="none")
    sampling = SamplingParams(size.tokens)
    queue = GenerationQueue(client, size.episodes)

    def actor() -> ModelActor:
        prompts = PromptBuilder(renderer, context_policy(settings), settings)
        return ModelActor(queue, prompts, sampling, MAX_LENGTH, 0, "train")

    player = EpisodePlayer(pool, actor, size.turns)
    groups = size.episodes // GROUP_SIZE
    scheduler = RolloutScheduler(
        Source(size.turns),
        AdmissionWindow(groups, 0),
        player.play,
        GroupPlan(GROUP_SIZE, 0, 1, 3600.0),
        Ledger(),
        BoundedSlots(None),
    )
    began, used = time.monotonic(), cpu_s()
    step = await scheduler.next_groups(0)
    used, took = cpu_s() - used, time.monotonic() - began
    await scheduler.close()
    turns = sum(len(played.turns) for group in step.kept for played in group.trajectories)
    return {"turns": turns, "cpu_s": used, "wall_s": took}


async def ours(size: Size, inference_url: str | None, env_url: str | None) -> dict[str, float]:
    """Play with what answers over the network, or at once where no URL is given."""
    async with AsyncExitStack() as stack:
        client: Any = InstantClient(size.tokens)
        pool: Any = InstantPool(size.turns)
        if inference_url:
            server = ServerClient(inference_url, "vllm", way=None, patience_s=600.0)
            client = SmallVocabulary(await stack.enter_async_context(server))
        if env_url:
            pool = await stack.enter_async_context(EnvironmentPool(env_url, None, "msgpack"))
            # Sessions are made before, as in a run that goes on; what is counted is turns.
            await play(size, InstantClient(size.tokens), pool)
        return await play(size, client, pool)


def verifiers(python: Path, size: Size, inference_url: str) -> dict[str, float]:
    """Run the other loop in its own Python."""
    script = str(Path(__file__).with_name("overhead_verifiers.py"))
    command = [str(python), script, inference_url, str(size.episodes), str(size.turns), str(size.tokens)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"NO_KEY": "none"})
    if done.returncode:
        raise SystemExit(done.stderr[-3000:])
    return dict(json.loads(done.stdout.strip().splitlines()[-1]))


def show(name: str, row: dict[str, float]) -> dict[str, float]:
    """Print a row and return it."""
    row["us_per_turn"] = 1e6 * row["cpu_s"] / row["turns"]
    print(f"{name:<28}{row['turns']:>8.0f} turns{row['us_per_turn']:>10.0f} us of CPU a turn", flush=True)
    return row


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--verifiers", type=Path)
    parser.add_argument("--output", type=Path)
    options = parser.parse_args()
    gc.freeze()  # as `roll-train` does: no garbage is looked for among what was imported
    size = Size(options.episodes, options.turns, options.tokens)
    results = {"loop alone": show("loop alone", asyncio.run(ours(size, None, None)))}
    served = ["--env", "Turns-v0=benchmarks.rollout.sleeping_env:Turns", "--isolation", "Turns-v0=inline"]
    rows = ["--max-rows", "1024", "--max-length", str(MAX_LENGTH)]
    with InferenceServerProcess("vllm", *rows) as server, env_server(*served) as env_url:
        results["http"] = show("inference over HTTP", asyncio.run(ours(size, server.url, None)))
        results["served"] = show("served environment, too", asyncio.run(ours(size, server.url, env_url)))
        if options.verifiers:
            results["verifiers"] = show("verifiers", verifiers(options.verifiers, size, server.url))
    if options.output:
        commit = revision()
        record = {
            "command": " ".join(["python", *sys.argv]),
            "commit": commit,
            "load": os.getloadavg(),
            "results": results,
        }
        options.output.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
