"""What `roll-train` does: train, play episodes, evaluate."""

import json
import sys
from collections.abc import Sequence
from contextlib import AsyncExitStack
from pathlib import Path

import torch

from trainer.assembly import (
    Players,
    Policy,
    build_policy,
    critic_backend,
    model_actor,
    open_environments,
    open_players,
    policy_backend,
    task_source,
    warm_start_backend,
)
from trainer.checkpoint import CheckpointError, CheckpointStore, RunState, load_checkpoint
from trainer.config.load import dump_settings, load_settings
from trainer.config.run import RunSettings
from trainer.console import RunConsole
from trainer.demonstrations import collect_demonstrations
from trainer.evaluation import Evaluator, as_metrics, build_panels
from trainer.inference.torch_engine import load_weights
from trainer.learner import Learner, Models
from trainer.ledger import Ledger
from trainer.models.load import save_model
from trainer.pipelines import rl
from trainer.pipelines.sft import supervised_rows, train_supervised
from trainer.plots import plot_run
from trainer.plugins import load_attribute
from trainer.records import Trajectory
from trainer.rollout.actors import Actor, HumanActor, RandomActor, ScriptedActor
from trainer.rollout.admission import AdmissionWindow
from trainer.rollout.agent import play_episode
from trainer.rollout.environments import EnvironmentPool
from trainer.rollout.scheduler import GroupPlan, PlayEpisode, RolloutScheduler
from trainer.rows import row_builder
from trainer.seeding import generator
from trainer.statistics import mean_interval, success_rate
from trainer.tasks.task import Task
from trainer.tracking import Tracker
from trainer.weights.publisher import WeightPublisher

_FREE_TO_CHANGE = (
    "steps",
    "output_dir",
    "env_url",
    "env_token",
    "checkpoint",
    "tracking",
    "evaluation",
    "name",
)
"""Settings that a resumed run may change: they do not touch what is learnt."""


async def train(settings: RunSettings) -> int:
    """Train a policy, from the start or from the newest checkpoint."""
    directory = Path(settings.output_dir)
    store = CheckpointStore(directory / "checkpoints", settings.checkpoint.keep)
    folder = _resume_folder(settings, store)
    _keep_settings(settings, directory, resuming=folder is not None)
    torch.set_num_threads(settings.threads)
    async with AsyncExitStack() as stack:
        console = RunConsole(settings.steps, live=settings.tracking.console)
        stack.callback(console.close)
        state, saved = (RunState(0, 0, 0, ()), None) if folder is None else load_checkpoint(folder)
        if folder is not None:
            console.say(f"resuming at step {state.step} from {folder}")
        policy = build_policy(settings)
        pool = await stack.enter_async_context(open_environments(settings, console))
        panels = await build_panels(settings, pool)
        if saved is None and settings.warm_start is not None:
            await _warm_start(settings, policy, pool, console)
        models = _models(settings, policy, saved)
        players = await stack.enter_async_context(open_players(settings, policy))
        publisher = WeightPublisher([players.client])
        await publisher.publish(models.policy, state.version)
        tracker = Tracker(directory, settings.tracking, state.step)
        stack.callback(tracker.close)
        ledger = Ledger(directory / "ledger.jsonl")
        stack.callback(ledger.close)
        ledger.roll_back(state.next_task, state.step, state.untrained)
        evaluator = Evaluator(settings, policy, players, pool, console, panels)
        before = await _measure_start(evaluator, tracker, resuming=folder is not None)
        scheduler = _scheduler(settings, policy, players, pool, ledger, state)
        stack.push_async_callback(scheduler.close)

        async def evaluate(step: int) -> None:
            every = settings.evaluation.every
            if every and step % every == 0 and step < settings.steps:
                scores = await evaluator.measure(whole=settings.evaluation.interim_episodes is None)
                tracker.metrics(step, as_metrics(scores))
                evaluator.say(f"step {step}", scores)

        parts = rl.Parts(
            algorithm=settings.algorithm,
            scheduler=scheduler,
            learner=Learner(settings.algorithm, models, settings.seed),
            models=models,
            publisher=publisher,
            engine=players.engine,
            build_rows=row_builder(settings.rows),
            ledger=ledger,
            tracker=tracker,
            console=console,
            checkpoints=store,
        )
        await rl.train(parts, state, settings.steps, settings.checkpoint.every, evaluate)
        await scheduler.close()
        after = await evaluator.measure(whole=True)
        tracker.metrics(settings.steps, as_metrics(after))
        evaluator.say("end", after)
        if before is not None:
            evaluator.say_gain(before, after)
        save_model(policy.model, policy.tokenizer, directory / "model")
    console.say(f"model: {directory / 'model'}")
    console.say(f"curves: {plot_run(directory, settings.name)}")
    return 0


