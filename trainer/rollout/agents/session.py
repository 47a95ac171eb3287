"""An agent's session: its requests become prompts, replies are sampled and recorded, and returned as text."""

import asyncio
import base64
import hashlib
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from rollgym.clients.replies.thinking import has_thought
from rollgym.trainer.inference.base import GenerationRequest, GenerationResult, SamplingParams
from rollgym.trainer.inference.errors import StructuredOutputError
from rollgym.trainer.records.trajectory import Phase, Trajectory, Turn
from rollgym.trainer.rollout.agents.answers import AnswerListener, Choice, ChoiceStream, Completion
from rollgym.trainer.rollout.agents.calls import AgentCall, Message, RequestedSampling, last_text
from rollgym.trainer.rollout.agents.deliveries import Deliveries
from rollgym.trainer.rollout.agents.errors import ApiError
from rollgym.trainer.rollout.agents.policy_service import PolicyService
from rollgym.trainer.rollout.agents.replies import ParsedReply, has_mark, read_reply, schemas_of
from rollgym.trainer.rollout.agents.splicing import (
    AgentConversation,
    Found,
    KnownTexts,
    ReplyIndex,
    SampledReply,
    SplicedPrompt,
    TextPrompt,
)
from rollgym.trainer.rollout.agents.streaming import ReplyStream, first_stop, stopped
from rollgym.trainer.rollout.agents.structured import RequiredForm
from rollgym.trainer.rollout.log_replay import session_key
from rollgym.trainer.rollout.recorder import Recorder

_LARGE = 1 << 16
"""Bytes of a conversation from which on it is rendered in a thread: others wait for the event loop."""
_T = TypeVar("_T")
_Told = Callable[[Sequence[int]], None]


@dataclass(slots=True)
class SessionCounts:
    """Counters of a session, for the metrics.

    Attributes:
        calls: Requests that were answered.
        refused: Requests that were refused.
        abandoned: Replies whose client disconnected before it received them.
        overflows: Requests whose prompt left no room for a reply.
        rewritten: Requests that continued a conversation whose earlier turns the chat template rendered differently.
    """

    calls: int = 0
    refused: int = 0
    abandoned: int = 0
    overflows: int = 0
    rewritten: int = 0


@dataclass(slots=True)
class Posted:
    """The results that an agent posted for its episode.

    Attributes:
        reward: Reward of the whole episode, in addition to the environment's.
        turns: Rewards of single requests, by their numbers.
        success: Whether the task was solved; None if it did not say.
        faults: Requests whose reward, as posted last, is not a finite number; None stands for the episode.
    """

    reward: float | None = None
    turns: dict[int, float] = field(default_factory=dict)
    success: bool | None = None
    faults: set[int | None] = field(default_factory=set)


