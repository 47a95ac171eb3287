"""Write the table of examples/README.md from what the examples say of themselves.

    python docs/list_examples.py           writes the table
    python docs/list_examples.py --check   exits with 1 if it is out of date

The line of an example is the first sentence of its docstring, or of the comment at its top.
"""

import argparse
import ast
import re
import sys
from pathlib import Path

EXAMPLES = Path(__file__).parents[1] / "examples"
PAGE = EXAMPLES / "README.md"
FOLDERS = {
    "": "Configurations of runs, environments, rewards and agents",
    "presets": "Models of several sizes on 1, 8 and 64 GPUs: `roll-train --config presets/NAME`",
    "one_gpu": "Short runs on one GPU",
    "pretrained": "A pretrained model of 135 million parameters, on one GPU or a laptop",
    "extensions": "Parts of a run in a few lines each",
    "serving": "Configurations of servers: `roll-serve --config examples/serving/NAME.yaml`",
    "kuberay": "Kubernetes",
    "data": "Questions for `verifiable_rewards.yaml`",
}
"""The folders, each with its heading."""

_SENTENCE = re.compile(r"(.+?[.:])(?:\s|$)")
_TABLE = re.compile(r"(<!-- examples -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Write the page, or compare it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="Write nothing; exit code 1 if it is out of date."
    )
    options = parser.parse_args()
    before = PAGE.read_text()
    after = _TABLE.sub(lambda found: f"{found[1]}{tables()}{found[2]}", before)
    if options.check:
        if after != before:
            print("examples/README.md is out of date: python docs/list_examples.py", file=sys.stderr)
        return int(after != before)
    PAGE.write_text(after)
    return 0


def tables() -> str:
    """Return the tables, one for each folder."""
    parts = []
    for folder, heading in FOLDERS.items():
        rows = [
            f"| [{path.name}]({path.relative_to(EXAMPLES)}) | {line_of(path)} |" for path in files_of(folder)
        ]
        parts.append("\n".join([f"## {heading}", "", "| file | what it is |", "|---|---|", *rows, "", ""]))
    return "".join(parts)


def files_of(folder: str) -> list[Path]:
    """Return the examples of a folder, those of one name beside each other."""
    return sorted(path for path in (EXAMPLES / folder).iterdir() if path.is_file() and path != PAGE)


def line_of(path: Path) -> str:
    """Return the first sentence that an example says of itself; of data, its number of lines."""
    text = path.read_text(encoding="utf-8")
    match path.suffix:
        case ".py":
            said = ast.get_docstring(ast.parse(text)) or ""
        case ".jsonl":
            said = f"{text.count(chr(10))} rows"
        case ".jinja":
            said = " ".join(text.split("#}")[0].removeprefix("{#").split()) if text.startswith("{#") else ""
        case _:
            said = _comment(text)
    found = _SENTENCE.match(said)
    return (found[1] if found else said).rstrip(".:").replace("|", "\\|")


def _comment(text: str) -> str:
    mark = "//" if text.startswith("//") else "#"
    lines = text.splitlines()
    end = next((index for index, line in enumerate(lines) if not line.startswith(mark)), len(lines))
    return " ".join(line.removeprefix(mark).strip() for line in lines[:end])


if __name__ == "__main__":
    sys.exit(main())
