"""Write the tables of the documentation that are made from what the code declares.

python docs/make_tables.py           writes them
python docs/make_tables.py --check   exits with 1 if one is out of date
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path

from rollgym.clients.protocol.problems import PROBLEMS, Fault, ProblemKind
from rollgym.env_server.operations.server_metrics import SERVER_METRICS
from rollgym.trainer.algorithms.advantage_settings import ADVANTAGES
from rollgym.trainer.algorithms.group_filters import FILTERS
from rollgym.trainer.algorithms.surrogates import SURROGATES
from rollgym.trainer.config.backend_kinds import BACKENDS, BackendKind
from rollgym.trainer.core.kinds import kind_of
from rollgym.trainer.core.run_metric import RunMetric
from rollgym.trainer.records.run_metrics import RUN_METRICS

DOCS = Path(__file__).parent

_FAULTS: Mapping[Fault, str] = {
    "call": "the call",
    "values": "its values",
    "caller": "the caller",
    "action": "the action",
    "state": "what is there",
    "environment": "the environment",
    "server": "the server",
}
_TABLE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)


def main() -> int:
    """Write the tables, or compare them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument(
        "--check", action="store_true", help="Write nothing; exit code 1 if one is out of date."
    )
    options = parser.parse_args()
    old = [page for page in sorted(DOCS.rglob("*.md")) if not _is_as_declared(page, write=not options.check)]
    if options.check and old:
        names = ", ".join(str(page.relative_to(DOCS.parent)) for page in old)
        print(f"out of date: {names}: python docs/make_tables.py", file=sys.stderr)
        return 1
    return 0


def _is_as_declared(page: Path, *, write: bool) -> bool:
    before = page.read_text(encoding="utf-8")
    after = with_tables(before)
    if write and after != before:
        page.write_text(after, encoding="utf-8")
    return after == before


def with_tables(page: str) -> str:
    """Return a page with its tables as the code declares them.

    Raises:
        KeyError: It names a table that there is not.
    """
    return _TABLE.sub(lambda found: f"{found[1]}{TABLES[found[2]]()}{found[3]}", page)


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table in Markdown."""
    lines = [list(heads), *rows]
    lines.insert(1, ["---"] * len(lines[0]))
    return "".join(_line(line) for line in lines)


def _line(cells: Iterable[str]) -> str:
    line = "|".join(["", *(f" {cell} " if cell else " " for cell in cells), ""])
    return line.replace(" --- ", "---") + "\n"


def problems(*, of_gateways: bool) -> str:
    """The codes of problems: of every server, or of gateways alone."""
    heads = ("code", "status", "comes from", "when; further members")
    return table(heads, (_row(each) for each in PROBLEMS if each.of_gateways is of_gateways))


def _row(problem: ProblemKind) -> list[str]:
    return [f"`{problem.code}`", str(problem.status), _FAULTS[problem.fault], problem.meaning]


def server_metrics() -> str:
    """The metrics of a server."""
    return table(
        ("name", "type", "labels", "what it says"),
        (
            (
                f"`{metric.exported}`",
                metric.kind,
                ", ".join(f"`{label}`" for label in metric.labels),
                metric.described,
            )
            for metric in SERVER_METRICS
        ),
    )


def run_metrics(metrics: Iterable[RunMetric]) -> str:
    """Numbers of a step."""
    return table(("name", "what it is"), ((f"`{each.name}`", _described(each)) for each in metrics))


def _described(metric: RunMetric) -> str:
    return f"{metric.help} [{metric.unit}]" if metric.unit not in ("", "s") else metric.help


def numbers_of_a_step() -> str:
    """All of them but times."""
    return run_metrics(each for each in RUN_METRICS if not each.name.startswith(("time/", "episode/")))


def step_times() -> str:
    """Where the time of a step goes, and after that what was done in it."""
    timed = [each for each in RUN_METRICS if each.name.startswith("time/")]
    return run_metrics(sorted(timed, key=lambda metric: metric.unit != "s"))


def episode_times() -> str:
    """Where the time of an episode goes."""
    return run_metrics(each for each in RUN_METRICS if each.name.startswith("episode/"))


def advantages() -> str:
    """The kinds of advantages."""
    rows = ((f"`{kind_of(each)}`", each.unit_of_credit, each.formula) for each in ADVANTAGES)
    return table(("kind", "one per", "formula"), rows)


def surrogates() -> str:
    """The kinds of surrogates."""
    return table(
        ("`surrogate.kind`", "formula"), ((f"`{kind_of(each)}`", each.formula) for each in SURROGATES)
    )


def filters() -> str:
    """The kinds of filters of groups."""
    return table(("kind", "keeps"), ((f"`{kind_of(each)}`", each.keeps) for each in FILTERS))


def backends() -> str:
    """The kinds of training back-ends."""
    return table(("kind", "what it is", "settings"), (_backend(each) for each in BACKENDS))


def _backend(kind: BackendKind) -> list[str]:
    mesh = ("mesh",) if len(kind.dimensions) > 1 else ()
    read = ("ranks", *mesh, *kind.reads, "sharded_checkpoints") if kind.dimensions else ()
    return [f"`{kind.name}`", kind.described, ", ".join(f"`{name}`" for name in read)]


TABLES: Mapping[str, Callable[[], str]] = {
    "problems": lambda: problems(of_gateways=False),
    "problems_of_gateways": lambda: problems(of_gateways=True),
    "server_metrics": server_metrics,
    "run_metrics": numbers_of_a_step,
    "step_times": step_times,
    "episode_times": episode_times,
    "advantages": advantages,
    "surrogates": surrogates,
    "filters": filters,
    "backends": backends,
}
"""What makes each table, by the name that a page has for it."""


if __name__ == "__main__":
    sys.exit(main())