class AgentSession:
    """One episode of one agent. Any number of its requests may be in flight at once.

    Args:
        service: The policy service.
        trajectory: The record of the episode.
        max_calls: Requests that are answered at most; None for no limit.
        clock: Unix time.

    Attributes:
        conversations: Conversations up to and with a reply, by its identifier, for clients that name only the last one.
        counts: Counts of requests, for the metrics.
        deliveries: Its latest answers, for clients that retry because an answer was lost in transit.
        posted: The results that the agent posted.
        ended: Set once no more requests are answered.
        model_failure: The inference client's error, if there was one: the run has to raise it.
    """

    def __init__(
        self,
        service: PolicyService,
        trajectory: Trajectory,
        max_calls: int | None,
        clock: Callable[[], float],
    ) -> None:
        self.service = service
        self.trajectory = trajectory
        self.conversations: dict[str, list[Message]] = {}
        self.counts = SessionCounts()
        self.deliveries = Deliveries()
        self.posted = Posted()
        self.ended = asyncio.Event()
        self.model_failure: BaseException | None = None
        self._recorder = Recorder(trajectory)
        self._index = ReplyIndex()
        self._texts = KnownTexts(service.renderer.renderer)
        self._max_calls = max_calls
        self._clock = clock
        self._numbers = 0
        self._left = 0
        self._under_way: set[asyncio.Task[Any]] = set()
        self.turns_of: dict[int, list[Turn]] = {}

    @property
    def busy(self) -> bool:
        """Whether requests of this session are in flight."""
        return bool(self._under_way)

    def end(self) -> None:
        """Refuse further requests, and cancel those in flight."""
        self.ended.set()
        for task in self._under_way:
            task.cancel()

    async def answer(self, call: AgentCall, listener: AnswerListener | None = None) -> Completion:
        """Sample what an agent asks for, and record it.

        Args:
            call: The agent's request.
            listener: Receives the answer while it is sampled; the parts that it received add up to the answer.

        Raises:
            ApiError: If it is refused; nothing is sampled then.
        """
        self.require_open()
        if self._max_calls is not None and self._numbers - self._left >= self._max_calls:
            raise ApiError(
                403,
                f"the episode has had its {self._max_calls} turns (rollout.max_turns)",
                "max_turns_reached",
            )
        call, ignored = self.service.settled(call)
        conversation = None if call.prompts else AgentConversation.of(call.messages, call.tools)
        # Of requests that come together the first has the lower number, whichever is rendered first.
        number, self._numbers = self._numbers, self._numbers + 1
        try:
            return await self._answered(number, call, conversation, ignored, listener)
        except _UnheldError as error:
            unheld = replace(call, wishes=replace(call.wishes, structured=None))
            return await self._answered(number, unheld, conversation, (*error.spare, *ignored), listener)

    async def _answered(
        self,
        number: int,
        call: AgentCall,
        conversation: AgentConversation | None,
        ignored: tuple[str, ...],
        listener: AnswerListener | None,
    ) -> Completion:
        prompts = await self._prompts(call, conversation)
        try:
            samplings = [self.service.sampling_for(call.wishes, len(prompt.ids)) for prompt in prompts]
        except ApiError:
            self.counts.overflows += 1
            raise
        answer = self._begun(number, prompts, ignored)
        streams = self._streams(call, listener, answer)
        each = range(call.wishes.choices)
        segments = [self._recorder.place(prompt.ids) for prompt in prompts for _ in each]
        try:
            told: list[_Told | None] = [stream.add for stream in streams] or [None] * len(segments)
            drawn = [
                (prompt.ids, params) for prompt, params in zip(prompts, samplings, strict=True) for _ in each
            ]
            try:
                results = await self._owned(self._generate(number, drawn, call.wishes, told))
            except StructuredOutputError as error:
                begun = any(stream.told for stream in streams)
                raise _not_had(error, call.wishes.structured, begun=begun) from error
            self.require_open()
            _require_told(streams, results)
            choices = [
                self._record(
                    _Asked(call, conversation, prompts[index // len(each)], number, index), segment, result
                )
                for index, (segment, result) in enumerate(zip(segments, results, strict=True))
            ]
        except BaseException as error:
            self._give_up(segments, error)
            raise
        self.counts.calls += 1
        for stream, choice in zip(streams, choices, strict=False):
            stream.end(choice.sampled.reply)
        return replace(answer, choices=choices)

    async def count(self, call: AgentCall) -> int:
        """Return how many tokens the prompt of a request would have; nothing is sampled or recorded."""
        self.require_open()
        prompt, _ = await self._rendered(AgentConversation.of(call.messages, call.tools))
        return len(prompt.ids)

    async def tell_again(self, call: AgentCall, answer: Completion, listener: AnswerListener) -> Completion:
        """Send a listener an answer that is complete already."""
        call, _ = self.service.settled(call)
        for stream, choice in zip(self._streams(call, listener, answer), answer.choices, strict=True):
            stream.add(choice.sampled.token_ids)
            stream.end(choice.sampled.reply)
        return answer

    def _begun(
        self, number: int, prompts: Sequence[SplicedPrompt | TextPrompt], ignored: tuple[str, ...]
    ) -> Completion:
        first, texts = prompts[0], [each for each in prompts if isinstance(each, TextPrompt)]
        thinks = isinstance(first, SplicedPrompt) and first.thinks
        name, now = self._name(number, "answer", 24), int(self._clock())
        return Completion(number, name, now, first.ids, (), ignored, thinks, texts)

    async def _prompts(
        self, call: AgentCall, conversation: AgentConversation | None
    ) -> Sequence[SplicedPrompt | TextPrompt]:
        """Return all that the policy reads."""
        if conversation is not None:
            return [await self._prompt(conversation)]
        if sum(map(len, call.prompts)) > _LARGE:
            return await asyncio.to_thread(lambda: list(map(self._texts.prompt, call.prompts)))
        return list(map(self._texts.prompt, call.prompts))

    async def _prompt(self, conversation: AgentConversation) -> SplicedPrompt:
        """Return what the policy reads; count a template that renders the earlier prompt differently."""
        prompt, stored = await self._rendered(conversation)
        if prompt.ids[: len(stored)] != stored:
            self.counts.rewritten += 1
            self.service.renderer.renderer.template.note(
                "it writes earlier turns of agents' conversations in another way than they were sampled, which costs "
                "segments; prompt.chat_template can take one that does not"
            )
        return prompt

    async def _rendered(self, conversation: AgentConversation) -> tuple[SplicedPrompt, list[int]]:
        """Return what the policy reads, and the ids of what of it was recorded before."""
        found = self._index.found(conversation)
        stored = self._stored(found)
        if conversation.size > _LARGE:
            prompt = await asyncio.to_thread(self.service.renderer.prompt, conversation, found, stored)
        else:
            prompt = self.service.renderer.prompt(conversation, found, stored)
        return prompt, stored

    def _stored(self, found: Found) -> list[int]:
        """Return the ids of a conversation up to and with the latest reply that it repeats at its original place."""
        if found.latest is None or (place := found.replies[found.latest].place) is None:
            return []
        segment, end = place
        return self.trajectory.segments[segment].ids[:end]

    def require_open(self) -> None:
        """Check that the episode has not ended.

        Raises:
            ApiError: If it has ended.
        """
        if self.ended.is_set():
            raise ApiError(410, "the episode of this session has ended", "session_ended")

    # -- sampling

    async def _owned(self, work: Coroutine[Any, Any, _T]) -> _T:
        """Wait for work that ends with the session."""
        task = asyncio.get_running_loop().create_task(work)
        self._under_way.add(task)
        try:
            return await task
        except asyncio.CancelledError:
            task.cancel()
            # If the episode has ended, the client is answered so; else the client has disconnected.
            if self.ended.is_set() and not _is_cancelled():
                raise ApiError(410, "the episode of this session has ended", "session_ended") from None
            raise
        finally:
            self._under_way.discard(task)

    def _streams(
        self, call: AgentCall, listener: AnswerListener | None, answer: Completion
    ) -> list[ChoiceStream]:
        """Return what hands the choices to a listener; empty without a listener."""
        if listener is None:
            return []
        listener.begins(answer)
        renderer = self.service.renderer.renderer
        tool_format = self.service.tool_format if call.reads_tools else None
        # Whether a structured output follows the thinking that the prompt opened is known only at its end.
        held = answer.thinks and call.wishes.structured is not None
        return [
            ChoiceStream(
                choice,
                ReplyStream(
                    renderer.text,
                    renderer.special_ids,
                    call.wishes.stop,
                    tool_format,
                    begun=answer.thinks,
                    plain=bool(call.prompts),
                    held=held,
                ),
                listener,
            )
            for choice in range(call.wishes.choices * max(1, len(call.prompts)))
        ]

    async def _generate(
        self,
        number: int,
        drawn: Sequence[tuple[Sequence[int], SamplingParams]],
        wishes: RequestedSampling,
        told: Sequence[_Told | None],
    ) -> list[GenerationResult]:
        requests = [
            self._request(number, choice, prompt_ids, sampling, wishes, each)
            for choice, ((prompt_ids, sampling), each) in enumerate(zip(drawn, told, strict=True))
        ]
        with self.trajectory.timeline.during(Phase.GENERATE):
            return await self._drawn(requests)

    async def _drawn(self, requests: Sequence[GenerationRequest]) -> list[GenerationResult]:
        if len(requests) == 1:
            return [await self.service.client.generate(requests[0])]
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self.service.client.generate(request)) for request in requests]
        except BaseExceptionGroup as failures:
            raise failures.exceptions[0] from None
        return [task.result() for task in tasks]

    def _request(
        self,
        number: int,
        choice: int,
        prompt_ids: Sequence[int],
        sampling: SamplingParams,
        wishes: RequestedSampling,
        told: _Told | None,
    ) -> GenerationRequest:
        task, purpose = self.trajectory.task, self.service.purpose
        member, attempt = self.trajectory.member, self.trajectory.attempt
        # The streams are those of the built-in player: an agent that asks the same draws the same.
        streams: tuple[int, ...] = (task.index, member, number)
        further = (choice,) if choice else ()
        names = [purpose, "reply", *streams, attempt, *further]
        return GenerationRequest(
            request_id=f"{purpose}-{'-'.join(map(str, [*streams, attempt, *further]))}",
            prompt_ids=list(prompt_ids),
            sampling=sampling,
            seed=self.service.seed_for(wishes, choice, *names),
            order=(*streams, *further),
            session_key=session_key(purpose, task.index, member, attempt),
            on_tokens=told,
        )

    def _give_up(self, segments: Sequence[int], error: BaseException) -> None:
        for segment in reversed(segments):
            self._recorder.withdraw(segment)
        if isinstance(error, _UnheldError):
            return  # it is drawn again
        if isinstance(error, asyncio.CancelledError | ApiError):
            self.counts.abandoned += 1
            self._left += 1  # a reply that the agent did not receive is not a turn of the episode
        else:
            self.model_failure = error

    # -- recording

    def _record(self, asked: "_Asked", segment: int, result: GenerationResult) -> Choice:
        renderer, call, number, index = self.service.renderer.renderer, asked.call, asked.number, asked.index
        result, plain, marked = stopped(result, call.wishes.stop, renderer.text, renderer.marked_text)
        tool_format = self.service.tool_format if call.reads_tools else None
        text = marked if tool_format and has_mark(marked, tool_format) else plain
        reply = asked.reply(text, tool_format)
        if not call.parallel_tools:
            reply = ParsedReply(reply.content, reply.reasoning, reply.calls[:1])
        # Nine letters and digits: some templates take nothing else.
        call_ids = tuple(self._name(number, f"{index}-{each}", 9) for each in range(len(reply.calls)))
        turn_number = len(self.trajectory.turns)
        start, end = self._recorder.record(segment, result, turn_number)
        sampled = SampledReply(tuple(result.token_ids), text, reply, call_ids, (segment, end))
        turn = Turn(
            segment=segment,
            start=start,
            end=end,
            observation=asked.observation,
            reply=plain,
            finish_reason=result.finish_reason,
            structured=call.wishes.structured is not None,
        )
        self.trajectory.turns.append(turn)
        self.turns_of.setdefault(number, []).append(turn)
        if asked.conversation is not None:
            self._index.note(asked.conversation, sampled)
        elif isinstance(asked.prompt, TextPrompt):
            self._texts.note(asked.prompt, result.token_ids)
        stop = first_stop(renderer.text(result.token_ids), call.wishes.stop) if call.wishes.stop else None
        return Choice(sampled, result.logprobs, result.finish_reason, stop)

    def _name(self, number: int, what: str, length: int) -> str:
        """A unique name that is reproducible across equal runs: templates may write it into prompts."""
        episode = self.trajectory
        place = (episode.task.index, episode.member, episode.attempt, number)
        path = "/".join([self.service.purpose, *map(str, place), what])
        digest = hashlib.blake2b(path.encode(), digest_size=32).digest()
        letters = base64.b32encode(digest).decode().lower().rstrip("=")
        return letters[:length]


