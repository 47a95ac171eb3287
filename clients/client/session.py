"""A session: one environment on a server, and the client's own record of its episode.

The record is enough to rebuild the session on another server.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from rollgym.clients.client.answers import member, reading, reward_of
from rollgym.clients.client.opener import UNANSWERED
from rollgym.clients.client.operation import Operation, ResetResult, StepResult, wait_for_all, wire_seed
from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.episode import PortableEpisode, step_digest
from rollgym.clients.protocol.errors import GONE, ProblemError
from rollgym.clients.protocol.messages import EnvInfo
from rollgym.clients.protocol.spaces import parse_space
from rollgym.clients.protocol.values import decode_value, encode_value

if TYPE_CHECKING:
    from rollgym.clients.client.client import EnvClient
    from rollgym.clients.net.caller import ServerCalls


class EpisodeRecord:
    """Seed, options, actions and digests of the episode that a session is in.

    Args:
        env_id: The environment.
        env_version: The version that the server named.
        kwargs: The kwargs of the session, in JSON's encoding.
    """

    __slots__ = (
        "_actions",
        "_digests",
        "env_id",
        "env_version",
        "episode",
        "kwargs",
        "options",
        "reseeds",
        "reset_digest",
        "seed",
    )

    def __init__(self, env_id: str, env_version: str, kwargs: dict[str, Any]) -> None:
        self.env_id = env_id
        self.env_version = env_version
        self.kwargs = kwargs
        self.episode = 0
        self.seed: int | None = None
        self.options: dict[str, Any] | None = None
        self.reset_digest: str | None = None
        self.reseeds: list[tuple[int, int]] = []
        self._actions: list[Any] = []
        self._digests: list[str] = []

    @property
    def steps(self) -> int:
        """Steps taken in the episode."""
        return len(self._actions)

    def begin(self, episode: int, seed: int, options: dict[str, Any] | None, observation: Any) -> None:
        """Start a new record at a reset; `options` and `observation` are in JSON's encoding."""
        self.episode, self.seed, self.options = episode, seed, options
        self.reset_digest = step_digest(observation, 0.0, False, False)
        self._actions, self._digests, self.reseeds = [], [], []

    def add(self, action: Any, observation: Any, reward: float, terminated: bool, truncated: bool) -> None:
        """Add a step; `action` and `observation` are in JSON's encoding."""
        self._actions.append(action)
        self._digests.append(step_digest(observation, reward, terminated, truncated))

    def take(self, episode: PortableEpisode) -> None:
        """Continue from a portable episode."""
        self.episode, self.seed, self.options = episode.episode, episode.seed, episode.options
        self.reset_digest = episode.reset_digest
        self._actions, self._digests = list(episode.actions), list(episode.digests)
        self.reseeds = list(episode.reseeds)

    def portable(self) -> PortableEpisode:
        """Return the episode so far."""
        return PortableEpisode(
            env_id=self.env_id,
            env_version=self.env_version,
            kwargs=self.kwargs,
            episode=self.episode,
            seed=self.seed,
            options=self.options,
            reset_digest=self.reset_digest,
            actions=list(self._actions),
            digests=list(self._digests),
            reseeds=list(self.reseeds),
        )


_FINAL_REASONS = frozenset({"closed", "replay_diverged"})
"""A client closed the session, or it cannot be rebuilt: the client does not recover from either."""


