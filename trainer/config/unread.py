"""Settings that are unused in combination with others: a changed one is refused, and not ignored."""

from collections.abc import Iterator

from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError

_OF_OUR_PROMPTS = ("context", "turns", "instruction", "tools", "examples", "custom_context")
"""The keys of `prompt` that build conversations from episodes; the others concern any use of the chat template."""
_OF_EVALUATION_SETS = ("sampled", "greedy", "interim_episodes")
_OF_THE_STREAM = ("shuffle", "weight", "domain")
"""Keys of a data set that decide the order of its rows, and the names of its tasks among others."""


def check_unread(settings: RunSettings) -> None:
    """Refuse settings that differ from their defaults and are unused in combination with the others.

    Defaults are never refused: a run records all settings, and resumes with the record.

    Raises:
        ConfigError: If there is such a setting; the message names it and the remedy.
    """
    parts = (_of_rollouts, _of_prompts, _of_training, _of_weights, _of_evaluation, _of_examples, _of_trackers)
    for part in parts:
        for problem in part(settings):
            raise ConfigError(problem)


def _of_rollouts(settings: RunSettings) -> Iterator[str]:
    rollout = settings.rollout
    if not rollout.changed("window_fraction"):
        return
    if rollout.extra_groups:
        yield (
            "rollout.window_fraction is not read with rollout.extra_groups, which puts aside the groups that would be "
            "overtaken too often: leave one of the two out"
        )
    if not rollout.max_staleness:
        yield (
            "rollout.window_fraction is how far groups of later steps may overtake, and with rollout.max_staleness 0 "
            "none are under way: set that to 1 or more, or leave window_fraction out"
        )


def _of_prompts(settings: RunSettings) -> Iterator[str]:
    # An expert's demonstrations use the built-in prompts, no matter which agent plays afterwards.
    if settings.rollout.black_box and settings.warm_start is None:
        for name in settings.prompt.changed(*_OF_OUR_PROMPTS):
            yield f"prompt.{name} is about prompts of ours, and rollout.agent makes its own: leave it out"


def _of_training(settings: RunSettings) -> Iterator[str]:
    if settings.optimizer.changed("critic_learning_rate") and settings.algorithm.critic is None:
        yield (
            "optimizer.critic_learning_rate is read where the algorithm has a critic, and this one has none: take one "
            "that has, such as preset 'ppo', or leave it out"
        )
    backend = settings.backend
    if backend.changed("sequence_parallel") and backend.mesh.tensor == 1:
        yield (
            "backend.sequence_parallel is about what the ranks of a layer share, and with backend.mesh.tensor 1 each "
            "has its own: set that to 2 or more, or leave sequence_parallel out"
        )


def _of_weights(settings: RunSettings) -> Iterator[str]:
    launch, weights = settings.inference.launch, settings.weights
    # Servers that are started with a model that is built here read all of it once.
    writes_model = launch is not None and settings.model.path is None
    if weights.changed("bucket_mb") and weights.transport == "adapter" and not writes_model:
        yield (
            "weights.bucket_mb divides whole weights, and weights.transport 'adapter' sends adapters alone, each as "
            "one file: leave it out"
        )


def _of_evaluation(settings: RunSettings) -> Iterator[str]:
    evaluation = settings.evaluation
    unread = evaluation.changed(*_OF_EVALUATION_SETS)
    if evaluation.every and evaluation.changed("every"):
        unread.append("every")
    if unread and not evaluation.sets:
        yield (
            f"evaluation.{unread[0]} is about evaluation.sets, and there are none: name one, or leave {unread[0]} out"
        )
    for name, evaluation_set in evaluation.sets.items():
        # A route is one thing that data sets share, the weights of its verifiers in a stream among it.
        dataset = evaluation_set.dataset
        if dataset is not None and (unread := dataset.changed(*_OF_THE_STREAM)):
            yield (
                f"evaluation.sets.{name}.dataset.{unread[0]} is of data sets that are trained on, and an evaluation "
                "set plays the first rows, under its own name: leave it out"
            )


def _of_examples(settings: RunSettings) -> Iterator[str]:
    how = settings.sft or settings.dpo or settings.distill or settings.reward
    if how is None:
        return
    section = settings.section
    expert = settings.sft is not None and settings.sft.expert is not None
    if settings.prompt.examples is not None and not expert:
        yield (
            f"prompt.examples are shown in prompts of episodes, and {section} learns from conversations as they are "
            "written: put them there, or leave prompt.examples out"
        )
    if how.batch_tokens is not None and how.changed("batch"):
        yield f"{section}.batch is not read with {section}.batch_tokens, which takes its place: leave one of them out"
    if how.held_out:
        return
    if how.changed("held_out_every"):
        yield (
            f"{section}.held_out_every is about {section}.held_out, and there is none: name held-out examples, or "
            "leave it out"
        )
    if expert and how.changed("longer"):
        yield (
            "sft.longer is about examples of files, and demonstrations of sft.expert that are longer than "
            "model.max_length are left out and counted in any case: leave it out"
        )


def _of_trackers(settings: RunSettings) -> Iterator[str]:
    tracking = settings.tracking
    if tracking.changed("patience_s") and not tracking.chosen:
        yield (
            "tracking.patience_s is how long trackers of others may take, and there are none: set tracking.wandb, "
            "tracking.swanlab or tracking.mlflow, or leave patience_s out"
        )
