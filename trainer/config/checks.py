"""Checks that the files and code that settings name exist, before any other work begins.

A setting that is unused in combination with others is refused, and not ignored.
"""

from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path

import gymnasium
from gymnasium.envs.registration import registry

from rollgym.clients.process.modules import installed_environments
from rollgym.extras import install_line, install_line_of
from rollgym.gymnasium_plugin import NAMESPACE, register_environments
from rollgym.suggestions import alternatives, did_you_mean
from rollgym.trainer.config.agents import SANDBOX_NAMES, AgentsSettings, agent_kind, command_line
from rollgym.trainer.config.inference import read_servers
from rollgym.trainer.config.model import check_model_path
from rollgym.trainer.config.output import TRACKERS, TrackingSettings
from rollgym.trainer.config.rollout import read_examples
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.core.plugins import load_attribute

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
    how = settings.pipeline
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
        *names, last = (f"tracking.{each.name}" for each in TRACKERS)
        yield (
            "tracking.patience_s is how long trackers of others may take, and there are none: set "
            f"{', '.join(names)} or {last}, or leave patience_s out"
        )


_PARTS_OF_ONES_OWN = ("advantage", "surrogate", "selection", "filter", "episodes")
"""Parts of an algorithm that may be a user's function."""


def check_settings(settings: RunSettings) -> None:
    """Check that all files and functions that settings name exist, and refuse settings that would be unused.

    Raises:
        ConfigError: If something is missing, or a setting is unused; the message names the key.
    """
    check_unread(settings)
    check_resume(settings.checkpoint.resume)
    evaluation_sets = settings.evaluation.sets.items()
    named = {f"datasets.{number}.path": each.path for number, each in enumerate(settings.datasets)} | {
        f"evaluation.sets.{name}.dataset.path": evaluation_set.dataset.path
        for name, evaluation_set in evaluation_sets
        if evaluation_set.dataset
    }
    named |= _example_files(settings)
    named["prompt.chat_template"] = settings.prompt.chat_template
    for key, path in named.items():
        if path is not None and not Path(path).exists():
            raise ConfigError(
                f"{key}: there is no {path} here; paths are taken from the directory of the command"
            )
    read_examples(settings.prompt.examples, settings.prompt.instruction)
    if settings.model.path is not None:
        check_model_path(settings.model.path)
    _check_other_models(settings)
    _check_trackers(settings.tracking)
    if settings.model.lora is not None and find_spec("peft") is None:
        raise ConfigError(f"model.lora needs the package peft: {install_line('lora')}")
    if settings.model.kernels == "liger" and find_spec("liger_kernel") is None:
        raise ConfigError(f"model.kernels liger needs the package liger-kernel: {install_line('liger')}")
    check_broadcast(settings)
    if settings.inference.urls_file is not None:
        read_servers(Path(settings.inference.urls_file))
    _check_plugins(settings)
    _check_agent(settings)
    _check_launch(settings)
    if settings.model.vision is not None and (why := why_blind(settings)) is not None:
        raise ConfigError(f"model.vision: {why}")
    if settings.env_url is None:
        _check_served(settings.serve)
    check_environments(settings)


def check_environments(settings: RunSettings) -> None:
    """Refuse environments that the server which the run starts does not have.

    What a server has that runs already, the run asks once it is connected.

    Raises:
        ConfigError: If a setting names one; the message has the key and the nearest name.
    """
    if settings.env_url is not None:
        return
    register_environments()
    namespace = f"{NAMESPACE}/"
    known = {each.removeprefix(namespace) for each in registry if each.startswith(namespace)} - {"Remote-v0"}
    known |= installed_environments().keys() | settings.cluster.roles.judges.keys()
    known |= {text.partition("=")[0].rpartition(":")[2] for text in settings.serve}
    for key, env_id in _environments_of(settings):
        if env_id not in known:
            hint = did_you_mean(env_id, known, 3) or "`roll-env list` shows those that there are"
            raise ConfigError(f"{key}: there is no environment {_shortened(env_id)!r}; {hint}")


