"""Builds each turn's prompt: the stored ids plus a tail, or a conversation rendered from scratch."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.trainer.config.rollout import PromptSettings
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.rollout.chat_template import Tool
from rollgym.trainer.rollout.context import (
    Compaction,
    ContextPolicy,
    Exchange,
    Message,
    compaction,
    context_policy,
    example_messages,
    with_examples,
    with_instruction,
)
from rollgym.trainer.rollout.rendering import ChatRenderer, Prompt


class PromptBuilder:
    """Token-in, token-out prompts of one episode.

    Args:
        renderer: The policy's chat template, and what reads pictures.
        context: Selects the parts of the episode that a prompt shows.
        settings: Places of the environment's instruction and tools, and whether the policy summarises its history.
        examples: Worked turns that every prompt shows before the episode.

    Attributes:
        renderer: The policy's chat template, and what reads pictures.
        compaction: When and how the policy is asked for a summary; None if it never is.
    """

    def __init__(
        self,
        renderer: ChatRenderer,
        context: ContextPolicy,
        settings: PromptSettings,
        examples: Sequence[Message] = (),
    ) -> None:
        self.renderer = renderer
        self.compaction = compaction(settings)
        self._context = context
        self._examples = examples
        self._placement = settings.instruction
        self._shows_tools = settings.tools == "template"
        self._messages: list[Message] = []
        self._threads: dict[int, _Thread] = {}
        self._history: list[Exchange] = []
        self._opening: list[Message] = []
        self._first: tuple[Message, ...] = ()
        self._instruction: str | None = None
        self._tools: Sequence[Tool] = ()

    def begin(self, info: Mapping[str, Any]) -> None:
        """Start a new episode.

        Args:
            info: The `info` of the reset, with the `instruction` and the `tools`, if any.

        Raises:
            DecodeError: If they are not a text and a list of declarations.
        """
        self._instruction = info.get("instruction")
        if not isinstance(self._instruction, str | None):
            raise DecodeError("the environment's info['instruction'] must be text")
        self._tools = (info.get("tools") or ()) if self._shows_tools else ()
        if not isinstance(self._tools, list | tuple) or not all(
            isinstance(each, Mapping) for each in self._tools
        ):
            raise DecodeError("the environment's info['tools'] must be a list of declarations")
        self._messages = []
        self._threads = {}
        self._history = []
        self._opening = []
        self._first = ()

    def prompt(self, trajectory: Trajectory, observation: Sequence[Message]) -> Prompt:
        """Return all ids that the policy reads at this turn, and the pictures among them.

        They are the ids of a segment and a tail if the new messages continue those that the segment stands for, and
        the template only appends; else the whole conversation is rendered.
        """
        shown = [*self._opening, *self._context(self._history, observation)]
        messages = with_instruction(with_examples(shown, self._examples), self._instruction, self._placement)
        self._messages = messages
        thread = self._continued(messages)
        if thread is None:
            return self.renderer.read(messages, self._tools)
        segment = trajectory.segments[thread.segment]
        tail = self.renderer.read_tail(messages[len(thread.messages) :], segment.ids[-1])
        if not (segment.images or tail.images):
            return Prompt(segment.ids + tail.ids)
        images = (*segment.images, *(image.moved(len(segment.ids)) for image in tail.images))
        return Prompt(segment.ids + tail.ids, images)

    def replied(self, observation: Sequence[Message], reply: str, segment: int) -> None:
        """Note what the policy said to the last prompt, and the segment that holds the two."""
        self._first = self._first or tuple(observation)
        self._history.append(Exchange(tuple(observation), reply))
        self._threads[segment] = _Thread(segment, [*self._messages, {"role": "assistant", "content": reply}])

    def is_too_long(self, prompt: Prompt) -> bool:
        """Whether the policy is to sum up its history before it reads this prompt; it needs one to do so."""
        return self.compaction is not None and bool(self._history) and len(prompt.ids) > self.compaction.above

    def summary_prompt(self, trajectory: Trajectory, request: str) -> Prompt:
        """Return the prompt of a summary: all up to the last reply, and the request."""
        return self.prompt(trajectory, [{"role": "user", "content": request}])

    def summarised(self, compaction: Compaction, summary: str) -> None:
        """Replace the history by a summary; the next prompt is rendered from scratch."""
        self._opening = compaction.opening(self._first, summary)
        self._history = []
        self._threads = {}

    def _continued(self, messages: list[Message]) -> "_Thread | None":
        """The longest conversation so far that `messages` are, and more; the newest of several."""
        longest = None
        for thread in self._threads.values():
            seen = len(thread.messages)
            if len(messages) <= seen or messages[seen]["role"] == "assistant":
                continue
            if (longest is None or seen >= len(longest.messages)) and messages[:seen] == thread.messages:
                longest = thread
        if longest is not None and not self.renderer.append_only:
            self.renderer.template.note("it rewrites earlier turns, so a turn may be a segment of its own")
            return None
        return longest


@dataclass(frozen=True, slots=True)
class _Thread:
    """A conversation whose ids a segment holds, the last reply included."""

    segment: int
    messages: list[Message]


def prompt_maker(renderer: ChatRenderer, settings: PromptSettings) -> Callable[[], PromptBuilder]:
    """Return what makes the prompts of one episode after the other, as settings say.

    Raises:
        ConfigError: If what they name cannot be read or imported.
    """
    context, examples = context_policy(settings), example_messages(settings)
    return lambda: PromptBuilder(renderer, context, settings, examples)
