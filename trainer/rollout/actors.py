"""Players of episodes: the policy, a random or a blind player, an expert, a recording, a person."""

import asyncio
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np

from rollgym.clients.process.terminal import wrapped
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.seeding import derive_seed
from rollgym.trainer.inference.base import GenerationRequest, InferenceClient, SamplingParams
from rollgym.trainer.records.trajectory import Phase, PrefixBreak, Trajectory, Turn
from rollgym.trainer.rollout.context import Compaction, Message
from rollgym.trainer.rollout.log_replay import session_key
from rollgym.trainer.rollout.prompts import Prompt, PromptBuilder
from rollgym.trainer.rollout.recorder import Recorder


@dataclass(frozen=True, slots=True)
class View:
    """A player's view at a turn.

    Attributes:
        turn: Number of the turn, from 0.
        text: The observation as text.
        messages: The observation as messages.
        info: The environment's `info`.
    """

    turn: int
    text: str
    messages: tuple[Message, ...]
    info: Mapping[str, Any]


class ContextOverflowError(Exception):
    """The next prompt leaves no room for a reply."""


class Actor(Protocol):
    """Plays one episode, turn by turn."""

    def begin(self, info: Mapping[str, Any]) -> None:
        """Reset the actor for a new episode, whose reset returned `info`."""
        ...

    async def act(self, trajectory: Trajectory, view: View) -> Turn:
        """Return the reply of this turn; a policy also writes its tokens into `trajectory`."""
        ...

    def cut_off(self, trajectory: Trajectory, see: Callable[[], View]) -> None:
        """Note that the episode is cut off before its end: the view that `see` returns gets no reply."""
        ...


class ModelActor:
    """The policy: prompts token in, replies token out.

    Args:
        client: The inference client.
        prompts: This episode's prompt builder.
        sampling: Sampling parameters of replies; the stop tokens are those of the chat template.
        max_length: Longest row in tokens.
        seed: The run's seed; every reply draws from a stream of its own below it.
        purpose: Name of the family of streams, such as "train" or "evaluate".
        groups_per_step: Tasks per training step; replies to an earlier step's tasks have priority.
        keeps_next_prompt: Whether the prompt that an episode was cut off at is kept, for a critic.
    """

    def __init__(
        self,
        client: InferenceClient,
        prompts: PromptBuilder,
        sampling: SamplingParams,
        max_length: int,
        seed: int,
        purpose: str,
        groups_per_step: int = 1,
        *,
        keeps_next_prompt: bool = False,
    ) -> None:
        self._client = client
        self._prompts = prompts
        self._sampling = sampling
        self._max_length = max_length
        self._seed = seed
        self._purpose = purpose
        self._groups_per_step = groups_per_step
        self._keeps_next_prompt = keeps_next_prompt
        self._recorder: Recorder | None = None

    def begin(self, info: Mapping[str, Any]) -> None:
        """Start the prompts of a new episode."""
        self._recorder = None
        self._prompts.begin(info)

    async def act(self, trajectory: Trajectory, view: View) -> Turn:
        """Sample a reply and write it into the record; if a summary is due, it comes first, as its own turn.

        Raises:
            ContextOverflowError: If the prompt leaves no room for it.
            RecordError: If the engine's answer does not fit together.
            InvalidNumberError: If its log-probabilities are invalid.
        """
        prompt, prefix_break = self._prompts.prompt(trajectory, view.messages), None
        if self._prompts.compaction is not None and self._prompts.is_too_long(prompt):
            await self._sum_up(trajectory, view.turn, self._prompts.compaction)
            prompt, prefix_break = self._prompts.prompt(trajectory, view.messages), PrefixBreak.SUMMARY
        self._check_room(f"the prompt of turn {view.turn}", prompt, "reply", self._sampling)
        turn = await self._reply(trajectory, prompt, self._sampling, view, prefix_break)
        self._prompts.replied(view.messages, turn.reply, turn.segment)
        return turn

    def cut_off(self, trajectory: Trajectory, see: Callable[[], View]) -> None:
        """Keep the prompt that would have come next, if it is text and fits into a row."""
        if not self._keeps_next_prompt:
            return
        prompt = self._prompts.prompt(trajectory, see().messages)
        if not prompt.images and len(prompt.ids) < self._max_length:
            trajectory.next_prompt = list(prompt.ids)

    async def _sum_up(self, trajectory: Trajectory, turn: int, how: Compaction) -> None:
        """Ask the policy to summarise its history, and continue with the summary in place of the history."""
        prompt = self._prompts.summary_prompt(trajectory, how.request)
        sampling = replace(self._sampling, max_new_tokens=how.tokens)
        self._check_room(f"the request for a summary before turn {turn}", prompt, "summary", sampling)
        summary = await self._reply(trajectory, prompt, sampling, View(turn, how.request, (), {}))
        summary.is_summary = True
        trajectory.turns.append(summary)
        self._prompts.summarised(how, summary.reply)

    def _check_room(self, what: str, prompt: Prompt, answer: str, sampling: SamplingParams) -> None:
        if len(prompt.ids) + sampling.max_new_tokens > self._max_length:
            raise ContextOverflowError(
                f"{what} has {len(prompt.ids)} tokens; with a {answer} of up to {sampling.max_new_tokens} it passes "
                f"model.max_length {self._max_length}"
            )

    async def _reply(
        self,
        trajectory: Trajectory,
        prompt: Prompt,
        sampling: SamplingParams,
        view: View,
        prefix_break: PrefixBreak | None = None,
    ) -> Turn:
        """Sample a reply to a prompt and write both into the record."""
        # Summaries are turns of the record, and the environment does not count them.
        number = view.turn + trajectory.summaries
        recorder = self._recorder_of(trajectory)
        segment = recorder.place(prompt.ids, prompt.images, prefix_break)
        try:
            with trajectory.timeline.during(Phase.GENERATE):
                result = await self._client.generate(self._request(trajectory, number, prompt, sampling))
            start, end = recorder.record(segment, result, number)
        except BaseException:
            recorder.withdraw(segment)
            raise
        return Turn(
            segment=segment,
            start=start,
            end=end,
            observation=view.text,
            reply=self._prompts.renderer.text(result.token_ids),
            finish_reason=result.finish_reason,
        )

    def _recorder_of(self, trajectory: Trajectory) -> Recorder:
        if self._recorder is None or self._recorder.trajectory is not trajectory:
            self._recorder = Recorder(trajectory)
        return self._recorder

    def _request(
        self, trajectory: Trajectory, turn: int, prompt: Prompt, sampling: SamplingParams
    ) -> GenerationRequest:
        task = trajectory.task
        order = (task.index, trajectory.member, turn)
        return GenerationRequest(
            request_id=f"{self._purpose}-{task.index}-{trajectory.member}-{turn}-{trajectory.attempt}",
            prompt_ids=prompt.ids,
            images=prompt.images,
            sampling=sampling,
            seed=derive_seed(self._seed, self._purpose, "reply", *order, trajectory.attempt),
            order=order,
            session_key=session_key(self._purpose, task.index, trajectory.member, trajectory.attempt),
            priority=task.index // self._groups_per_step,
        )


