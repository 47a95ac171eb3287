"""The measurements of a run: all its evaluation sets, sampled and greedy, with the baselines beside them."""

from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol

from rollgym.clients.measuring.statistics import rate_difference
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.config.supervised import PLAIN_REPLY
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.evaluation.evaluation_sets import EvaluationSet, build_evaluation_set
from rollgym.trainer.evaluation.play import (
    NoBlindBaselineError,
    NoResultError,
    Score,
    blind_baseline,
    evaluation_set_turns,
    play_each,
    random_baseline,
    score,
)
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.episodes import PlayEpisode
from rollgym.trainer.rollout.slots import EpisodeSlots
from rollgym.trainer.tasks.task import Task, TaskSource


class Player(Protocol):
    """Plays episodes with the policy that are not trained on."""

    def playing(self, purpose: str, max_turns: int, *, greedy: bool = False) -> PlayEpisode:
        """Return the player of a family of episodes; `greedy` takes the most likely tokens."""
        ...

    @property
    def slots(self) -> EpisodeSlots:
        """Notified of every episode's start and end."""
        ...

    @property
    def concurrency(self) -> int:
        """How many episodes are worth to be played at one time."""
        ...

    @property
    def timeout_s(self) -> float | None:
        """How long an episode may take; None if its player always ends by itself."""
        ...


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Measures the policy, played as it is in training.

    Attributes:
        settings: The run.
        player: Plays with the policy.
        pool: The environments.
        console: Shows the results.
        evaluation_sets: The fixed sets of tasks.
        source: The tasks that the run trains on.
    """

    settings: RunSettings
    player: Player
    pool: EnvironmentPool
    console: RunConsole
    evaluation_sets: list[EvaluationSet]
    source: TaskSource

    async def measure(self, *, whole: bool) -> dict[str, Score]:
        """Play the evaluation sets and return scores by `set/mode`.

        Args:
            whole: Play all tasks of a set, or only the `interim_episodes` first ones.
        """
        scores: dict[str, Score] = {}
        evaluation = self.settings.evaluation
        modes = {"sampled": evaluation.sampled, "greedy": evaluation.greedy}
        for evaluation_set in self.evaluation_sets:
            tasks = evaluation_set.tasks if whole else evaluation_set.tasks[: evaluation.interim_episodes]
            turns = evaluation_set_turns(evaluation_set.settings, self.settings.rollout.max_turns)
            for mode, wanted in modes.items():
                if not wanted:
                    continue
                purpose = f"evaluate-{evaluation_set.name}-{mode}"
                played = await play_each(
                    tasks,
                    self.player.playing(purpose, turns, greedy=mode == "greedy"),
                    self.pool,
                    self.player.slots,
                    self.player.concurrency,
                    self.player.timeout_s,
                )
                try:
                    scores[f"{evaluation_set.name}/{mode}"] = score(played)
                except NoResultError as reason:
                    # A run that has learnt for hours does not end because it cannot be measured now.
                    self.console.say(
                        f"evaluation set  {evaluation_set.name}/{mode} is not measured: {reason}"
                    )
        await self.pool.shrink()
        return scores

    async def baselines(self) -> dict[str, Score]:
        """Play the random and the blind baseline on every set that asks for them; report sets without a blind one."""
        scores: dict[str, Score] = {}
        warm = self.settings.warm_start
        template = warm.reply if warm is not None else PLAIN_REPLY
        for evaluation_set in self.evaluation_sets:
            if not evaluation_set.settings.baselines:
                continue
            turns = evaluation_set_turns(evaluation_set.settings, self.settings.rollout.max_turns)
            train = _training_tasks(self.source, evaluation_set)
            players = {
                "random": partial(random_baseline, evaluation_set, self.pool, turns, self.settings.seed),
                "blind": partial(blind_baseline, evaluation_set, train, self.pool, turns, template),
            }
            for name, play in players.items():
                try:
                    scores[f"{evaluation_set.name}/{name}"] = await play()
                except (NoBlindBaselineError, NoResultError) as reason:
                    self.console.say(f"baseline  {evaluation_set.name}/{name} is not played: {reason}")
        await self.pool.shrink()
        return scores

    def say(self, title: str, scores: dict[str, Score]) -> None:
        """Print scores, one per line."""
        for name, result in scores.items():
            lost = f", {result.failures} failed in the environment" if result.failures else ""
            played = f"({result.episodes} episodes, {result.turns:.1f} turns{lost})"
            parts = [f"success {result.success}", f"reward {result.reward}", played]
            self.console.numbers(f"{title}  {name:<24} ", parts)

    def say_gain(self, before: dict[str, Score], after: dict[str, Score]) -> None:
        """Print what training gained on each evaluation set, with its interval."""
        for name, result in after.items():
            if name in before:
                gain = rate_difference(before[name].success, result.success)
                self.console.say(f"gain     {name:<24} {gain}")


async def build_evaluation_sets(settings: RunSettings, pool: EnvironmentPool) -> list[EvaluationSet]:
    """Choose the tasks of all evaluation sets."""
    return [await build_evaluation_set(name, each, pool) for name, each in settings.evaluation.sets.items()]


def as_metrics(scores: dict[str, Score]) -> dict[str, float]:
    """Return scores as metrics by name."""
    return {
        name: value
        for key, entry in scores.items()
        for name, value in entry.as_metrics(f"evaluate/{key}").items()
    }


def _training_tasks(source: TaskSource, evaluation_set: EvaluationSet) -> list[Task]:
    """Training tasks of the evaluation set's environment, for choosing the blind baseline's script."""
    tasks = (source.task(index) for index in range(2**41, 2**41 + 400))
    return [replace(task, options=None) for task in tasks if task.env_id == evaluation_set.tasks[0].env_id]
