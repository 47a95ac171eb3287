"""One episode: reset, reply, step, until the environment says that it is over; and the session that it is played in.

The environment's metrics are aggregated from one number per turn to one per episode.
"""

import hashlib
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any, Literal, Protocol

from gymnasium import Space

from rollgym.clients.client.operation import ResetResult, StepResult
from rollgym.clients.client.session import EnvSession
from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.episode import PortableEpisode
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import EnvInfo
from rollgym.trainer.core.errors import ConfigError, InvalidNumberError, UnplayableTaskError
from rollgym.trainer.core.numbers import finite_number
from rollgym.trainer.records.trajectory import Phase, Trajectory, TrajectoryOutcome, Turn
from rollgym.trainer.rollout.actors import Actor, ContextOverflowError, View
from rollgym.trainer.rollout.context import observation_messages, pictures_of
from rollgym.trainer.tasks.task import Task


class Session(Protocol):
    """One environment on a server, as players, agents and coroutines of users see it.

    An `EnvSession`, or one whose answers are in the rollout log (`LoggedSession`). Its attributes and methods are those
    of `EnvSession`; its lender creates, closes and rebuilds it.
    """

    @property
    def session_id(self) -> str:
        """The id that the server gave the session."""
        ...

    @property
    def env(self) -> EnvInfo:
        """The server's description of the environment."""
        ...

    @property
    def env_id(self) -> str:
        """The id of the session's environment."""
        ...

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The arguments that the environment was made with."""
        ...

    @property
    def action_space(self) -> Space[Any]:
        """The action space of the environment."""
        ...

    @property
    def observation_space(self) -> Space[Any]:
        """The observation space of the environment."""
        ...

    @property
    def episode(self) -> int:
        """Index of the episode in the session; -1 before the first reset."""
        ...

    @property
    def step_index(self) -> int:
        """Number of steps taken in the episode."""
        ...

    @property
    def seed(self) -> int | None:
        """Seed of the episode; None before the first reset."""
        ...

    async def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        """Begin an episode; see `EnvSession.reset`."""
        ...

    async def step(
        self, action: Any, *, autoreset: bool = False, timeout_s: float | None = None
    ) -> StepResult:
        """Take one action; see `EnvSession.step`."""
        ...

    async def render(self, mode: str | None = None) -> Any:
        """Render the environment's state; see `EnvSession.render`."""
        ...

    async def fork(self, count: int = 1, reseed: int | None = None) -> list[EnvSession]:
        """Make independent copies at this point; see `EnvSession.fork`."""
        ...

    async def episode_record(self) -> PortableEpisode:
        """Return the portable episode; see `EnvSession.episode_record`."""
        ...


AGGREGATIONS: Mapping[str, Callable[[Sequence[float]], float]] = MappingProxyType(
    {
        "last": lambda values: values[-1],
        "sum": sum,
        "mean": lambda values: sum(values) / len(values),
        "max": max,
        "min": min,
    }
)


class EpisodeMetrics:
    """Collects `info["metrics"]` turn by turn.

    Args:
        how: How each metric aggregates over the turns, by name: a key of `AGGREGATIONS`. For a metric without an entry
            the last value is taken.

    Raises:
        ConfigError: If an aggregation is unknown.
    """

    def __init__(self, how: Mapping[str, str]) -> None:
        if not isinstance(how, Mapping):
            raise ConfigError(
                f"an environment's metadata['metrics'] must name how each aggregates, not {how!r:.100}"
            )
        for name, way in how.items():
            if not isinstance(way, str) or way not in AGGREGATIONS:
                raise ConfigError(
                    f"metric {name!r} aggregates by {way!r}; known are {', '.join(AGGREGATIONS)}"
                )
        self._how = how
        self._values: dict[str, list[float]] = {}
        self._refused = 0

    def add(self, info: Mapping[str, Any]) -> None:
        """Read the metrics of a turn's info: numbers, and booleans as 1 and 0; anything else is ignored.

        A number that is not finite is ignored, too, and counted as `metrics_refused`.
        """
        metrics = info.get("metrics")
        if not isinstance(metrics, Mapping):
            return
        for name, value in metrics.items():
            if isinstance(value, bool):
                self._values.setdefault(name, []).append(float(value))
            elif isinstance(value, int | float):
                self._take(name, value)

    def _take(self, name: str, value: float) -> None:
        try:
            number = finite_number(value, name)
        except InvalidNumberError:
            self._refused += 1
        else:
            self._values.setdefault(name, []).append(number)

    def totals(self) -> dict[str, float]:
        """Return the aggregated value of each metric."""
        totals = {
            name: AGGREGATIONS[self._how.get(name, "last")](values) for name, values in self._values.items()
        }
        return totals | ({"metrics_refused": float(self._refused)} if self._refused else {})


