"""Expert demonstrations, collected over the wire, as records like any other."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rollgym.trainer.core.errors import RunError
from rollgym.trainer.evaluation.play import play_tasks, score, with_expert
from rollgym.trainer.inference.base import GenerationResult
from rollgym.trainer.records.trajectory import Trajectory, Turn
from rollgym.trainer.rollout.actors import ExpertActor, View
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.prompts import PromptBuilder
from rollgym.trainer.rollout.recorder import Recorder
from rollgym.trainer.tasks.task import Task, TaskSource

DEMONSTRATION_STREAM_OFFSET = 2**40
"""Demonstrations play tasks of the training stream far beyond those that reinforcement learning will reach."""


class DemonstratingActor(ExpertActor):
    """An expert that writes its replies as tokens behind the very prompts that the policy will see."""

    def __init__(self, template: str, prompts: PromptBuilder) -> None:
        super().__init__(template)
        self._prompts = prompts

    def begin(self, info: Mapping[str, Any]) -> None:
        """Start the prompts of a new episode."""
        self._prompts.begin(info)

    async def act(self, trajectory: Trajectory, view: View) -> Turn:
        """Write the prompt and the expert's reply into the record."""
        recorder = Recorder(trajectory)
        prompt = self._prompts.prompt(trajectory, view.messages)
        reply = await self.choose(view)
        ids = self._prompts.renderer.reply_ids(reply)
        segment = recorder.place(prompt.ids, prompt.images)
        shown = GenerationResult(ids, [0.0] * len(ids), [0] * len(ids))
        start, end = recorder.record(segment, shown, view.turn)
        self._prompts.replied(view.messages, reply, segment)
        return Turn(segment=segment, start=start, end=end, observation=view.text, reply=reply)


async def collect_demonstrations(
    source: TaskSource,
    count: int,
    make_prompts: Callable[[], PromptBuilder],
    template: str,
    pool: EnvironmentPool,
    max_turns: int,
) -> list[Trajectory]:
    """Return `count` episodes that the environments' experts solved.

    Raises:
        RunError: If the experts solve fewer than half of the tasks that were tried.
        NoResultError: If the environments fail all of them.
    """
    solved: list[Trajectory] = []
    tried = 0
    while len(solved) < count:
        if tried >= 2 * count + 64:
            raise RunError(f"the expert solved only {len(solved)} of {tried} tasks; demonstrations need more")
        wanted = count - len(solved)
        tasks: Sequence[Task] = [
            source.task(DEMONSTRATION_STREAM_OFFSET + tried + offset) for offset in range(wanted)
        ]
        tried += wanted
        played = await play_tasks(
            with_expert(tasks), lambda _: DemonstratingActor(template, make_prompts()), pool, max_turns
        )
        if not any(trajectory.outcome.is_result for trajectory in played):
            score(played)  # raises, and lists the outcomes
        solved += [trajectory for trajectory in played if trajectory.success]
    return solved
