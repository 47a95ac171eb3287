"""Builds each turn's prompt onto the record: the stored ids plus a tail, or a new segment."""

from collections.abc import Mapping, Sequence
from typing import Any

from clients.protocol.arrays import DecodeError
from trainer.config.run import PromptSettings
from trainer.records.trajectory import Segment, Trajectory
from trainer.rollout.chat_template import Tool
from trainer.rollout.context import ContextPolicy, Exchange, Message, with_instruction
from trainer.rollout.rendering import ChatRenderer


class PromptBuilder:
    """Token-in, token-out prompts of one episode.

    Args:
        renderer: The policy's chat template.
        context: What of the episode a prompt shows.
        settings: Where the environment's instruction and its tools go.
    """

    def __init__(self, renderer: ChatRenderer, context: ContextPolicy, settings: PromptSettings) -> None:
        self.renderer = renderer
        self._context = context
        self._placement = settings.instruction
        self._shows_tools = settings.tools == "template"
        self._messages: list[Message] = []
        self._history: list[Exchange] = []
        self._instruction: str | None = None
        self._tools: Sequence[Tool] = ()

    def begin(self, info: Mapping[str, Any]) -> None:
        """Start a new episode.

        Args:
            info: What the reset told, with the `instruction` and the `tools`, if there are any.

        Raises:
            DecodeError: If they are no text and no list of declarations.
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
        self._history = []

    def extend(self, trajectory: Trajectory, observation: Sequence[Message]) -> list[int]:
        """Write the next prompt into `trajectory` and return all ids that the policy reads.

        The last segment grows where the new messages continue the old ones and the template is append-only;
        otherwise a new segment is opened and, from the second turn on, counted as a fork.
        """
        messages = with_instruction(
            self._context(self._history, observation), self._instruction, self._placement
        )
        new = self._continuation(messages)
        if new is not None:
            segment = trajectory.segments[-1]
            segment.append_context(self.renderer.tail(new, segment.ids[-1]))
        else:
            if trajectory.segments:
                trajectory.forks += 1
            segment = Segment()
            segment.append_context(self.renderer.prompt(messages, self._tools))
            trajectory.segments.append(segment)
        self._messages = messages
        return segment.ids

    def replied(self, observation: Sequence[Message], reply: str) -> None:
        """Note what the policy said, for the turns to come."""
        self._history.append(Exchange(tuple(observation), reply))

    def _continuation(self, messages: list[Message]) -> list[Message] | None:
        """The messages after the last reply, if `messages` are the last prompt, that reply, and more."""
        seen = len(self._messages)
        if not self._history or len(messages) <= seen + 1 or messages[seen + 1]["role"] == "assistant":
            return None
        reply = {"role": "assistant", "content": self._history[-1].reply}
        if messages[:seen] != self._messages or messages[seen] != reply:
            return None
        if not self.renderer.append_only:
            self.renderer.template.note("it rewrites earlier turns, so every turn is a segment of its own")
            return None
        return messages[seen + 1 :]