_LONGEST_ANCHOR = 8192

FAULTS = {"timeout": TrajectoryOutcome.TIMEOUT, "error": TrajectoryOutcome.ENVIRONMENT_ERROR}
"""Verdicts that say nothing about the reply."""

EpisodeStage = Literal["make", "reset", "play"]
"""How far an episode has come: its session is made, the environment is reset, its steps are taken."""


async def play_episode(
    session: Session, task: Task, member: int, actor: Actor, max_turns: int, attempt: int = 0
) -> Trajectory:
    """Play `task` in `session` and return the record.

    An environment that fails or times out, a verifier that could not decide, and a number that is not finite
    give a trajectory whose outcome says so; it is for the scheduler to replace it. Reaching `max_turns` truncates the
    episode.

    Raises:
        UnplayableTaskError: If the first prompt leaves no room for a reply, or the environment refuses the task's row.
        ProblemError: If the server refuses what the run asks for (unknown environment, bad kwargs, wrong token).
    """
    trajectory = Trajectory(task, member, attempt)
    metrics = EpisodeMetrics(session.env.metadata.get("metrics", {}))
    try:
        with trajectory.timeline.during(Phase.ENVIRONMENT):
            observation, info = await session.reset(seed=task.seed, options=_options(task))
        actor.begin(info)
        for number in range(max_turns):
            anchor = info.get("anchor")
            turn = await actor.act(trajectory, view_of(number, observation, info))
            trajectory.turns.append(turn)
            with trajectory.timeline.during(step_phase(session)):
                observation, reward, terminated, truncated, info = await session.step(turn.reply)
            note_result(turn, anchor, reward, info)
            metrics.add(info)
            if terminated or truncated:
                outcome_of_end(trajectory, session, info, terminated=terminated)
                break
        else:
            trajectory.outcome = TrajectoryOutcome.TRUNCATED
            trajectory.detail = f"max_turns {max_turns} reached"
        if trajectory.outcome is TrajectoryOutcome.TRUNCATED:
            actor.cut_off(trajectory, partial(view_of, len(trajectory.steps), observation, info))
        trajectory.metrics = metrics.totals()
    except ContextOverflowError as overflow:
        if not trajectory.turns:
            row = f" ({task.row})" if task.row else ""
            raise UnplayableTaskError(
                f"{overflow}{row}: raise model.max_length, lower rollout.max_new_tokens, or show less with "
                "prompt.instruction"
            ) from overflow
        trajectory.outcome = TrajectoryOutcome.CONTEXT_OVERFLOW
        trajectory.detail = str(overflow)
    except (ProblemError, DecodeError, InvalidNumberError) as error:
        note_failure(trajectory, error, "play" if trajectory.turns else "reset")
    return trajectory


def outcome_of_end(
    trajectory: Trajectory, session: Session, info: Mapping[str, Any], *, terminated: bool
) -> None:
    """Give an episode the outcome that its environment's last step has."""
    solved = _flag(info, "success", default=False)
    failed = TrajectoryOutcome.FAILED if terminated else TrajectoryOutcome.TRUNCATED
    trajectory.outcome = TrajectoryOutcome.SOLVED if solved else failed
    verdict = info.get("outcome") if session.env.kind == "stateless" else None
    if verdict in FAULTS:
        trajectory.outcome = FAULTS[verdict]
        trajectory.detail = f"the verifier could not tell: {info.get('detail')}"


