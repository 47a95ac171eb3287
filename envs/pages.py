"""A page of documentation for each built-in environment, made from what its class declares.

    python -m rollgym.envs.pages             # write the pages
    python -m rollgym.envs.pages --play      # replay their example episodes, too (needs a sandbox and all extras)

What a class declares (`metadata`, docstring, the annotations of its constructor) stands on its page, and so do the
recorded example episode (`episodes.json` beside the pages) and the baselines that
`python benchmarks/environments/baselines.py` recorded.
"""

import argparse
import inspect
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rollgym.clients.protocol.schema_words import wanted
from rollgym.envs.core.kwargs import Kwarg, kwargs_of
from rollgym.envs.example_episodes import environment_class, example_episode, written
from rollgym.envs.registry import EnvironmentSpec, builtin_environments

FOLDER = Path("docs/environments/reference")
EPISODES = FOLDER / "episodes.json"
BASELINES = Path("benchmarks/results/environment_baselines.json")
_MADE = "<!-- Made by `python -m rollgym.envs.pages`; what to change is in the class. -->"

_RUN = "<!-- run by: tests/docs/test_environment_pages.py -->"


def pages(root: Path) -> dict[str, str]:
    """All pages by file name, from the recordings below the root of the repository."""
    episodes = json.loads((root / EPISODES).read_text())
    baselines = json.loads((root / BASELINES).read_text())
    specs = builtin_environments().values()
    made = {f"{spec.id}.md": page(spec, episodes.get(spec.id), baselines.get(spec.id)) for spec in specs}
    return made | {"README.md": _index()}


def page(spec: EnvironmentSpec, episode: Mapping[str, Any] | None, audit: Mapping[str, Any] | None) -> str:
    """Return the documentation page of one environment, in Markdown."""
    env_class = environment_class(spec)
    parts = [
        f"{_MADE}\n# {spec.id}",
        str(env_class.metadata["description"]),
        _about(env_class),
        f"{_RUN}\n```bash\nroll-env play {spec.id}\nroll-env show {spec.id}\nroll-env audit {spec.id}\n```",
        _facts(spec, env_class.metadata),
        _kwargs(kwargs_of(env_class)),
    ]
    if episode is not None:
        parts.append(
            f"## An episode\nOf seed 0, as the policy sees it.\n\n~~~~text\n{written(episode)}\n~~~~"
        )
    if audit is not None:
        parts.append(_baselines(audit))
    return "\n\n".join(part for part in parts if part) + "\n"


def _index() -> str:
    rows = [
        f"| [{spec.id}]({spec.id}.md) | {environment_class(spec).metadata['description']} |"
        for spec in builtin_environments().values()
    ]
    head = f"{_MADE}\n# Every environment\nWhat each takes, shows and pays. [The guides](../README.md) say more.\n"
    return "\n".join([head, "| id | |", "|---|---|", *rows, ""])


def _about(env_class: type) -> str:
    """The docstring's own words, without its sections."""
    text = inspect.getdoc(env_class) or ""
    return text.split("\nArgs:")[0].split("\nRaises:")[0].strip()


def _facts(spec: EnvironmentSpec, metadata: Mapping[str, Any]) -> str:
    rows = {
        "observation": metadata["observation"],
        "actions": metadata["actions"],
        "reward": metadata["reward"],
        "kind": metadata.get("kind", "episodic"),
        "longest episode": _steps(spec.max_episode_steps),
        "deterministic": "yes: seed and actions fix an episode" if metadata.get("deterministic") else "no",
        "expert": "yes" if metadata.get("expert") else "no",
        "options of a reset": ", ".join(f"`{option}`" for option in metadata.get("reset_options", ())),
        "drawings": ", ".join(f"`{mode}`" for mode in metadata["render_modes"]),
        "class": f"`{spec.entry_point}`",
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


def _baselines(audit: Mapping[str, Any]) -> str:
    rows = [f"| {name} | {_cell(detail)} |" for name, detail in _found(audit)]
    heading = f"## Baselines\n`roll-env audit` with {audit['episodes']} episodes, seed {audit['seed']}."
    return "\n".join([f"{heading}\n", "| who plays, or what was tried | |", "|---|---|", *rows])


def _found(audit: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    for entry in audit["entries"]:
        if entry["verdict"] == "skipped":
            continue
        told = entry["detail"] or entry["verdict"]
        yield entry["check"], told if entry["verdict"] == "ok" else f"**{entry['verdict']}**: {told}"


def _cell(text: Any) -> str:
    return str(text).replace("|", "\\|").replace("\n", " ")


def _record(root: Path, ids: list[str]) -> None:
    """Replay example episodes: those of the ids, or all."""
    recorded = json.loads((root / EPISODES).read_text()) if (root / EPISODES).exists() else {}
    known = builtin_environments()
    for env_id in ids or known:
        recorded[env_id] = example_episode(known[env_id])
        print(env_id, len(recorded[env_id]["turns"]), "turns")  # noqa: T201 - what a command says
    ordered = {env_id: recorded[env_id] for env_id in known if env_id in recorded}
    (root / EPISODES).write_text(json.dumps(ordered, indent=1, ensure_ascii=False) + "\n")


def main() -> None:
    """Write the environments' pages of the documentation."""
    parser = argparse.ArgumentParser(
        prog="python -m rollgym.envs.pages", description="Write the environments' pages."
    )
    parser.add_argument("--root", type=Path, default=Path(), help="The repository (default: here).")
    parser.add_argument(
        "--play", nargs="*", metavar="ID", help="Play the example episodes of these anew, or of all."
    )
    options = parser.parse_args()
    (options.root / FOLDER).mkdir(parents=True, exist_ok=True)
    if options.play is not None:
        _record(options.root, options.play)
    for name, text in pages(options.root).items():
        (options.root / FOLDER / name).write_text(text)


if __name__ == "__main__":
    main()
