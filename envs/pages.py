"""A page of documentation for each environment, made from what its class declares.

    python -m rollgym.envs.pages                          # write the pages of the built-in environments
    python -m rollgym.envs.pages --play                   # replay their example episodes, too (needs all extras)
    python -m rollgym.envs.pages --installed docs/envs    # write pages of the environments that packages bring

What a class declares (`metadata`, docstring, the annotations of its constructor) stands on its page, with an example
episode, which is recorded (`episodes.json` beside the pages): the expert plays it, else the reply that
`metadata["example_reply"]` forms of the task's fields.
"""

import argparse
import inspect
import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import gymnasium

from rollgym.clients.checks.declared import declared_baselines
from rollgym.clients.process.modules import installed_environments
from rollgym.clients.protocol.schema_words import wanted
from rollgym.envs.core.kwargs import Kwarg, kwargs_of
from rollgym.envs.registry import builtin_environments
from rollgym.extensions import Extension

FOLDER = Path("docs/environments/reference")
EPISODES = "episodes.json"
_MOST_TURNS = 6
_LONGEST = 1_500
_SEED = 0
_DO_NOT_KNOW = "I do not know."
_MADE = "<!-- Made by `python -m rollgym.envs.pages`; what to change is in the class. -->"

_RUN = "<!-- run by: tests/docs/test_environment_pages.py -->"


def pages(environments: Mapping[str, Extension], episodes: Mapping[str, Any]) -> dict[str, str]:
    """Return the pages of environments and their index, by file name.

    Args:
        environments: By id.
        episodes: Their example episodes by id, as `example_episode` plays them.
    """
    classes = {env_id: environment.load() for env_id, environment in environments.items()}
    made = {
        f"{env_id}.md": page(env_id, environments[env_id].path, env_class, episodes[env_id])
        for env_id, env_class in classes.items()
    }
    rows = [
        f"| [{env_id}]({env_id}.md) | {_cell(env_class.metadata.get('description', ''))} |"
        for env_id, env_class in classes.items()
    ]
    head = f"{_MADE}\n# Every environment\nWhat each takes, shows and pays.\n"
    return made | {"README.md": "\n".join([head, "| id | |", "|---|---|", *rows, ""])}


def page(env_id: str, path: str, env_class: type[gymnasium.Env[Any, Any]], episode: Mapping[str, Any]) -> str:
    """Return the documentation page of one environment, in Markdown.

    Args:
        env_id: Its id.
        path: `module:Class`.
        env_class: The class.
        episode: Its example episode.
    """
    metadata = env_class.metadata
    parts = [
        f"{_MADE}\n# {env_id}",
        str(metadata.get("description", "")),
        _about(env_class),
        f"{_RUN}\n```bash\nroll-env play {env_id}\nroll-env show {env_id}\nroll-env audit {env_id}\n```",
        _facts(path, metadata),
        _kwargs(kwargs_of(env_class)),
        f"## An episode\nOf seed 0, as the policy sees it.\n\n~~~~text\n{_written(episode)}\n~~~~",
        _baselines(env_id, metadata),
    ]
    return "\n\n".join(part for part in parts if part) + "\n"


def _about(env_class: type) -> str:
    """The docstring's own words, without its sections."""
    text = inspect.getdoc(env_class) or ""
    return text.split("\nArgs:")[0].split("\nRaises:")[0].strip()


def _facts(path: str, metadata: Mapping[str, Any]) -> str:
    rows = {
        "observation": metadata.get("observation"),
        "actions": metadata.get("actions"),
        "reward": metadata.get("reward"),
        "kind": metadata.get("kind", "episodic"),
        "needs": metadata.get("needs"),
        "longest episode": _steps(metadata.get("max_episode_steps")),
        "deterministic": "yes: seed and actions fix an episode" if metadata.get("deterministic") else "no",
        "expert": "yes" if metadata.get("expert") else "no",
        "options of a reset": ", ".join(f"`{option}`" for option in metadata.get("reset_options", ())),
        "drawings": ", ".join(f"`{mode}`" for mode in metadata.get("render_modes", ())),
        "class": f"`{path}`",
    }
    told = (f"| {name} | {_cell(value)} |" for name, value in rows.items() if value)
    return "\n".join(["| | |", "|---|---|", *told])


def _steps(limit: int | None) -> str:
    if limit is None:
        return "no limit"
    return "1 step" if limit == 1 else f"{limit} steps by default"


def _kwargs(kwargs: tuple[Kwarg, ...]) -> str:
    own = [kwarg for kwarg in kwargs if not kwarg.operator]
    operators = [kwarg for kwarg in kwargs if kwarg.operator]
    text = f"## Kwargs\n{_table(own)}"
    if operators:
        text += f"\n\nOnly the operator of a server sets these (`operator_kwargs`):\n\n{_table(operators)}"
    return text


def _table(kwargs: list[Kwarg]) -> str:
    return "\n".join(["| kwarg | default | allowed | meaning |", "|---|---|---|---|", *map(_row, kwargs)])