async def evaluate(settings: RunSettings, checkpoint: Path | None) -> int:
    """Measure a trained policy on the panels of its run."""
    async with AsyncExitStack() as stack:
        console = RunConsole(settings.steps, live=False)
        policy = _trained_policy(settings, checkpoint)
        pool = await stack.enter_async_context(open_environments(settings, console))
        players = await stack.enter_async_context(open_players(settings, policy))
        evaluator = Evaluator(settings, policy, players, pool, console, await build_panels(settings, pool))
        evaluator.say("baseline", await evaluator.baselines())
        evaluator.say("policy", await evaluator.measure(whole=True))
    return 0


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
            policy = _trained_policy(settings, checkpoint)
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


async def _warm_start(
    settings: RunSettings, policy: Policy, pool: EnvironmentPool, console: RunConsole
) -> None:
    from trainer.rollout.context import context_policy
    from trainer.rollout.prompts import PromptBuilder

    warm = settings.warm_start
    assert warm is not None
    context = context_policy(settings.prompt)
    shown = await collect_demonstrations(
        task_source(settings),
        warm.demonstrations,
        lambda: PromptBuilder(policy.renderer, context, settings.prompt.instruction),
        warm.reply,
        pool,
        settings.rollout.max_turns,
    )
    rows = supervised_rows(shown)
    console.say(
        f"warm start on {len(shown)} expert demonstrations ({len(rows)} rows); none are used after it"
    )
    train_supervised(
        warm_start_backend(settings, policy.model, warm.learning_rate),
        rows,
        epochs=warm.epochs,
        batch_rows=warm.batch_rows,
        seed=settings.seed,
        report=lambda epoch, loss: console.say(
            f"warm start, epoch {epoch + 1}/{warm.epochs}: loss {loss:.4f}"
        ),
    )


def _models(settings: RunSettings, policy: Policy, saved: dict | None) -> Models:
    models = Models(
        policy=policy_backend(settings, policy.model),
        critic=critic_backend(settings, policy.model) if settings.algorithm.critic is not None else None,
        reference=_reference(settings, policy) if settings.algorithm.needs_reference else None,
    )
    if saved is not None:
        models.policy.load_state_dict(saved["policy"])
        if models.critic is not None:
            models.critic.load_state_dict(saved["critic"])
        if models.reference is not None:
            models.reference.load_state_dict(saved["reference"])
    return models


def _reference(settings: RunSettings, policy: Policy):
    import copy

    return policy_backend(settings, copy.deepcopy(policy.model))


def _scheduler(
    settings: RunSettings,
    policy: Policy,
    players: Players,
    pool: EnvironmentPool,
    ledger: Ledger,
    state: RunState,
) -> RolloutScheduler:
    rollout_settings = settings.rollout
    window = AdmissionWindow(
        rollout_settings.groups_per_step,
        rollout_settings.max_staleness,
        rollout_settings.window_fraction,
        start=state.next_task,
        reissue=state.untrained,
    )
    plan = GroupPlan(
        rollout_settings.group_size,
        rollout_settings.extra_members,
        rollout_settings.max_attempts,
        rollout_settings.episode_timeout_s,
    )
    return RolloutScheduler(
        task_source(settings), window, _player(settings, policy, players, pool), plan, ledger, players.slots
    )