def step_phase(session: Session) -> Phase:
    """Return the phase of a wait for a session's step: a step of a verifier is its verdict."""
    return Phase.VERIFY if session.env.kind == "stateless" else Phase.ENVIRONMENT


def note_failure(
    trajectory: Trajectory,
    error: ProblemError | DecodeError | InvalidNumberError,
    stage: EpisodeStage = "play",
) -> None:
    """Give an episode the outcome of what ended it, which says nothing about the policy.

    Args:
        trajectory: The episode.
        error: The error that ended it.
        stage: When it ended. What is asked for in order to make a session is the run's, the reset's is the task's, and
            what comes after it may be the policy's.

    Raises:
        ProblemError: If the server refuses what the run asks for: a retry cannot help.
        UnplayableTaskError: If it refuses what this task alone asks for.
    """
    trajectory.detail = str(error)
    task = trajectory.task
    match error:
        case ProblemError(code="too_large") if stage == "play" or error.extra.get("part") == "reply":
            # A reply of the policy or an answer of the environment, and another one may be smaller.
            trajectory.outcome = TrajectoryOutcome.ENVIRONMENT_ERROR
        case ProblemError() if task.row and (
            error.code == "invalid_request" or _is_too_large_a_row(error, stage)
        ):
            raise UnplayableTaskError(f"{task.env_id} does not take {task.row}: {error.detail}") from error
        case ProblemError() if error.kind.is_final:
            raise error
        case ProblemError() if error.code == "step_timeout":
            trajectory.outcome = TrajectoryOutcome.TIMEOUT
        case InvalidNumberError():
            trajectory.outcome = TrajectoryOutcome.INVALID_NUMBER
        case _:
            trajectory.outcome = TrajectoryOutcome.ENVIRONMENT_ERROR


def _is_too_large_a_row(problem: ProblemError, stage: EpisodeStage) -> bool:
    return problem.code == "too_large" and stage == "reset"


def _options(task: Task) -> dict[str, Any] | None:
    return dict(task.options) if task.options is not None else None


def _flag(info: Mapping[str, Any], name: str, *, default: bool) -> bool:
    """Return a truth value of an environment: a boolean, or a number as others have it."""
    value = info.get(name, default)
    return (
        value if isinstance(value, bool) else finite_number(value, f"the environment's info['{name}']") != 0
    )


def _anchor(key: str) -> str:
    """Return the key of a state; a very long one as its digest, since keys are compared text by text."""
    if len(key) <= _LONGEST_ANCHOR:
        return key
    return hashlib.blake2b(key.encode(errors="surrogatepass"), digest_size=16).hexdigest()


def view_of(number: int, observation: Any, info: Mapping[str, Any]) -> View:
    """Return what a player sees at a turn."""
    messages = observation_messages(observation, info)
    shown = " ".join(map(str, pictures_of(messages)))
    if shown and not isinstance(observation, str):
        text = "\n".join(filter(None, (shown, str(info.get("caption", "")))))
    else:
        text = observation if isinstance(observation, str) else str(observation)
    return View(number, text, messages, info)


def note_result(turn: Turn, anchor: Any, reward: Any, info: Mapping[str, Any]) -> None:
    """Write the environment's response into a turn."""
    turn.reward = finite_number(reward, "the environment's reward")
    turn.anchor = None if anchor is None else _anchor(str(anchor))
    turn.action_is_valid = _flag(info, "action_is_valid", default=True)
    turn.format_penalty = finite_number(
        info.get("format_penalty", 0.0), "the environment's info['format_penalty']"
    )
    turn.reward_parts = reward_parts(info.get("reward_parts"), "the environment's info['reward_parts']")


def reward_parts(value: Any, name: str) -> dict[str, float]:
    """Return the parts of a reward, by name; empty if they are not reported.

    Raises:
        InvalidNumberError: If it does not map names to numbers.
    """
    if value is None:
        return {}
    if not isinstance(value, Mapping) or not all(isinstance(key, str) for key in value):
        raise InvalidNumberError(f"{name} must hold numbers by names")
    return {key: finite_number(part, f"{name}['{key}']") for key, part in value.items()}