def _row(kwarg: Kwarg) -> str:
    default = f"`{_json(kwarg.schema['default'])}`" if "default" in kwarg.schema else "required"
    allowed = wanted(kwarg.schema, none="null")
    return f"| `{kwarg.name}` | {_cell(default)} | {_cell(allowed)} | {_cell(kwarg.description)} |"


def _json(value: Any) -> str:
    return json.dumps(round(value, 4) if isinstance(value, float) else value, ensure_ascii=False)


def _baselines(env_id: str, metadata: Mapping[str, Any]) -> str:
    rows = [
        f"| {player} | {100 * baseline.solved:.3g} % | {baseline.mean_return:.3g} |"
        for player, baseline in declared_baselines(metadata).items()
    ]
    if not rows:
        return ""
    about = (
        f"Players of `roll-env audit {env_id}`, with default kwargs. Those that are not listed reach nothing."
    )
    return "\n".join(
        [f"## Baselines\n{about}\n", "| who plays | solved | mean return |", "|---|---|---|", *rows]
    )


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def example_episode(env_class: type[gymnasium.Env[Any, Any]]) -> dict[str, Any]:
    """Play the first turns of the episode of seed 0.

    Returns:
        `instruction`, `observation` and `turns`, each with `action`, `observation`, `reward`, `terminated`, `truncated`
        and `success`.
    """
    environment = env_class()
    try:
        return _played(environment)
    finally:
        environment.close()


def _played(environment: gymnasium.Env[Any, Any]) -> dict[str, Any]:
    expert = bool(environment.metadata.get("expert"))
    observation, info = environment.reset(seed=_SEED, options={"expert": True} if expert else None)
    episode: dict[str, Any] = {
        "instruction": str(info.get("instruction", "")),
        "observation": str(observation),
        "turns": [],
    }
    for _ in range(_MOST_TURNS):
        action = str(info["expert_action"]) if expert else _reply(environment, info)
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


def _reply(environment: gymnasium.Env[Any, Any], info: Mapping[str, Any]) -> str:
    """Return the reply of a player who has no expert to ask."""
    if available := info.get("available_actions"):
        return str(available[0])
    form = str(environment.metadata.get("example_reply", _DO_NOT_KNOW))
    return form.format_map(getattr(environment, "task", {}))


def _written(episode: Mapping[str, Any]) -> str:
    """Return an episode as text, long observations cut."""
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


def write_pages(folder: Path, environments: Mapping[str, Extension], replayed: Iterable[str] = ()) -> None:
    """Write the pages of environments into a folder.

    Args:
        folder: Where to; its `episodes.json` has the recorded example episodes.
        environments: By id.
        replayed: Ids whose example episodes are played anew; those that are not recorded are played anyway.

    Raises:
        FileExistsError: A file of the folder has the name of one that is to be written, and is something else.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for path in (folder / "README.md", *(folder / f"{env_id}.md" for env_id in environments)):
        if path.exists() and not path.read_text().startswith(_MADE):
            raise FileExistsError(f"{path} is no page that this made: name another folder")
    record = folder / EPISODES
    recorded = _recorded(record) if record.exists() else {}
    for env_id in {*replayed} | environments.keys() - recorded.keys():
        recorded[env_id] = example_episode(environments[env_id].load())
    episodes = {env_id: recorded[env_id] for env_id in environments}
    record.write_text(json.dumps(episodes, indent=1, ensure_ascii=False) + "\n")
    for name, text in pages(environments, episodes).items():
        (folder / name).write_text(text)


def _recorded(record: Path) -> dict[str, Any]:
    """Return the example episodes of a folder.

    Raises:
        FileExistsError: The file is something else.
    """
    try:
        found = json.loads(record.read_text())
    except ValueError:
        found = None
    if isinstance(found, dict) and all(isinstance(each, dict) and "turns" in each for each in found.values()):
        return found
    raise FileExistsError(f"{record} is no record that this made: name another folder")


def main(argv: Sequence[str] | None = None) -> None:
    """Write the environments' pages of the documentation."""
    parser = argparse.ArgumentParser(
        prog="python -m rollgym.envs.pages", description="Write the environments' pages."
    )
    parser.add_argument("--root", type=Path, default=Path(), help="The repository (default: here).")
    parser.add_argument(
        "--play", nargs="*", metavar="ID", help="Play the example episodes of these anew, or of all."
    )
    parser.add_argument(
        "--installed", type=Path, metavar="FOLDER", help="Write pages of other packages' environments there."
    )
    parser.add_argument("--only", nargs="+", metavar="ID", help="Of other packages' environments only these.")
    options = parser.parse_args(argv)
    ours = options.installed is None
    environments = builtin_environments() if ours else installed_environments()
    if options.only and ours:
        parser.error("--only is of --installed: the pages of the built-in environments are written together")
    for named in (options.only or (), options.play or ()):
        if unknown := {*named} - environments.keys():
            parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(environments)}")
        if named is options.only:
            environments = {env_id: environments[env_id] for env_id in named}
    replayed = () if options.play is None else options.play or environments
    write_pages(options.root / FOLDER if ours else options.installed, environments, replayed)


if __name__ == "__main__":
    main()