class TextActor:
    """Base of the players that only speak text: no tokens are recorded."""

    def begin(self, info: Mapping[str, Any]) -> None:
        """Do nothing: this actor keeps no state between episodes."""

    async def act(self, trajectory: Trajectory, view: View) -> Turn:
        """Reply with what `choose` returns."""
        reply = await self.choose(view)
        return Turn(segment=-1, start=0, end=0, observation=view.text, reply=reply)

    def cut_off(self, trajectory: Trajectory, see: Callable[[], View]) -> None:
        """Do nothing: these players record no tokens for a critic."""

    async def choose(self, view: View) -> str:
        """Return the reply of this turn."""
        raise NotImplementedError


class RandomActor(TextActor):
    """Draws uniformly from the available actions, or from the action space if they are not listed."""

    def __init__(self, generator: np.random.Generator, sample: Callable[[], Any]) -> None:
        self._generator = generator
        self._sample = sample

    async def choose(self, view: View) -> str:
        """Return an action drawn uniformly at random."""
        actions = view.info.get("available_actions")
        if actions:
            return str(actions[int(self._generator.integers(len(actions)))])
        return str(self._sample())


class ScriptedActor(TextActor):
    """Gives a fixed sequence of replies, whatever it observes: a recording, or the blind baseline.

    It repeats the last reply at the end.
    """

    def __init__(self, replies: Sequence[str]) -> None:
        if not replies:
            raise ValueError("a script needs at least one reply")
        self._replies = list(replies)

    async def choose(self, view: View) -> str:
        """Return the reply that the script has for this turn."""
        return self._replies[min(view.turn, len(self._replies) - 1)]


class ExpertActor(TextActor):
    """Says what the environment's own expert would do; the server must allow it."""

    def __init__(self, template: str) -> None:
        self._template = template

    async def choose(self, view: View) -> str:
        """Return the expert's action in the reply format of the run.

        Raises:
            ConfigError: If the environment names no expert action.
        """
        action = view.info.get("expert_action")
        if action is None:
            raise ConfigError(
                "the environment gives no info['expert_action']: it has no expert, or the server does not allow "
                "it (roll-serve --allow-expert)"
            )
        return self._template.format(action=action)


class HumanActor(TextActor):
    """Asks the person at the terminal; explains the task once, as a model's prompt does."""

    def __init__(self) -> None:
        self._instruction = ""

    async def choose(self, view: View) -> str:
        """Show the observation and read a line.

        Raises:
            ConfigError: Standard input has ended.
        """
        actions = view.info.get("available_actions")
        hint = f" ({', '.join(map(str, actions))})" if actions else ""
        instruction = str(view.info.get("instruction") or "")
        if instruction and instruction != self._instruction:
            self._instruction = instruction
            sys.stdout.write(f"\n{wrapped(instruction)}\n")
        sys.stdout.write(f"\n{wrapped(view.text)}\nreply{hint}> ")
        sys.stdout.flush()
        line = await asyncio.to_thread(sys.stdin.readline)
        if not line:
            raise ConfigError(
                "standard input has ended, and --policy human reads every reply from it: play in a terminal, or give "
                "it a line per turn"
            )
        return line.rstrip("\n")
