"""`roll-train sft`, `dpo`, `reward` and `distill` on examples: the parts of learning from data, put together."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch

from rollgym.trainer.backends.base import Scorer, TrainRow
from rollgym.trainer.cluster.cluster import open_cluster
from rollgym.trainer.cluster.placement import picture, place_roles
from rollgym.trainer.config.cluster import ClusterSettings
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.config.supervised import (
    DistillSettings,
    DpoSettings,
    ExpertSettings,
    LearningFromExamples,
    RewardModelSettings,
    SftSettings,
)
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.embedded_server import embedded_server
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.run_files import MODEL_FOLDER, write_errors
from rollgym.trainer.evaluation.play import collect_demonstrations
from rollgym.trainer.evaluation.reporting.charts import plot_curves
from rollgym.trainer.evaluation.reporting.episodes import keep_tokenizer
from rollgym.trainer.learn.learner import Models
from rollgym.trainer.learn.pipelines.distill import Distillation
from rollgym.trainer.learn.pipelines.example_rows import ExampleRows, rows_digest
from rollgym.trainer.learn.pipelines.offline import ExampleBatches, Objective, Offline, train_on_examples
from rollgym.trainer.learn.pipelines.preferences import Preference, PreferenceRows, Ranking, reference_sums
from rollgym.trainer.learn.pipelines.saving import Saver
from rollgym.trainer.learn.pipelines.sft import Imitation, supervised_rows
from rollgym.trainer.models.value_head import empty_classifier, save_reward_model
from rollgym.trainer.records.checkpoint import RunState
from rollgym.trainer.rollout.data_check import keep_data
from rollgym.trainer.rollout.prompts import prompt_maker
from rollgym.trainer.run.device_choices import keep_choices, say_choices
from rollgym.trainer.run.environments import open_environments, task_source
from rollgym.trainer.run.learners import check_reference, check_teachers, teacher_of
from rollgym.trainer.run.models import ModelSource, device_turns, open_models
from rollgym.trainer.run.policy import Policy, build_policy
from rollgym.trainer.run.resume import find_checkpoint, go_back, keep_settings, open_tracker, restore_models
from rollgym.trainer.run.supervision import RunAttempt
from rollgym.trainer.run.trained_policy import save_policy


@dataclass(frozen=True, slots=True)
class Prepared:
    """The examples of a command, and its objective.

    Attributes:
        how: Settings of the passes over the examples.
        lengths: Tokens of each example.
        data: Digests of the examples, by what they are called.
        objective: Builds the objective from fresh models and the source of further ones.
    """

    how: LearningFromExamples
    lengths: Sequence[int]
    data: dict[str, str]
    objective: Callable[[Models, ModelSource], Objective]


@dataclass(frozen=True, slots=True)
class ExampleRun:
    """A run that learns from examples: its parts, open and in the state from which it goes on.

    Attributes:
        attempt: The attempt that it is.
        settings: The run's, with the number of steps that its epochs take.
        state: What was trained before.
        policy: The policy's model, tokenizer and renderer.
        how: Settings of the passes over the examples.
        parts: What the training loop needs.
    """

    attempt: RunAttempt
    settings: RunSettings
    state: RunState
    policy: Policy
    how: LearningFromExamples
    parts: Offline

    async def train(self) -> None:
        """Train to the last step, and write down what was trained."""
        settings, parts, console = self.settings, self.parts, self.attempt.console
        directory, store = Path(settings.output_dir), self.attempt.store
        console.begin_training(self.state.step, settings.steps)
        every, shutdown = settings.checkpoint.every, self.attempt.shutdown
        await train_on_examples(parts, self.state, settings.steps, every, self.how.held_out_every, shutdown)
        with write_errors(directory):
            async with parts.resident():
                newest = store.latest()
                saved = await asyncio.to_thread(_save, settings, parts.models, self.policy, directory, newest)
                console.say(saved)
            console.say(f"curves: {plot_curves(directory, settings.name)}")


@asynccontextmanager
async def open_examples(attempt: RunAttempt) -> AsyncIterator[ExampleRun]:
    """Open a run that learns from examples, from the start or from the newest checkpoint."""
    settings, console = attempt.settings, attempt.console
    async with AsyncExitStack() as stack:
        directory = Path(settings.output_dir)
        torch.set_num_threads(settings.threads)
        trains_here = settings.backend.in_process
        policy = build_policy(settings, trained=trains_here, computes=trains_here)
        policy.renderer.template.say = console.say
        if settings.reward is not None:
            empty_classifier(policy.model)  # what could not be exported is refused before it is trained
        console.status("reading the examples")
        prepared = await _prepared(settings, policy, console)
        console.status(None)
        how = prepared.how
        batches = ExampleBatches(prepared.lengths, settings.seed, how.batch, how.batch_tokens)
        if how.epochs is not None:
            settings = settings.model_copy(update={"steps": batches.steps(how.epochs)})
        console.say(
            f"{len(prepared.lengths)} examples, {sum(prepared.lengths)} tokens, {settings.steps} steps"
        )
        checkpoint = find_checkpoint(settings, attempt.store, console.say)
        ours = checkpoint is not None and attempt.store.holds(checkpoint.folder)
        keep_settings(settings, directory, resuming=ours)
        keep_data(prepared.data, directory, resuming=ours)
        go_back(attempt.store, checkpoint, directory, console.say)
        keep_tokenizer(policy.tokenizer, directory)
        placement = place_roles(settings)
        if settings.cluster != ClusterSettings():
            console.say(picture(placement))
        cluster = await stack.enter_async_context(
            open_cluster(settings, placement, attempt.shutdown.end, console.say)
        )
        made = await stack.enter_async_context(open_models(settings, policy, directory, console, cluster))
        models = await asyncio.to_thread(made.models)
        keep_choices(settings, models.policy.kernels, directory)
        for line in say_choices(settings, models.policy.kernels):
            console.say(line)
        objective = await asyncio.to_thread(prepared.objective, models, made)
        state = RunState(0, 0, 0, ())
        if checkpoint is not None:
            state = checkpoint.state
            await restore_models(attempt.store, checkpoint, models)
        turns = device_turns(settings, models, made.shared)
        tracker = open_tracker(settings, state.step, console.say)
        stack.push_async_callback(asyncio.to_thread, tracker.close)
        saver = Saver(
            models,
            attempt.store,
            tracker,
            asynchronous=settings.checkpoint.asynchronous,
            resident=turns.resident,
        )
        parts = Offline(objective, batches, models, tracker, console, saver, turns.resident)
        yield ExampleRun(attempt, settings, state, policy, how, parts)


def _save(
    settings: RunSettings, models: Models, policy: Policy, directory: Path, checkpoint: Path | None
) -> str:
    if settings.reward is None:
        return save_policy(models.policy, policy, directory, checkpoint)
    folder = directory / MODEL_FOLDER
    save_reward_model(policy.model, models.policy.parameters(), policy.tokenizer, folder)
    return f"reward model: {folder}"


async def _prepared(settings: RunSettings, policy: Policy, console: RunConsole) -> Prepared:
    if settings.sft is not None and settings.sft.expert is not None:
        shown = await _demonstrations(settings, settings.sft.expert, policy, console)
        rows = ExampleRows(policy.renderer, settings.sft, settings.model.max_length, console.say)
        held_out = rows.conversations(settings.sft.held_out)
        return _of_rows(settings, settings.sft, Imitation, shown, held_out, console)
    return await asyncio.to_thread(_of_data, settings, policy, console)


def _of_data(settings: RunSettings, policy: Policy, console: RunConsole) -> Prepared:
    how = settings.pipeline
    assert how is not None
    rows = ExampleRows(policy.renderer, how, settings.model.max_length, console.say)
    match how:
        case SftSettings():
            learnt, held_out = (rows.conversations(data, how.roles) for data in (how.data, how.held_out))
            rows.tell_overlap(learnt, held_out)
            return _of_rows(settings, how, Imitation, learnt, held_out, console)
        case DpoSettings():
            read = rows.pairs if how.loss.paired else rows.judged
            examples, others = read(how.data), read(how.held_out)
            rows.tell_overlap(examples, others)
            if how.reference not in (None, "none"):
                both = (row for part in (examples, others) for pair in part.rows for row in pair)
                check_reference(str(how.reference), policy.tokenizer, both)
            return _preference(settings, how, examples, others, console)
        case RewardModelSettings():
            pairs = partial(rows.pairs, rewarded=True)
            examples, others = pairs(how.data), pairs(how.held_out)
            rows.tell_overlap(examples, others)
            return _ranking(settings, how, examples, others, console)
        case DistillSettings():
            check_teachers(how, policy.tokenizer)
            teach = partial(teacher_of, how)
            learnt, held_out = (
                rows.conversations(data, teacher_of=teach) for data in (how.data, how.held_out)
            )
            rows.tell_overlap(learnt, held_out)
            return _of_rows(settings, how, Distillation, learnt, held_out, console)
        case _:
            raise ConfigError("no pipeline is named")


async def _demonstrations(
    settings: RunSettings, expert: ExpertSettings, policy: Policy, console: RunConsole
) -> list[TrainRow]:
    """Return the rows of the environments' experts' episodes, replayed if a run resumes."""
    make_prompts = prompt_maker(policy.renderer, settings.prompt)
    console.begin("expert demonstrations", expert.demonstrations)
    async with open_environments(settings, console, embedded_server) as pool:
        shown = await collect_demonstrations(
            task_source(settings),
            expert.demonstrations,
            make_prompts,
            expert.reply,
            pool,
            settings.rollout.max_turns,
        )
    return supervised_rows(shown, settings.model.max_length, console.say)


def _of_rows(
    settings: RunSettings,
    how: SftSettings | DistillSettings,
    objective: type[Imitation | Distillation],
    rows: list[TrainRow],
    held_out: list[TrainRow],
    console: RunConsole,
) -> Prepared:
    """Return what learns from rows one by one: their own tokens, or a teacher's distributions at these."""
    return Prepared(
        how,
        [len(row.ids) for row in rows],
        {"0 data": rows_digest(rows)},
        lambda models, _: objective(
            models.policy,
            rows,
            held_out,
            max_skipped_steps=settings.optimizer.max_skipped_steps,
            say=console.say,
        ),
    )


