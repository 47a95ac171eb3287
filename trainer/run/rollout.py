"""`roll-train rollout`: episodes without training, one after the other, so that a debugger works.

They are written as they are played, one a line, and such a file can be played again.
"""

import json
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Self

from pydantic import BaseModel, Field, ValidationError

from rollgym.clients.measuring.statistics import mean_interval, success_rate
from rollgym.env_server.process.embedding import ConfigurationError, serve_here
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.plugins import load_attribute
from rollgym.trainer.core.run_files import output_lock, write_errors
from rollgym.trainer.core.seeding import generator
from rollgym.trainer.evaluation.evaluation_sets import build_evaluation_set
from rollgym.trainer.evaluation.play import in_time
from rollgym.trainer.records.schema import EpisodeFormatError
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.rollout.actors import Actor, HumanActor, RandomActor, ScriptedActor
from rollgym.trainer.rollout.agent import Session, play_episode
from rollgym.trainer.rollout.data_check import check_streams
from rollgym.trainer.rollout.environments import OPERATION_TIMEOUT_S, EnvironmentPool
from rollgym.trainer.rollout.episodes import play_in_session
from rollgym.trainer.rollout.slots import EpisodeSlots, Slot
from rollgym.trainer.run.environments import open_environments, task_source
from rollgym.trainer.run.judges import open_judges_alone
from rollgym.trainer.run.learning import large_imports
from rollgym.trainer.tasks.dataset import row_streams
from rollgym.trainer.tasks.task import Task

if TYPE_CHECKING:
    from rollgym.trainer.run.players import PolicyPlayer
    from rollgym.trainer.run.policy import Policy


class _Turn(BaseModel):
    reply: str


class _EarlierEpisode(BaseModel):
    """The parts of an earlier release's episode that a replay needs."""

    task: Task
    turns: list[_Turn] = Field(min_length=1, fail_fast=True)


def read_recording(path: Path) -> list[tuple[Task, list[str]]]:
    """Return the task and the replies of each episode in `path`.

    Raises:
        ConfigError: If the file cannot be read, or a line of it is not an episode.
    """
    episodes = []
    try:
        with path.open("rb") as lines:
            episodes = [_script(path, number, line) for number, line in enumerate(lines, start=1)]
    except OSError as error:
        raise ConfigError(
            f"cannot read --recorded {path}: {error.strerror}; name a run's episodes.jsonl, or what rollout --output "
            "wrote"
        ) from error
    if not episodes:
        raise ConfigError(f"--recorded {path} holds no episodes")
    return episodes


def _script(path: Path, number: int, line: bytes) -> tuple[Task, list[str]]:
    try:
        record = json.loads(line)
        if isinstance(record, dict) and "format" not in record:
            episode = _EarlierEpisode.model_validate(record)
            return episode.task, [turn.reply for turn in episode.turns]
        trajectory = Trajectory.from_record(record)
        if not trajectory.steps:
            raise EpisodeFormatError("turns: it has none")
    except (ValueError, RecursionError) as error:
        raise ConfigError(
            f"--recorded {path}, line {number} is not an episode: {_reason(error)}; name a run's episodes.jsonl, or "
            "what rollout --output wrote"
        ) from error
    return trajectory.task, [turn.reply for turn in trajectory.steps]


def _reason(error: Exception) -> str:
    if isinstance(error, ValidationError):
        problem = error.errors(include_url=False, include_input=False)[0]
        return ": ".join([*(str(part)[:80] for part in problem["loc"]), problem["msg"]])
    if isinstance(error, EpisodeFormatError):
        return str(error)
    return "Invalid JSON"


class EpisodeWriter:
    """Writes episodes to a file of its own, each at once, so that those before a mistake are kept.

    Args:
        path: The file; its content is replaced.

    Raises:
        ConfigError: If it cannot be written, or another process writes it.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        with ExitStack() as held:
            held.enter_context(output_lock(path))  # before it is opened, which empties it
            try:
                # Half a surrogate pair has no UTF-8, but this way of writing it is JSON's own.
                self._file = path.open("w", encoding="utf-8", errors="backslashreplace")
            except OSError as error:
                raise ConfigError(
                    f"cannot write --output {path}: {error.strerror}; name a file in a directory that exists"
                ) from error
            self._held = held.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with self._held, write_errors(self._path):
            self._file.close()

    def write(self, trajectory: Trajectory) -> None:
        """Write an episode that is over.

        Raises:
            WriteError: If that cannot be done, such as on a full disk.
        """
        with write_errors(self._path):
            self._file.write(json.dumps(trajectory.as_record(), ensure_ascii=False) + "\n")
            self._file.flush()


_AT_A_BREAKPOINT_S = 86400.0
"""How long an operation may take, since a person may be debugging the environment's code."""

Script = tuple[Task, list[str]]


