"""Which settings each command reads: unused settings are refused, and not ignored."""

from typing import Any

from rollgym.trainer.config.run import SECTIONS, RunSettings
from rollgym.trainer.core.errors import ConfigError

_EVERY = (
    "name",
    "seed",
    "deterministic",  # what learns from examples is so in any case
    "output_dir",
    "steps",
    "threads",
    "model",
    "backend",
    "cluster",
    "optimizer",
    "checkpoint",
    "tracking",
    "prompt.template_kwargs",
    "prompt.chat_template",
)
_DEMONSTRATING = (
    "env_url",
    "env_token",
    "serve",
    "tasks",
    "prompt",
    "rollout.max_turns",
    "rollout.encoding",
    "rollout.server_timeout_s",
    "rollout.task_source",
    "rollout.temperature",  # divides the logits of the learner
)
"""Further keys that are read if experts play."""
_EXAMPLES = {
    "sft": "sft.data='[{path: chats.jsonl}]'",
    "dpo": "dpo.data='[{path: pairs.jsonl}]'",
    "reward": "reward.data='[{path: pairs.jsonl}]'",
    "distill": "distill.teachers='{main: {path: FOLDER}}'",
}


def check_command(settings: RunSettings, command: str) -> None:
    """Refuse settings that a command does not read, and a pipeline without its section.

    Args:
        settings: The run.
        command: "train", that of a pipeline, or one of "rollout", "eval" and "export".

    Raises:
        ConfigError: If there is such a setting; the message names it and what to do.
    """
    section = settings.section
    if command == "train":
        if section is not None:
            raise ConfigError(
                f"{section}: is read by `roll-train {section}`: use that command, or leave it out"
            )
        return
    if command not in SECTIONS:
        _check_shown(settings, command)
        return
    if section != command:
        raise no_section(command, section)
    read: tuple[str, ...] = (*_EVERY, command)
    if settings.sft is not None and settings.sft.expert is not None:
        read = (*read, *_DEMONSTRATING)
    elif settings.plays:
        read = tuple(name for name in RunSettings.model_fields if name != "algorithm")
    for key in _changed(_defaults(), settings.model_dump(mode="json")):
        if not any(key == name or key.startswith(f"{name}.") for name in read):
            raise ConfigError(f"{key} is not read by roll-train {command}: leave it out")


def no_section(command: str, other: str | None) -> ConfigError:
    """Return the message for a pipeline whose section is missing, perhaps beside another one's."""
    told = "" if other is None else f", and not {other}"
    return ConfigError(f"roll-train {command} reads the section '{command}'{told}: {_EXAMPLES[command]}")


def _check_shown(settings: RunSettings, command: str) -> None:
    """Refuse to play with what does not play, or nowhere."""
    if settings.reward is not None:
        raise ConfigError(
            f"reward: what was trained is a reward model, and roll-train {command} is for policies; the run's folder "
            "'model' is in Hugging Face layout already"
        )
    somewhere = settings.tasks or settings.datasets or settings.rollout.task_source
    if command != "export" and not somewhere:
        raise ConfigError(
            f"roll-train {command} plays episodes, and 'tasks' is empty: name at least one environment, for example "
            "tasks='[{env_id: FrozenLake-v0}]'"
        )


def _defaults() -> dict[str, Any]:
    plain = RunSettings.model_construct()
    return plain.model_dump(mode="json")


def _changed(before: Any, now: Any, prefix: str = "") -> list[str]:
    """Return the keys, as deep as groups of settings go, whose values are not those of before."""
    if isinstance(before, dict) and isinstance(now, dict) and before.keys() == now.keys():
        return [
            key
            for name in now
            for key in _changed(before[name], now[name], f"{prefix}.{name}" if prefix else str(name))
        ]
    return [] if before == now else [prefix]
