"""Answers to agents' requests, complete or streamed."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

from rollgym.trainer.rollout.agents.replies import ParsedReply
from rollgym.trainer.rollout.agents.splicing import SampledReply, TextPrompt
from rollgym.trainer.rollout.agents.streaming import Delta, ReplyStream


@dataclass(frozen=True, slots=True)
class Choice:
    """One reply to a request.

    Attributes:
        sampled: The sampled tokens, and the part that the agent receives.
        logprobs: Log-probability of each token.
        finish_reason: As the engine says it: "stop" or "length".
        stop: The text that ended it, of those that the agent had named; None for none.
    """

    sampled: SampledReply
    logprobs: Sequence[float]
    finish_reason: str
    stop: str | None = None


@dataclass(frozen=True, slots=True)
class Completion:
    """The answer to a request.

    Attributes:
        number: Number of the request in its session.
        identifier: Unique in the session, and equal between equal runs.
        created: Unix time in seconds.
        prompt_ids: The policy's prompt; the first of several prompts.
        choices: The replies, those to one prompt after the other.
        ignored: Sampling parameters that were ignored.
        thinks: Whether the prompt ends with the opening of thinking.
        prompts: The prompts, if they are texts without a chat template.
    """

    number: int
    identifier: str
    created: int
    prompt_ids: Sequence[int]
    choices: Sequence[Choice]
    ignored: tuple[str, ...]
    thinks: bool = False
    prompts: Sequence[TextPrompt] = ()

    @property
    def prompt_tokens(self) -> int:
        """Number of tokens in the prompts."""
        return sum(len(prompt.ids) for prompt in self.prompts) if self.prompts else len(self.prompt_ids)

    @property
    def completion_tokens(self) -> int:
        """Number of tokens sampled over all choices."""
        return sum(len(choice.sampled.token_ids) for choice in self.choices)


class AnswerListener(Protocol):
    """Receives an answer while it is sampled."""

    def begins(self, answer: Completion) -> None:
        """Its prompt is there, and none of its choices."""
        ...

    def says(self, choice: int, deltas: Sequence[Delta]) -> None:
        """Notify the listener that more of a choice can be sent."""
        ...


@dataclass(frozen=True, slots=True)
class ChoiceStream:
    """Streams one choice of an answer to a listener.

    Attributes:
        choice: Its number.
        stream: Takes it apart.
        listener: Receives the parts.
        told: Ids that were sent, or that wait for later ids.
    """

    choice: int
    stream: ReplyStream
    listener: AnswerListener
    told: list[int] = field(default_factory=list)

    def add(self, ids: Sequence[int]) -> None:
        """Receive the ids of newly sampled tokens."""
        self.told.extend(ids)
        if deltas := self.stream.add(ids):
            self.listener.says(self.choice, deltas)

    def end(self, reply: ParsedReply) -> None:
        """Hand over what is left of it."""
        self.listener.says(self.choice, self.stream.end(reply))