class EnvSession:
    """One environment on a server; made by `EnvClient.make`.

    Each step names its episode and index, so sending it again after a broken connection is safe. When the server
    has lost the session (it was restarted, say), or has it at an earlier step than it has answered, and the environment
    is deterministic, the session is rebuilt from the seed and the actions so far, and the digests prove that it is the
    same; the caller sees a slower step.

    Attributes:
        session_id: The server's id; another one after a rebuild.
        env_id: The environment's id.
        kwargs: The kwargs that it was made with.
        action_space: The environment's.
        observation_space: The environment's.
        episode: Index of the episode in the session; -1 before the first reset.
        step_index: Steps taken in the episode.
        seed: Seed of the episode.
        process: Index of the I/O process that owns it.
        env: The server's description of the environment.
    """

    def __init__(
        self,
        client: EnvClient,
        caller: ServerCalls,
        env: EnvInfo,
        kwargs: Mapping[str, Any],
        payload: Mapping[str, Any],
        process: int,
    ) -> None:
        self._client = client
        self._opener = client.opener
        self._caller = caller
        self.env = env
        self._binary = caller.binary
        self._rebuilding = asyncio.Lock()
        self._closed = False
        self.env_id = env.env_id
        self.kwargs = dict(kwargs)
        self._spaces_on_wire = payload["action_space"], payload["observation_space"]
        self.action_space, self.observation_space = map(parse_space, self._spaces_on_wire)
        self.episode = -1
        self.step_index = 0
        self.seed: int | None = None
        # Episode and step of an answer that the server could not send.
        self._unsent: tuple[int, int] | None = None
        self._record = EpisodeRecord(env.env_id, env.version, encode_value(None, self.kwargs, binary=False))
        self.session_id = member(payload, "session_id", str)
        self.process = process

    def __repr__(self) -> str:
        return f"<EnvSession {self.env_id} {self.session_id} episode {self.episode} step {self.step_index}>"

    @property
    def closed(self) -> bool:
        """Whether the session was closed by this client."""
        return self._closed

    # -- the episode

    async def reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> ResetResult:
        """Begin an episode.

        Args:
            seed: Its seed; the server draws one if it is None, and the attribute `seed` holds it.
            options: Options of the environment.

        Raises:
            ValueError: The seed is negative, or not below 2**53.
            ProblemError: The server or the environment refuses.
            ConnectionError: The server cannot be reached.
            TimeoutError: The server does not answer.
        """
        operation = self.plan_reset(seed, options)
        reply = await self.call(operation.fields)
        with reading("reset"):
            result: ResetResult = operation.take(reply.payload, reply.plain)
        return result

    async def step(
        self, action: Any, *, autoreset: bool = False, timeout_s: float | None = None
    ) -> StepResult:
        """Take one action.

        Args:
            action: A value of the action space.
            autoreset: Begin the next episode in the same call when this step ends this one. Observation and info
                are then the new episode's, with the old one's under `final_obs` and `final_info`, as in Gymnasium's
                `AutoresetMode.SAME_STEP`.
            timeout_s: How long the environment may take; the server's setting if None.

        Raises:
            ProblemError: The server or the environment refuses; `invalid_action` leaves the episode unharmed.
            ConnectionError: The server cannot be reached.
            TimeoutError: The server does not answer. The same step may be taken again.
        """
        operation = self.plan_step(action, autoreset=autoreset, timeout_s=timeout_s)
        reply = await self.call(operation.fields)
        with reading("step"):
            result: StepResult = operation.take(reply.payload, reply.plain)
        return result

    async def render(self, mode: str | None = None) -> Any:
        """Draw the state: text, or an array of pixels, depending on the mode."""
        reply = await self.call({"op": "render"} if mode is None else {"op": "render", "mode": mode})
        with reading("render"):
            frame = reply.payload["frame"]
            return frame if reply.plain else decode_value(None, frame)

    async def episode_record(self) -> PortableEpisode:
        """Return the portable episode, which `EnvClient.restore` takes on any server."""
        reply = await self.call({"op": "episode"})
        with reading("episode"):
            return PortableEpisode.model_validate(reply.payload)

    async def fork(self, count: int = 1, reseed: int | None = None) -> list[EnvSession]:
        """Make independent copies at this point, random state included.

        Args:
            count: How many.
            reseed: Let the copies' chances differ from here on.

        Raises:
            ProblemError: `fork_unsupported`, among others.
        """
        fields: dict[str, Any] = {"op": "fork", "count": count, "request_id": self._caller.new_request_id()}
        if reseed is not None:
            fields["reseed"] = wire_seed(reseed)
        try:
            reply = await self.call(fields)
        except UNANSWERED:
            self._opener.take_back(fields, self.process)
            raise
        try:
            with reading("fork"):
                session_ids = member(reply.payload, "session_ids", list)
            copies = await wait_for_all(self._copy(each, reply.process) for each in session_ids)
        except BaseException:
            self._opener.take_back(fields, self.process)
            raise
        for copy in copies:
            self._client.track(copy)
        return copies

    async def resume(self, episode: PortableEpisode, former: tuple[str, int] | None = None) -> None:
        """Continue an episode in this session, in place of its present one.

        Args:
            episode: The episode to continue; of the same environment, made with the same kwargs.
            former: Id and process of the session that played it. If that session still exists, at this point or one
                step further (whose answer was lost), it is taken over; a non-deterministic environment can only
                continue that way.

        Raises:
            ProblemError: `session_gone` among others: the episode cannot be continued. The session is then as new.
        """
        deadline = self._caller.deadline()
        await self._opener.close_replaced(self.session_id, deadline)
        try:
            if former is not None and await self._opener.is_at(former, self.env_id, episode, deadline):
                self.session_id, self.process = former
            elif self.env.deterministic:
                self._record.take(episode)
                self.session_id, self.process = await self._restore(deadline)
                episode = self._record.portable()
            else:
                raise ProblemError(
                    "session_gone",
                    "its environment is not deterministic, and the session is gone",
                    reason="lost",
                )
        except (ProblemError, DecodeError):
            self._record.seed = None
            self.session_id, self.process = await self._client.remake(self.env.env_id, self.kwargs, deadline)
            self.episode, self.step_index, self.seed = -1, 0, None
            raise
        self.adopt(episode)

    async def cancel(self) -> None:
        """Give up the operation that runs now; the session can be reset or closed then."""
        await self.call({"op": "cancel"})

    async def close(self) -> None:
        """Close the session; closing it again does nothing."""
        if not self._closed:
            await self._client.close_sessions([self])

    # -- operations for one frame of many

    def plan_reset(self, seed: int | None = None, options: Mapping[str, Any] | None = None) -> Operation:
        """Return a reset for `EnvClient.run_many`; see `reset`."""
        fields: dict[str, Any] = {"op": "reset", "request_id": self._caller.new_request_id()}
        if seed is not None:
            fields["seed"] = wire_seed(seed)
        if options is not None:
            fields["options"] = encode_value(None, options, binary=self._binary)
        neutral = None if options is None else encode_value(None, options, binary=False)
        return Operation(self, fields, lambda payload, plain: self._take_reset(neutral, payload, plain))

    def plan_step(
        self,
        action: Any,
        *,
        autoreset: bool = False,
        next_seed: int | None = None,
        timeout_s: float | None = None,
    ) -> Operation:
        """Return a step for `EnvClient.run_many`; see `step`.

        Args:
            action: A value of the action space.
            autoreset: Begin the next episode when this step ends this one.
            next_seed: The next episode's seed; the server draws one if None.
            timeout_s: How long the environment may take.
        """
        wire = encode_value(self.action_space, action, binary=self._binary)
        fields = {"op": "step", "action": wire, "episode": self.episode, "step": self.step_index}
        if self.episode < 0:
            del fields["episode"], fields["step"]  # the server answers `not_reset`
        if autoreset:
            fields["autoreset"] = True
            if next_seed is not None:
                fields["reset"] = {"seed": wire_seed(next_seed)}
        if timeout_s is not None:
            fields["timeout_s"] = timeout_s
        neutral = wire
        if self._binary and type(wire) is not str and type(wire) is not int:
            neutral = encode_value(self.action_space, action, binary=False)
        return Operation(self, fields, lambda payload, plain: self._take_step(neutral, payload, plain))

    async def call(self, fields: dict[str, Any], deadline: float | None = None) -> Any:
        """Send an operation on this session; rebuild the session as needed.

        Args:
            fields: The frame, without the ids.
            deadline: When to give up, on the loop's clock; by the client's time-out if None.
        """
        if deadline is None:
            deadline = self._caller.deadline(fields.get("timeout_s"))
        was_behind = False
        while True:
            fields["session_id"] = session_id = self.session_id
            try:
                return await self._caller.call(fields, self.process, deadline)
            except ProblemError as problem:
                if (broken := self.broken_off(problem, fields)) is not None:
                    raise broken from problem
                is_behind = problem.code == "step_mismatch"
                # A server that says it again of a session that it has just restored is not to be believed.
                if not self.can_rebuild(problem, fields) or (is_behind and was_behind):
                    raise
                was_behind = is_behind
                await self._rebuild(session_id, fields["op"], deadline)
                if is_behind:
                    await self._opener.close_replaced(session_id, deadline)
            if "episode" in fields:
                fields["episode"] = self.episode

    def broken_off(self, problem: ProblemError, fields: Mapping[str, Any]) -> ProblemError | None:
        """Return the problem of a step that an earlier step blocks, because its answer was too large to be sent.

        The earlier step was taken: the server is one step ahead of this client, and answers only the same action (with
        the same problem).

        Args:
            problem: The problem that answered the operation.
            fields: The operation.
        """
        place = (self.episode, self.step_index) if fields["op"] == "step" else None
        if problem.code == "too_large" and problem.extra.get("part") == "reply":
            self._unsent = place
        if problem.code != "step_mismatch" or place is None or place != self._unsent:
            return None
        return ProblemError(
            "not_reset",
            f"the episode broke off: the answer to step {self.step_index} of it was too large to be sent; reset the "
            "session",
        )

    def can_rebuild(self, problem: ProblemError, fields: Mapping[str, Any]) -> bool:
        """Whether a problem says that the session is lost or went back, and the operation can run in a rebuilt one.

        Args:
            problem: The problem that answered the operation.
            fields: The operation.
        """
        if self._closed:
            return False
        if problem.code == "step_mismatch":
            return self.env.deterministic and self._is_elsewhere(problem, fields)
        if problem.code not in GONE or problem.extra.get("reason") in _FINAL_REASONS:
            return False
        # A reset needs no past state, so it can run in a new session of any environment.
        op = fields["op"]
        return op == "reset" or (op not in ("cancel", "close") and self.env.deterministic)

    def mark_closed(self) -> None:
        """Note that the session is closed; used by `EnvClient.close_sessions`."""
        self._closed = True

    # -- inside

    def _take_reset(self, options: Any, payload: Mapping[str, Any], plain: bool) -> ResetResult:
        observation, neutral = self._read_observation(payload["observation"])
        episode, seed, info = (
            member(payload, "episode", int),
            member(payload, "seed", int),
            member(payload, "info", dict),
        )
        self.episode, self.step_index, self.seed = episode, 0, seed
        if self.env.deterministic:
            self._record.begin(episode, seed, options, neutral)
        return ResetResult(observation, info if plain else decode_value(None, info))

    def _take_step(self, action: Any, payload: Mapping[str, Any], plain: bool) -> StepResult:
        observation, neutral = self._read_observation(payload["observation"])
        reward, terminated, truncated = (
            reward_of(payload),
            member(payload, "terminated", bool),
            member(payload, "truncated", bool),
        )
        info = member(payload, "info", dict)
        self.step_index = member(payload, "step", int)
        if self.env.deterministic:
            self._record.add(action, neutral, reward, terminated, truncated)
        if not plain:
            info = decode_value(None, info)
        reset = payload.get("reset")
        if reset is not None:
            final = {"final_obs": observation, "final_info": info}
            observation, info = self._take_reset(None, reset, plain)
            info = info | final
        return StepResult(observation, reward, terminated, truncated, info)

    def _read_observation(self, wire: Any) -> tuple[Any, Any]:
        """Return an observation, and its form in JSON's encoding for the digest."""
        observation = decode_value(self.observation_space, wire)
        if type(wire) is str or type(wire) is int:
            return observation, wire
        return observation, encode_value(self.observation_space, observation, binary=False)

    async def _rebuild(self, lost_id: str, op: str, deadline: float) -> None:
        """Replace the lost session by one at the same point."""
        async with self._rebuilding:
            if self.session_id != lost_id:
                return  # another operation of this session has done it
            if self._record.seed is None or op == "reset":
                session_id, process = await self._client.remake(self.env.env_id, self.kwargs, deadline)
            else:
                session_id, process = await self._restore(deadline)
            self.session_id, self.process = session_id, process

    def _is_elsewhere(self, problem: ProblemError, fields: Mapping[str, Any]) -> bool:
        """Whether the server's session is behind its own answers, or ahead by an answer that was lost."""
        episode, step = problem.extra.get("episode"), problem.extra.get("step")
        if type(step) is not int or type(episode) not in (int, type(None)) or "step" not in fields:
            return False
        place = (-1 if episode is None else episode, step)
        # A server that rebuilt the session does not know the step any more that began the episode it is in.
        is_past = bool(fields.get("autoreset")) and place == (self.episode + 1, 0)
        return place < (self.episode, self.step_index) or is_past

    async def _restore(self, deadline: float) -> tuple[str, int]:
        try:
            session_id, process, theirs = await self._opener.rebuild(self._record.portable(), deadline)
        except ProblemError as problem:
            if problem.code != "too_large":
                raise
            detail = (
                f"the session is gone, and its episode is longer than the server restores: {problem.detail}"
            )
            raise ProblemError("session_gone", detail, reason="lost") from problem
        self.episode = self._record.episode = theirs.episode
        return session_id, process

    async def _copy(self, session_id: str, process: int) -> EnvSession:
        """Return a session object for a fork of this session."""
        payload = {
            "session_id": session_id,
            "action_space": self._spaces_on_wire[0],
            "observation_space": self._spaces_on_wire[1],
        }
        copy = EnvSession(self._client, self._caller, self.env, self.kwargs, payload, process)
        copy.adopt(await copy.episode_record())
        return copy

    def adopt(self, episode: PortableEpisode) -> None:
        """Take over the record of a portable episode whose point this session has already reached."""
        self._record.take(episode)
        self.episode = episode.episode if episode.seed is not None else -1
        self.step_index, self.seed = len(episode.actions), episode.seed