def _environments_of(settings: RunSettings) -> Iterator[tuple[str, str]]:
    """Yield each environment that the run plays on its own server, with the setting that names it."""
    datasets = {f"datasets.{number}": each for number, each in enumerate(settings.datasets)}
    for number, task in enumerate(settings.tasks):
        if task.url is None:
            yield f"tasks.{number}.env_id", task.env_id
    for name, each in settings.evaluation.sets.items():
        if each.dataset is not None:
            datasets[f"evaluation.sets.{name}.dataset"] = each.dataset
        elif each.url is None:
            yield f"evaluation.sets.{name}.env_id", each.env_id
    for key, dataset in datasets.items():
        if dataset.url is not None:
            continue
        for verifier in sorted(dataset.played_by):
            yield f"{key}.{'route.verifiers' if dataset.route else 'verifier'}", verifier
        for number, part in enumerate(dataset.rewards):
            if part.url is None:
                yield f"{key}.rewards.{number}.verifier", part.verifier


def _shortened(text: str) -> str:
    return text if len(text) <= 60 else f"{text[:60]}..."


def check_broadcast(settings: RunSettings) -> None:
    """Check for the code that the trainer broadcasts weights to servers with, no matter how these are started.

    Raises:
        ConfigError: If the servers take no broadcasts, or it is not installed.
    """
    weights = settings.weights
    kind = settings.inference.what
    if weights.chosen(settings.inference) != "broadcast":
        return
    if not kind.group:
        raise ConfigError(f"weights.transport broadcast: {kind.title} takes no broadcasts: set it to disk")
    needs = kind.group_package
    if needs and weights.collective == "nccl" and find_spec(needs) is None:
        raise ConfigError(
            f"weights.transport broadcast meets {kind.title}'s workers in {kind.title}'s own group, and {needs} is not "
            f"installed beside the trainer: {install_line_of(needs)}, or set weights.transport to disk"
        )


def why_blind(settings: RunSettings) -> str | None:
    """Return the setting that keeps the policy from seeing pictures, with any model; None if none does."""
    if not settings.inference.embedded:
        return (
            f"inference.kind {settings.inference.kind} is asked with token ids alone, and no pictures go with them: "
            "take inference.kind embedded"
        )
    if not settings.backend.in_process:
        return f"backend.kind {settings.backend.kind} divides rows of text only: take backend.kind torch"
    if settings.distill is not None:
        return "distill: teachers see no pictures: leave it out"
    if settings.rollout.black_box:
        return "rollout.agent: the agents' endpoint takes text only: take an agent of ours, or a coroutine"
    return None


def _check_agent(settings: RunSettings) -> None:
    """Check that the agent's program exists, and refuse settings of agents that would be unused.

    Raises:
        ConfigError: If the program is not found, or agent settings stand without such an agent.
    """
    agent = settings.rollout.agent
    agents = settings.agents
    if agent is not None and agent_kind(agent) == "program":
        command_line(agent, here=not agents.runs_images)
        address = agents.host, agents.port, agents.public_url
        if agents.sandboxed and address != (AgentsSettings().host, AgentsSettings().port, None):
            raise ConfigError(
                "agents.host, agents.port and agents.public_url are not read with agents.sandbox: a program in a "
                "sandbox reaches the endpoint by a socket of its own. Leave them out"
            )
    elif agents.sandboxed and settings.rollout.black_box:
        raise ConfigError(
            "agents.sandbox confines programs, and rollout.agent is a service: start that in a sandbox yourself, or "
            "name its command line"
        )
    elif settings.rollout.black_box and (unread := agents.changed("environment", "grace_s")):
        raise ConfigError(
            f"agents.{unread[0]} is read where rollout.agent is a command line: a service is started by somebody else. "
            "Leave it out"
        )
    unread = agents.changed("sandbox_read_only", "sandbox_memory_mb", "sandbox_disk_mb")
    if unread and settings.rollout.black_box and not agents.sandboxed:
        raise ConfigError(
            f"agents.{unread[0]} is read with agents.sandbox only: set that to {alternatives(SANDBOX_NAMES)}, or "
            f"leave {unread[0]} out"
        )
    if not settings.rollout.black_box and settings.agents != AgentsSettings():
        raise ConfigError(
            "agents: is read where rollout.agent is a command line or an http address only: set that, or leave agents "
            "out"
        )


