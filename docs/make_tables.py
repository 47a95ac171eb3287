"""Write the tables of the documentation that are made from what the code declares.

python docs/make_tables.py           writes them
python docs/make_tables.py --check   exits with 1 if one is out of date
"""

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path

from pydantic.fields import FieldInfo

from rollgym.clients.protocol.errors import PROBLEMS, Fault, ProblemKind
from rollgym.clients.protocol.upstream_protocols import OURS as UPSTREAM_PROTOCOLS
from rollgym.clients.replies.formats.table import OURS as CALL_FORMATS
from rollgym.env_server.common import settings as server
from rollgym.env_server.operations.server_metrics import SERVER_METRICS
from rollgym.env_server.protocols.faces import OURS as FACES
from rollgym.sandbox.core.kinds import SANDBOXES
from rollgym.trainer.algorithms.advantage_settings import ADVANTAGES
from rollgym.trainer.algorithms.group_filters import FILTERS
from rollgym.trainer.algorithms.surrogates import SURROGATES
from rollgym.trainer.config.backend import BACKENDS, BackendKind
from rollgym.trainer.core.kinds import kind_of
from rollgym.trainer.core.run_metric import RunMetric
from rollgym.trainer.records.run_metrics import RUN_METRICS
from rollgym.trainer.tasks.layouts import EXAMPLES, TASKS

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


def settings_of(section: type[server.Section]) -> str:
    """The settings of a section of a server's."""
    fields = section.model_fields.items()
    return table(("setting", "default", "meaning"), (_setting(name, field) for name, field in fields))


def _setting(name: str, field: FieldInfo) -> list[str]:
    flag = f"`{name}` (`--register`)" if name == "register_with" else f"`{name}`"
    return [flag, _default(field.get_default(call_default_factory=True)), field.description or ""]


def _default(value: object) -> str:
    match value:
        case None:
            return "unset"
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case tuple() | dict() if not value:
            return "none"
        case _:
            return str(value)


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


def sandboxes() -> str:
    """The sandboxes that an operator may name."""
    automatic = [
        "`auto`",
        "in [the first one](sandbox.md#levels) that works here, `landlock` at least",
        "",
    ]
    rows = ([", ".join(f"`{name}`" for name in each.names), each.runs, each.needs] for each in SANDBOXES)
    return table(("`--sandbox`", "programs run", "needs"), [automatic, *rows])


def upstream_protocols() -> str:
    """The protocols that registered servers may speak."""
    rows = ((f"[`{each.name}`](#{each.name})", each.speakers) for each in UPSTREAM_PROTOCOLS)
    return table(("`protocol`", "for"), rows)


def call_formats() -> str:
    """The formats of tool calls."""
    rows = ((f"`{each.name}`", each.form, each.used_by) for each in CALL_FORMATS)
    return table(("`call_format`", "form", "of"), rows)


def faces() -> str:
    """The protocols that a server speaks to clients of others."""
    rows = ((f"[{each.name}]({each.page})", each.clients, f"`{each.address}`") for each in FACES)
    return table(("face", "for clients of", "their address, below the server's"), rows)


def layouts_of_examples() -> str:
    """The columns by which examples are known, from the first that is tried."""
    rows = ((", ".join(f"`{name}`" for name in each.columns), each.whose, each.becomes) for each in EXAMPLES)
    return table(("columns", "of", "are read as"), rows)


def layouts_of_tasks() -> str:
    """The pairs of columns that tasks are read from."""
    rows = ((f"`{each.question}`", f"`{each.answer}`", each.whose) for each in TASKS)
    return table(("`question`", "`answer`", "of"), rows)


_SECTIONS: Mapping[str, type[server.Section]] = {
    "process": server.ProcessSettings,
    "workers": server.WorkerSettings,
    "ray": server.RaySettings,
    "catalog": server.CatalogSettings,
    "timeouts": server.TimeoutSettings,
    "sessions": server.SessionSettings,
    "access": server.AccessSettings,
    "messages": server.MessageSettings,
    "sandbox": server.SandboxSettings,
    "gateway": server.GatewaySettings,
    "node": server.NodeSettings,
    "telemetry": server.TelemetrySettings,
}

TABLES: Mapping[str, Callable[[], str]] = {
    "problems": lambda: problems(of_gateways=False),
    "problems_of_gateways": lambda: problems(of_gateways=True),
    "server_metrics": server_metrics,
    **{f"settings_of_{name}": partial(settings_of, section) for name, section in _SECTIONS.items()},
    "run_metrics": numbers_of_a_step,
    "step_times": step_times,
    "episode_times": episode_times,
    "advantages": advantages,
    "surrogates": surrogates,
    "filters": filters,
    "backends": backends,
    "sandboxes": sandboxes,
    "upstream_protocols": upstream_protocols,
    "call_formats": call_formats,
    "faces": faces,
    "layouts_of_examples": layouts_of_examples,
    "layouts_of_tasks": layouts_of_tasks,
}
"""What makes each table, by the name that a page has for it."""


if __name__ == "__main__":
    sys.exit(main())
