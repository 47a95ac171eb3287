"""Episodes as a policy sees them, for the pages of the documentation: played by the expert, or by a simple player."""

import importlib
from collections.abc import Mapping
from typing import Any

import gymnasium

from rollgym.envs.registry import EnvironmentSpec

MOST_TURNS = 6
_LONGEST = 1_500
_SEED = 0
_DO_NOT_KNOW = "I do not know."
_MARKED = {
    "Arithmetic-v0": "<answer>{}</answer>",
    "CodeTests-v0": "```python\n{}\n```",
    "Composite-v0": "<answer>{}</answer>",
    "FunctionCalls-v0": "{}",
    "Math-v0": "\\boxed{{{}}}",
    "MultipleChoice-v0": "\\boxed{{{}}}",
    "QA-v0": "<answer>{}</answer>",
    "ReasoningGym-v0": "<answer>{}</answer>",
}
"""The format of an answer, for tasks with an answer in environments without an expert."""
_WRITTEN = {
    "Format-v0": "Ночной поезд тихо шёл через лес, и в окнах долго мерцали далёкие огни.",
    "InstructionFollowing-v0": "Keep the beans in a closed jar, and the smell stays in them.\n\n***\n\n"
    "Grind them beside an open window, so that the room is fresh in the evening.",
}
"""Replies to the task of seed 0, for environments without a known answer."""


def environment_class(spec: EnvironmentSpec) -> type[gymnasium.Env[Any, Any]]:
    """The class of a built-in environment."""
    module_name, _, class_name = spec.entry_point.partition(":")
    found: type[gymnasium.Env[Any, Any]] = getattr(importlib.import_module(module_name), class_name)
    return found


def example_episode(spec: EnvironmentSpec) -> dict[str, Any]:
    """Play the first turns of the episode of seed 0.

    Returns:
        `instruction`, `observation` and `turns`, each with `action`, `observation`, `reward`, `terminated`, `truncated`
        and `success`.
    """
    environment = environment_class(spec)()
    try:
        return _played(environment, spec.id)
    finally:
        environment.close()


def _played(environment: gymnasium.Env[Any, Any], env_id: str) -> dict[str, Any]:
    expert = bool(environment.metadata.get("expert"))
    observation, info = environment.reset(seed=_SEED, options={"expert": True} if expert else None)
    episode: dict[str, Any] = {
        "instruction": str(info.get("instruction", "")),
        "observation": str(observation),
        "turns": [],
    }
    for _ in range(MOST_TURNS):
        action = str(info["expert_action"]) if expert else _reply(environment, env_id, info)
        observation, reward, terminated, truncated, info = environment.step(action)
        episode["turns"].append(
            {
                "action": action,
                "observation": str(observation),
                "reward": float(reward),
                "terminated": terminated,
                "truncated": truncated,
                "success": bool(info.get("success")),
            }
        )
        if terminated or truncated:
            break
    return episode


def _reply(environment: gymnasium.Env[Any, Any], env_id: str, info: Mapping[str, Any]) -> str:
    """Return the reply of a player who knows the task's answer, if it has one, and its format."""
    available = info.get("available_actions")
    if available:
        return str(available[0])
    task = getattr(environment, "_task", {})
    answer = next((task[name] for name in ("answer", "answers", "solution") if name in task), None)
    answer = answer[0] if isinstance(answer, list) and answer else answer
    form = _MARKED.get(env_id)
    if form is None or answer is None:
        return _WRITTEN.get(env_id, _DO_NOT_KNOW)
    return form.format(answer)


def written(episode: Mapping[str, Any]) -> str:
    """An episode as text, long observations cut."""
    parts = [
        f"[instruction]\n{_cut(episode['instruction'])}",
        f"[observation]\n{_cut(episode['observation'])}",
    ]
    for turn in episode["turns"]:
        parts.append(f"[policy]\n{_cut(turn['action'])}")
        parts.append(f"[reward {turn['reward']:g}{_ending(turn)}]\n{_cut(turn['observation'])}")
    if not (turn["terminated"] or turn["truncated"]):
        parts.append("...")
    return "\n\n".join(parts)


def _ending(turn: Mapping[str, Any]) -> str:
    if turn["terminated"]:
        return ", terminated" + (", success" if turn["success"] else "")
    return ", truncated" if turn["truncated"] else ""


def _cut(text: str) -> str:
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST].rstrip()}\n[... {len(text):,} characters]"