def _check_launch(settings: RunSettings) -> None:
    """Refuse settings of launched servers that would be unused.

    Raises:
        ConfigError: If there is such a setting.
    """
    launch = settings.inference.launch
    if launch is None:
        return
    on_ray = settings.cluster.kind == "ray"
    if on_ray and launch.changed("host"):
        raise ConfigError(
            "inference.launch.host is not read with cluster.kind 'ray': servers listen at the address of their node. "
            "Leave it out"
        )
    devices = launch.devices or settings.cluster.roles.actor_inference.devices
    if launch.changed("devices_variable") and (on_ray or not devices):
        why = "each server sees its own alone" if on_ray else "no devices are named"
        raise ConfigError(f"inference.launch.devices_variable is not read, since {why}: leave it out")


def check_resume(resume: str) -> None:
    """Refuse a word that means nothing, and a folder that is not there.

    Raises:
        ConfigError: If it is neither a known word nor a folder.
    """
    if resume not in ("auto", "never") and not Path(resume).is_dir():
        raise ConfigError(
            f"checkpoint.resume: '{resume}' is neither auto, nor never, nor a checkpoint's folder"
        )


def _example_files(settings: RunSettings) -> dict[str, str | None]:
    """Return the files of a pipeline's examples, by their keys."""
    how = settings.pipeline
    if how is None:
        return {}
    parts = (("data", how.data), ("held_out", how.held_out))
    return {
        f"{settings.section}.{part}.{number}.path": each.path
        for part, data in parts
        for number, each in enumerate(data)
    }


def _check_other_models(settings: RunSettings) -> None:
    """Refuse teachers and references that are not models.

    Raises:
        ConfigError: If there is such a teacher or reference.
    """
    if settings.distill is not None:
        for name, teacher in settings.distill.teachers.items():
            if teacher.path is not None:
                check_model_path(teacher.path, f"distill.teachers.{name}.path")
    if settings.dpo is not None and settings.dpo.reference not in (None, "none"):
        check_model_path(str(settings.dpo.reference), "dpo.reference")


def _check_trackers(tracking: TrackingSettings) -> None:
    """Refuse trackers whose packages are not installed.

    Raises:
        ConfigError: If one is missing; the message has the command that installs it.
    """
    for each in tracking.chosen:
        if each.package and find_spec(each.package) is None:
            ours = type(each) in TRACKERS
            key = f"tracking.{each.name}" if ours else f"tracking.others.{each.name}"
            line = install_line(each.name) if ours else f"pip install {each.package}"
            raise ConfigError(f"{key} needs the package {each.package}: {line}, or leave {key} out")


def _check_plugins(settings: RunSettings) -> None:
    """Import everything that settings name of a user's code.

    Raises:
        ConfigError: If something is not there, cannot be imported, or cannot be called; the message names the key.
    """
    for key, path in _named(settings):
        try:
            found = load_attribute(path)
        except ConfigError as error:
            raise ConfigError(f"{key}: {error}") from error
        if not callable(found):
            raise ConfigError(f"{key}: '{path}' is no function, but {type(found).__name__}")


def _check_served(serve: Sequence[str]) -> None:
    """Import the environments that the embedded server adds.

    Raises:
        ConfigError: If a class does not exist, cannot be imported, or is not an environment.
    """
    for text in serve:
        path = text.rpartition("=")[2]
        try:
            found = load_attribute(path)
        except ConfigError as error:
            raise ConfigError(f"serve: {error}") from error
        if not (isinstance(found, type) and issubclass(found, gymnasium.Env)):
            raise ConfigError(f"serve: '{path}' is no subclass of gymnasium.Env")


def _named(settings: RunSettings) -> Iterator[tuple[str, str]]:
    rollout, algorithm = settings.rollout, settings.algorithm
    named: dict[str, str | None] = {
        "rollout.agent": None if rollout.black_box else rollout.agent,
        "rollout.reward": rollout.reward,
        "rollout.group_reward": rollout.group_reward,
        "rollout.task_source": rollout.task_source,
        "prompt.custom_context": settings.prompt.custom_context,
    }
    for part in _PARTS_OF_ONES_OWN:
        named[f"algorithm.{part}.function"] = getattr(getattr(algorithm, part), "function", None)
    for key, path in named.items():
        if path is not None:
            yield key, path
