"""The measurements of a run: all its panels, sampled and greedy, with the baselines beside them."""

from dataclasses import dataclass, replace
from functools import partial

from clients.measuring.statistics import rate_difference
from trainer.assembly.agents import PolicyPlayer
from trainer.config.run import RunSettings
from trainer.config.supervised import PLAIN_REPLY
from trainer.core.console import RunConsole
from trainer.evaluation.evaluation_sets import Panel, build_panel
from trainer.evaluation.play import (
    NoBlindBaselineError,
    NoResultError,
    Score,
    blind_baseline,
    panel_turns,
    play_each,
    random_baseline,
    score,
)
from trainer.rollout.environments import EnvironmentPool
from trainer.tasks.task import Task, TaskSource


@dataclass(frozen=True, slots=True)
class Evaluator:
    """Measures the policy, played as it is in training.

    Attributes:
        settings: The run.
        player: Who plays with the policy.
        pool: The environments.
        console: Where results are said.
        panels: The fixed panels.
        source: The tasks that the run trains on.
    """

    settings: RunSettings
    player: PolicyPlayer
    pool: EnvironmentPool
    console: RunConsole
    panels: list[Panel]
    source: TaskSource

    async def measure(self, *, whole: bool) -> dict[str, Score]:
        """Play the panels and return scores by `panel/mode`.

        Args:
            whole: Play all tasks of a panel, or only the `interim_episodes` first ones.
        """
        scores: dict[str, Score] = {}
        evaluation = self.settings.evaluation
        modes = {"sampled": evaluation.sampled, "greedy": evaluation.greedy}
        for panel in self.panels:
            tasks = panel.tasks if whole else panel.tasks[: evaluation.interim_episodes]
            turns = panel_turns(panel.settings, self.settings.rollout.max_turns)
            for mode, wanted in modes.items():
                if not wanted:
                    continue
                purpose = f"evaluate-{panel.name}-{mode}"
                played = await play_each(
                    tasks,
                    self.player.playing(purpose, turns, greedy=mode == "greedy"),
                    self.pool,
                    self.player.players.slots,
                    self.player.concurrency,
                    self.player.timeout_s,
                )
                try:
                    scores[f"{panel.name}/{mode}"] = score(played)
                except NoResultError as reason:
                    # A run that has learnt for hours does not end because it cannot be measured now.
                    self.console.say(f"panel  {panel.name}/{mode} is not measured: {reason}")
        await self.pool.shrink()
        return scores

    async def baselines(self) -> dict[str, Score]:
        """Play the random and the blind baseline on every panel that asks for them; say where there is no blind one."""
        scores: dict[str, Score] = {}
        warm = self.settings.warm_start
        template = warm.reply if warm is not None else PLAIN_REPLY
        for panel in self.panels:
            if not panel.settings.baselines:
                continue
            turns = panel_turns(panel.settings, self.settings.rollout.max_turns)
            train = _training_tasks(self.source, panel)
            players = {
                "random": partial(random_baseline, panel, self.pool, turns, self.settings.seed),
                "blind": partial(blind_baseline, panel, train, self.pool, turns, template),
            }
            for name, play in players.items():
                try:
                    scores[f"{panel.name}/{name}"] = await play()
                except (NoBlindBaselineError, NoResultError) as reason:
                    self.console.say(f"baseline  {panel.name}/{name} is not played: {reason}")
        await self.pool.shrink()
        return scores

    def say(self, title: str, scores: dict[str, Score]) -> None:
        """Print scores, one a line."""
        for name, result in scores.items():
            lost = f", {result.failures} failed in the environment" if result.failures else ""
            played = f"({result.episodes} episodes, {result.turns:.1f} turns{lost})"
            parts = [f"success {result.success}", f"reward {result.reward}", played]
            self.console.numbers(f"{title}  {name:<24} ", parts)

    def say_gain(self, before: dict[str, Score], after: dict[str, Score]) -> None:
        """Print what training gained on each panel, with its interval."""
        for name, result in after.items():
            if name in before:
                gain = rate_difference(before[name].success, result.success)
                self.console.say(f"gain     {name:<24} {gain}")


async def build_panels(settings: RunSettings, pool: EnvironmentPool) -> list[Panel]:
    """Choose the tasks of all panels."""
    return [await build_panel(name, panel, pool) for name, panel in settings.evaluation.panels.items()]


def as_metrics(scores: dict[str, Score]) -> dict[str, float]:
    """Return scores as named numbers."""
    return {
        name: value
        for key, entry in scores.items()
        for name, value in entry.as_metrics(f"evaluate/{key}").items()
    }


def _training_tasks(source: TaskSource, panel: Panel) -> list[Task]:
    """Training tasks of the panel's environment, for choosing the blind baseline's script."""
    tasks = (source.task(index) for index in range(2**41, 2**41 + 400))
    return [replace(task, options=None) for task in tasks if task.env_id == panel.tasks[0].env_id]
