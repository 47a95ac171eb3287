"""Episodes without a server and without an engine, by sessions that answer as they are told."""

from contextlib import asynccontextmanager
from types import SimpleNamespace

from rollgym.trainer.core.numbers import MOST_IDS
from rollgym.trainer.core.plugins import load_plugin
from rollgym.trainer.inference.base import GenerationResult
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.rollout.actors import ScriptedActor
from rollgym.trainer.rollout.episodes import EpisodePlayer
from rollgym.trainer.rollout.prompts import Prompt
from rollgym.trainer.tasks.task import Task

TASK = Task(0, "Any-v0", seed=0)
ASKING = f"{__name__}:agent_that_asks"


class Session:
    """A session that answers as it is told."""

    env = SimpleNamespace(metadata={}, kind="episodic")

    def __init__(self, *, reward=1.0, info=None, problem=None):
        self.reward, self.info, self.problem = reward, info or {}, problem

    async def reset(self, seed, options):
        return "board", {}

    async def step(self, reply):
        if self.problem is not None:
            raise self.problem
        return "board", self.reward, True, False, {"success": True, **self.info}


class Pool:
    """A pool whose sessions are all alike."""

    def __init__(self, session=None, problem=None):
        self._session, self._problem = session or Session(), problem

    @asynccontextmanager
    async def session(self, task):
        if self._problem is not None:
            raise self._problem
        yield self._session


class Engine:
    """An engine that draws one token, with a log-probability as it is told."""

    def __init__(self, logprob):
        self._logprob = logprob

    async def generate(self, request):
        return GenerationResult([3], [self._logprob], [0], "stop")


class Prompts:
    """Prompts of two tokens, whatever was said."""

    compaction = None

    def begin(self, info):
        pass

    def prompt(self, trajectory, messages):
        return Prompt([1, 2])


async def agent_that_asks(session, task, member, actor, max_turns, attempt):
    """An agent that gives up where its step does not fail."""
    await session.reset(seed=1, options=None)
    await session.step("Up")
    raise AssertionError("the step should have failed")


async def played_in(
    module: str, pool, *, actor=None, vocabulary=MOST_IDS, task=TASK, **plugins
) -> Trajectory:
    """An episode; plug-ins are named by their functions in a module, or by a path of their own."""
    paths = {name: each if ":" in each else f"{module}:{each}" for name, each in plugins.items()}
    settings = {name: load_plugin(path, f"rollout.{name}") for name, path in paths.items()}
    player = EpisodePlayer(pool, lambda: actor or ScriptedActor(["Up"]), 3, vocabulary=vocabulary, **settings)
    return await player.play(task, 1, 2)
