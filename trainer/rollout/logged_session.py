"""An environment's session that records its answers in the rollout log, and replays those that the log has."""

from collections.abc import Mapping
from typing import Any

from gymnasium import Space

from rollgym.clients.client.operation import ResetResult, StepResult
from rollgym.clients.client.session import EnvSession
from rollgym.clients.protocol.episode import PortableEpisode, step_digest
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import EnvInfo
from rollgym.clients.protocol.values import decode_value, encode_value
from rollgym.trainer.rollout.recall import RESET, STEP, EpisodeTape


class EpisodeLostError(Exception):
    """The environment of an episode cannot be brought to the end of the log."""


class LoggedSession:
    """A session that logs each answer before it returns it, and replays the answers that the log has.

    Args:
        session: The underlying session.
        tape: The episode.

    Attributes:
        episode: Index of the episode in the session that the log has, or in the underlying one.
        step_index: Steps taken in the episode, from the log and since.
        seed: Seed of the episode.
        lost: The error that made the episode impossible to resume; None if there was none.
    """

    def __init__(self, session: EnvSession, tape: EpisodeTape) -> None:
        self._session = session
        self._tape = tape
        self._is_there = True
        self._note_place()
        self.lost: EpisodeLostError | None = None

    @property
    def session_id(self) -> str:
        """The server's id of the session; see `Session`."""
        return self._session.session_id

    @property
    def env(self) -> EnvInfo:
        """The server's description of the environment; see `Session`."""
        return self._session.env

    @property
    def env_id(self) -> str:
        """The environment's id; see `Session`."""
        return self._session.env_id

    @property
    def kwargs(self) -> Mapping[str, Any]:
        """The environment's arguments; see `Session`."""
        return self._session.kwargs

    @property
    def action_space(self) -> Space[Any]:
        """The environment's action space; see `Session`."""
        return self._session.action_space

    @property
    def observation_space(self) -> Space[Any]:
        """The environment's observation space; see `Session`."""
        return self._session.observation_space

    async def render(self, mode: str | None = None) -> Any:
        """Render the environment's state; see `EnvSession.render`."""
        await self._catch_up()
        return await self._session.render(mode)

    async def fork(self, count: int = 1, reseed: int | None = None) -> list[EnvSession]:
        """Make independent copies at this point; see `EnvSession.fork`. Their answers are not logged."""
        await self._catch_up()
        return await self._session.fork(count, reseed)

    async def episode_record(self) -> PortableEpisode:
        """Return the portable episode; see `EnvSession.episode_record`."""
        await self._catch_up()
        return await self._session.episode_record()

    async def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        """Begin an episode; see `EnvSession.reset`.

        Raises:
            EpisodeLostError: If the log ends here, and the session cannot be brought here.
        """
        asked = [seed, encode_value(None, options, binary=False)]
        recalled = self._tape.answer(RESET, asked)
        if recalled is not None:
            self._is_there = False
            _, (_, _, self.episode, self.seed, _), observation, info = recalled.fields
            self.step_index = 0
            await self._catch_up_at_the_end()
            return ResetResult(self._observation(observation), decode_value(None, info))
        result = await self._session.reset(seed, options)
        self._is_there = True
        session = self._session
        self._note_place()
        place = [session.session_id, session.process, session.episode, session.seed, session.env.version]
        self._tape.answered(RESET, asked, place, self._neutral(result.observation), _packed(result.info))
        return result

    async def step(
        self, action: Any, *, autoreset: bool = False, timeout_s: float | None = None
    ) -> StepResult:
        """Take one action; see `EnvSession.step`.

        Raises:
            EpisodeLostError: If the session cannot be brought to the end of the log.
        """
        given = {"autoreset": autoreset, "timeout_s": timeout_s}
        options = {name: value for name, value in given.items() if value}  # as earlier releases wrote it
        asked = [encode_value(self._session.action_space, action, binary=False), options]
        recalled = self._tape.answer(STEP, asked)
        if recalled is not None:
            self._is_there = False
            _, observation, reward, terminated, truncated, info = recalled.fields
            self.step_index += 1
            if not (terminated or truncated):
                await self._catch_up_at_the_end()
            return StepResult(
                self._observation(observation), reward, terminated, truncated, decode_value(None, info)
            )
        await self._catch_up()
        result = await self._session.step(action, autoreset=autoreset, timeout_s=timeout_s)
        self._note_place()
        self._tape.answered(
            STEP,
            asked,
            self._neutral(result.observation),
            result.reward,
            result.terminated,
            result.truncated,
            _packed(result.info),
        )
        return result

    def _note_place(self) -> None:
        session = self._session
        self.episode, self.step_index, self.seed = session.episode, session.step_index, session.seed

    async def _catch_up_at_the_end(self) -> None:
        """Bring the session to the end of the log before sampling, which would be in vain if that failed."""
        if not self._tape.goes_on:
            await self._catch_up()

    async def _catch_up(self) -> None:
        """Bring the session to the episode's present state, if its answers came from the log.

        Raises:
            EpisodeLostError: If that cannot be done.
        """
        if self._is_there:
            return
        answers = self._tape.answers
        begin = max(index for index, entry in enumerate(answers) if entry.kind == RESET)
        reset, steps = answers[begin], answers[begin + 1 :]
        asked, place, observation, _ = reset.fields
        (_, options), (session_id, process, episode, seed, version) = asked, place
        portable = PortableEpisode(
            env_id=self._session.env_id,
            env_version=version,
            kwargs=encode_value(None, self._session.kwargs, binary=False),
            episode=episode,
            seed=seed,
            options=options,
            reset_digest=step_digest(observation, 0.0, False, False),
            actions=[entry.fields[0][0] for entry in steps],
            digests=[step_digest(*entry.fields[1:5]) for entry in steps],
        )
        try:
            await self._session.resume(portable, (session_id, process))
        except ProblemError as problem:
            self.lost = EpisodeLostError(str(problem))
            raise self.lost from problem
        self._is_there = True

    def _observation(self, wire: Any) -> Any:
        return decode_value(self._session.observation_space, wire)

    def _neutral(self, observation: Any) -> Any:
        return encode_value(self._session.observation_space, observation, binary=False)


def _packed(info: Any) -> Any:
    return encode_value(None, info, binary=True)