def _player(settings: RunSettings, policy: Policy, players: Players, pool: EnvironmentPool) -> PlayEpisode:
    """Return what plays one training episode: our agent or the user's, then the user's rewards, if any."""
    agent = play_episode if settings.rollout.agent is None else load_attribute(settings.rollout.agent)
    reward = None if settings.rollout.reward is None else load_attribute(settings.rollout.reward)

    async def play(task: Task, member: int, attempt: int) -> Trajectory:
        async with pool.session(task) as session:
            actor = model_actor(settings, policy, players, "train")
            trajectory: Trajectory = await agent(
                session, task, member, actor, settings.rollout.max_turns, attempt
            )
        if reward is not None and trajectory.outcome.is_result:
            rewards = reward(trajectory)
            if len(rewards) != len(trajectory.turns):
                raise ValueError(
                    f"{settings.rollout.reward} returned {len(rewards)} rewards for {len(trajectory.turns)} turns"
                )
            for turn, value in zip(trajectory.turns, rewards, strict=True):
                turn.reward = float(value)
        return trajectory

    return play


async def _measure_start(evaluator: Evaluator, tracker: Tracker, *, resuming: bool):
    """Measure where the run begins, once; a resumed run has done so before."""
    if resuming:
        return None
    baselines = await evaluator.baselines()
    evaluator.say("baseline", baselines)
    before = await evaluator.measure(whole=True)
    evaluator.say("start", before)
    tracker.metrics(0, as_metrics(before) | as_metrics(baselines))
    return before


def _resume_folder(settings: RunSettings, store: CheckpointStore) -> Path | None:
    resume = settings.checkpoint.resume
    if resume == "never":
        return None
    if resume == "auto":
        return store.latest()
    folder = Path(resume)
    if not folder.is_dir():
        raise CheckpointError(f"checkpoint.resume: there is no folder {folder}")
    return folder


def _keep_settings(settings: RunSettings, directory: Path, *, resuming: bool) -> None:
    """Write the resolved settings beside the run, or check that a resumed run has the same."""
    path = directory / "config.yaml"
    if resuming and path.exists():
        before = load_settings(path).model_dump(mode="json")
        now = settings.model_dump(mode="json")
        changed = [key for key in _changes(before, now) if key.split(".")[0] not in _FREE_TO_CHANGE]
        if changed:
            raise CheckpointError(
                f"cannot resume: {', '.join(changed)} differ from the settings of the run in {directory}; use another "
                "output_dir, or the settings it began with"
            )
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(dump_settings(settings), encoding="utf-8")


def _changes(before: object, now: object, prefix: str = "") -> list[str]:
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [
            change
            for key in keys
            for change in _changes(before.get(key), now.get(key), f"{prefix}.{key}" if prefix else str(key))
        ]
    return [] if before == now else [prefix]


def _trained_policy(settings: RunSettings, checkpoint: Path | None) -> Policy:
    """Load the policy of a checkpoint or model directory; the run's newest if none is named."""
    directory = Path(settings.output_dir)
    if checkpoint is None:
        store = CheckpointStore(directory / "checkpoints", settings.checkpoint.keep)
        checkpoint = directory / "model" if (directory / "model").exists() else store.latest()
    if checkpoint is None:
        raise CheckpointError(f"there is no trained policy in {directory}; name one with --checkpoint")
    if (checkpoint / "config.json").exists():
        return build_policy(settings, checkpoint)
    _, saved = load_checkpoint(checkpoint)
    policy = build_policy(settings)
    names = dict(policy.model.named_parameters())
    load_weights(policy.model, {name: saved["policy"]["model"][name] for name in names})
    return policy


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
