"""`roll-train rollout`: episodes without training, one after the other, where a debugger works."""

import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

from trainer.assembly import Players, Policy, model_actor, open_environments, open_players, task_source
from trainer.commands.policy import trained_policy
from trainer.config.run import RunSettings
from trainer.console import RunConsole
from trainer.evaluation import build_panels
from trainer.records import Trajectory
from trainer.rollout.actors import Actor, HumanActor, RandomActor, ScriptedActor
from trainer.rollout.agent import play_episode
from trainer.seeding import generator
from trainer.statistics import mean_interval, success_rate
from trainer.tasks.task import Task


async def rollout(
    settings: RunSettings,
    *,
    player: str,
    episodes: int,
    panel: str | None,
    recorded: Path | None,
    checkpoint: Path | None,
    output: Path | None,
) -> int:
    """Play episodes one after the other and print them."""
    async with AsyncExitStack() as stack:
        console = RunConsole(settings.steps, live=False)
        pool = await stack.enter_async_context(open_environments(settings, console))
        scripts = _recorded(recorded) if player == "recorded" else []
        if scripts:
            tasks = [task for task, _ in scripts][:episodes]
        elif panel is not None:
            if panel not in settings.evaluation.panels:
                raise ValueError(
                    f"no panel '{panel}'; the config has {', '.join(settings.evaluation.panels)}"
                )
            panels = await build_panels(settings, pool)
            tasks = list(next(entry for entry in panels if entry.name == panel).tasks)[:episodes]
        else:
            source = task_source(settings)
            tasks = [source.task(index) for index in range(episodes)]
        model: tuple[Policy, Players] | None = None
        if player == "model":
            policy = trained_policy(settings, checkpoint)
            model = policy, await stack.enter_async_context(open_players(settings, policy))
        played: list[Trajectory] = []
        for number, task in enumerate(tasks):
            if model is not None:
                model[1].slots.enter()
            async with pool.session(task) as session:
                actor: Actor
                if model is not None:
                    actor = model_actor(settings, *model, "rollout")
                elif player == "random":
                    actor = RandomActor(
                        generator(settings.seed, "rollout", number), session.action_space.sample
                    )
                elif player == "human":
                    actor = HumanActor()
                else:
                    actor = ScriptedActor(scripts[number][1])
                trajectory = await play_episode(session, task, 0, actor, settings.rollout.max_turns)
            if model is not None:
                model[1].slots.leave()
            played.append(trajectory)
            _print_episode(console, number, trajectory)
    if played:
        console.say(
            f"{len(played)} episodes: success {success_rate(sum(t.success for t in played), len(played))}, "
            f"reward {mean_interval([t.total_reward for t in played])}"
        )
    if output is not None:
        _write_episodes(output, played)
        console.say(f"episodes: {output}")
    return 0


def _recorded(path: Path | None) -> list[tuple[Task, list[str]]]:
    if path is None:
        raise ValueError("--policy recorded needs --recorded FILE, for example a run's episodes.jsonl")
    scripts = []
    for line in path.read_text(encoding="utf-8").splitlines():
        episode = json.loads(line)
        scripts.append((Task(**episode["task"]), [turn["reply"] for turn in episode["turns"]]))
    return scripts


def _write_episodes(path: Path, played: Sequence[Trajectory]) -> None:
    lines = [json.dumps(trajectory.as_text(), ensure_ascii=False) + "\n" for trajectory in played]
    path.write_text("".join(lines), encoding="utf-8")


def _print_episode(console: RunConsole, number: int, trajectory: Trajectory) -> None:
    task = trajectory.task
    console.say(f"\nepisode {number}: {task.env_id}, seed {task.seed}")
    for place, turn in enumerate(trajectory.turns):
        console.say(f"{turn.observation}\n  turn {place}: {turn.reply!r}  reward {turn.reward:g}")
    console.say(f"  {trajectory.outcome.value} {trajectory.detail}  reward {trajectory.total_reward:g}")
    sys.stdout.flush()