async def rollout(
    settings: RunSettings,
    *,
    player: str,
    episodes: int,
    evaluation_set: str | None,
    recorded: Path | None,
    checkpoint: Path | None,
    output: Path | None,
) -> int:
    """Play episodes one after the other and print them.

    Raises:
        ConfigError: If what the command line names is not there, or cannot be written.
    """
    if evaluation_set is not None and evaluation_set not in settings.evaluation.sets:
        names = ", ".join(settings.evaluation.sets) or "none"
        raise ConfigError(f"no evaluation set '{evaluation_set}'; the config has {names}")
    policy = _playing_policy(settings, checkpoint) if player == "model" else None
    scripts = read_recording(recorded)[:episodes] if recorded is not None else []
    async with AsyncExitStack() as stack:
        writer = stack.enter_context(EpisodeWriter(output)) if output is not None else None
        console = RunConsole(settings.steps, live=False)
        settings = await open_judges_alone(settings, stack, console.say)
        here = settings.env_url is None
        pool = await stack.enter_async_context(
            open_environments(
                settings,
                console,
                server_in_this_process,
                timeout_s=_AT_A_BREAKPOINT_S if here else OPERATION_TIMEOUT_S,
            )
        )
        tasks = [task for task, _ in scripts] or await _tasks(settings, evaluation_set, episodes, pool)
        model = None
        if policy is not None:
            model = await _open_player(settings, policy, pool, console, stack)
        cast = _Cast(settings, player, scripts, model)
        played: list[Trajectory] = []
        for number, task in enumerate(tasks):
            trajectory = await cast.play(number, task, pool)
            played.append(trajectory)
            if writer is not None:
                writer.write(trajectory)
            _print_episode(console, number, trajectory)
    console.say(
        f"{len(played)} episodes: success {success_rate(sum(t.success for t in played), len(played))}, "
        f"reward {mean_interval([t.total_reward for t in played])}"
    )
    if output is not None:
        console.say(f"episodes: {output}")
    return 0


def _playing_policy(settings: RunSettings, checkpoint: Path | None) -> "Policy":
    # Imported late: torch and transformers take seconds, and no other player needs them.
    with large_imports("rollout --policy model"):
        from transformers.utils.logging import disable_progress_bar

        from rollgym.trainer.run.inference import check_inference
        from rollgym.trainer.run.trained_policy import playing_policy
    disable_progress_bar()  # the command has a console of its own
    check_inference(settings)
    return playing_policy(settings, checkpoint)


async def _open_player(
    settings: RunSettings, policy: "Policy", pool: EnvironmentPool, console: RunConsole, stack: AsyncExitStack
) -> "PolicyPlayer":
    from rollgym.trainer.run.players import bring_weights, open_player, open_players

    players = await stack.enter_async_context(open_players(settings, policy, pool, console))
    await bring_weights(settings, policy, players)
    return await stack.enter_async_context(open_player(settings, policy, players, console))


async def _tasks(
    settings: RunSettings, evaluation_set: str | None, episodes: int, pool: EnvironmentPool
) -> Sequence[Task]:
    if evaluation_set is not None:
        chosen = await build_evaluation_set(evaluation_set, settings.evaluation.sets[evaluation_set], pool)
        return chosen.tasks[:episodes]
    source = task_source(settings)
    await check_streams(row_streams(source), pool)
    return [source.task(index) for index in range(episodes)]


@dataclass(frozen=True, slots=True)
class _Cast:
    """The player of the command's episodes.

    Attributes:
        settings: The run.
        player: One of "model", "random", "human" or "recorded".
        scripts: The replies of a recorded player, by episode.
        model: Plays with the policy; None for the other players.
    """

    settings: RunSettings
    player: str
    scripts: Sequence[Script]
    model: "PolicyPlayer | None"

    async def play(self, number: int, task: Task, pool: EnvironmentPool) -> Trajectory:
        """Play episode `number`, one task, with the chosen player."""

        turns = self.settings.rollout.max_turns

        async def in_session(session: Session) -> Trajectory:
            if self.model is not None:
                return await self.model.playing("rollout", turns)(session, task)
            return await play_episode(session, task, 0, self._actor(number, session), turns)

        slot = Slot(EpisodeSlots() if self.model is None else self.model.players.slots)
        try:
            await slot.start(task, 0)
            timeout_s = None if self.model is None else self.model.timeout_s
            return await in_time(play_in_session(pool, task, in_session), task, timeout_s)
        finally:
            slot.leave()

    def _actor(self, number: int, session: Session) -> Actor:
        if self.player == "random":
            stream = generator(self.settings.seed, "rollout", number)
            return RandomActor(stream, session.action_space.sample)
        if self.player == "human":
            return HumanActor()
        return ScriptedActor(self.scripts[number][1])


def _print_episode(console: RunConsole, number: int, trajectory: Trajectory) -> None:
    task = trajectory.task
    console.say(f"\nepisode {number}: {task.env_id}, seed {task.seed}")
    for index, turn in enumerate(trajectory.turns):
        said = "  summary" if turn.is_summary else f"  reward {turn.reward:g}"
        console.say(f"{turn.observation}\n  turn {index}: {turn.reply!r}{said}")
    console.say(f"  {trajectory.outcome.value} {trajectory.detail}  reward {trajectory.total_reward:g}")
    sys.stdout.flush()


@asynccontextmanager
async def server_in_this_process(environments: Sequence[str]) -> AsyncIterator[str]:
    """Serve the built-in environments and `environments` while the context is open, and give the server's URL.

    Raises:
        ConfigError: If an environment cannot be served, or a module cannot be imported.
    """
    for named in environments:
        # Errors from importing a user's module become readable messages here.
        load_attribute(named.rpartition("=")[2])
    async with AsyncExitStack() as stack:
        try:
            url = await stack.enter_async_context(serve_here(environments, allow_expert=True))
        except ConfigurationError as error:
            raise ConfigError(f"cannot serve {', '.join(environments)}: {error}") from error
        yield url