@dataclass(frozen=True, slots=True)
class _Asked:
    """The request behind one reply.

    Attributes:
        call: The request.
        conversation: The conversation that it sent; None if that was a text.
        prompt: The policy's prompt.
        number: Number of the request in the session.
        index: Index of this reply among the request's.
    """

    call: AgentCall
    conversation: AgentConversation | None
    prompt: SplicedPrompt | TextPrompt
    number: int
    index: int

    @property
    def observation(self) -> str:
        """Return the last messages of the prompt, for people."""
        return self.prompt.text if isinstance(self.prompt, TextPrompt) else last_text(self.call.messages)

    def reply(self, text: str, tool_format: str | None) -> ParsedReply:
        """Parse a reply into thinking, content and tool calls."""
        if isinstance(self.prompt, TextPrompt):
            return ParsedReply(text)
        begun, wanted = self.prompt.thinks, self.call.wishes.structured
        if wanted is not None and not has_thought(text):
            begun = False  # if the prompt wants thinking, the reply was constrained from its first token on
        begins = () if wanted is None else wanted.begins
        return read_reply(text, tool_format, begun=begun, schemas=schemas_of(self.call.tools), begins=begins)


class _UnheldError(Exception):
    """The engine cannot constrain a reply to the requested form, and the request allows an unconstrained one.

    Args:
        spare: Fields that are ignored in that case.
    """

    def __init__(self, spare: tuple[str, ...]) -> None:
        super().__init__(*spare)
        self.spare = spare


def _not_had(error: StructuredOutputError, wanted: RequiredForm | None, *, begun: bool) -> Exception:
    """Return the error for a request whose structured output is impossible; `begun` if part of the reply was sent."""
    if wanted is not None and wanted.spare and not begun:
        return _UnheldError(wanted.spare)
    return ApiError(400, str(error), "structured_output_refused", None if wanted is None else wanted.param)


def _require_told(streams: Sequence[ChoiceStream], results: Sequence[GenerationResult]) -> None:
    """Check that replies equal their streamed parts.

    Raises:
        ApiError: One was drawn again after its server was lost: the agent has the beginning of another one.
    """
    for stream, result in zip(streams, results, strict=False):
        if result.token_ids[: len(stream.told)] != stream.told:
            raise ApiError(502, "the reply was lost while it was sampled: ask again", "reply_lost")


def _is_cancelled() -> bool:
    task = asyncio.current_task()
    return task is not None and task.cancelling() > 0