def _preference(
    settings: RunSettings,
    how: DpoSettings,
    examples: PreferenceRows,
    held_out: PreferenceRows,
    console: RunConsole,
) -> Prepared:
    count = len(examples.rows) + len(held_out.rows)

    def compared(scorer: Scorer) -> list[torch.Tensor]:
        console.begin("log-probabilities of the reference", count)
        learnt = reference_sums(scorer, examples, console.advance)
        return [learnt, reference_sums(scorer, held_out)]

    def objective(models: Models, others: ModelSource) -> Objective:
        sums = [torch.zeros(len(each.rows), 2, dtype=torch.float64) for each in (examples, held_out)]
        if how.loss.has_reference and how.reference is None:
            # Nothing is trained yet: the policy is the reference, with adapters or without.
            sums = compared(models.policy)
        elif how.reference not in (None, "none"):
            with others.other(str(how.reference)) as reference:
                sums = compared(reference)
        skipped = settings.optimizer.max_skipped_steps
        return Preference(models.policy, how.loss, examples, sums[0], held_out, sums[1], skipped, console.say)

    return Prepared(how, examples.lengths, _digests(examples), objective)


def _ranking(
    settings: RunSettings,
    how: RewardModelSettings,
    examples: PreferenceRows,
    held_out: PreferenceRows,
    console: RunConsole,
) -> Prepared:
    skipped = settings.optimizer.max_skipped_steps
    return Prepared(
        how,
        examples.lengths,
        _digests(examples),
        lambda models, _: Ranking(models.policy, how.centre, examples, held_out, skipped, console.say),
    )


def _digests(examples: PreferenceRows) -> dict[str, str]:
    return {"0 data": rows_digest(row for pair in examples.rows for row in pair)}
