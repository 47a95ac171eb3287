"""Every block of the documentation is checked, or says in the line before it why it is not run."""

import ast
import asyncio
import importlib
import importlib.util
import inspect
import json
import tomllib
import types
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from rollgym.clients.client.client import EnvClient
from rollgym.clients.process.modules import GROUP as ENVIRONMENTS
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import ResetRequest, StepReply, StepRequest
from rollgym.env_server.access.tokens import add_token
from rollgym.env_server.common.io_process import Reason, ReasonCode
from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.common.settings_loading import check_settings
from rollgym.sandbox.selection import GROUP as SANDBOXES
from rollgym.trainer.config.load import settings_from
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.errors import ConfigError
from tests.support.client_server import ServerProcess
from tests.support.judge_double import JudgeDouble
from tests.support.other_package import GROUPS_OF_RUNS, GROUPS_OF_SERVERS
from tests.support.processes import ROOT
from tests.support.readers_folder import make_readers_folder
from tests.support.sandboxes import working_sandbox
from tests.support.shell_blocks import not_to_be_run
from tests.support.snippets import CHECKED, SHELLS, SHOWN, Fence, fences_of, pages, read_fences
from tests.support.typed_commands import MistakeError, check_commands

FENCES = [fence for page in pages() for fence in fences_of(page)]
READERS_RUN = {"tasks": [{"env_id": "FrozenLake-v0"}], "deterministic": False}
ADDRESS = "http://127.0.0.1:8000"
MISTAKES = (ValueError, ConfigError, ConfigurationError, MistakeError)
_MESSAGES = {"step": StepRequest, "reset": ResetRequest}


def of(*languages: str) -> list[Any]:
    return [pytest.param(fence, id=fence.place) for fence in FENCES if fence.language in languages]


# -- what is looked at -------------------------------------------------------------------------------------------------


def complaint(fence: Fence) -> str:
    """What is wrong with a block's label or mark; nothing where it is checked, shown, or says why not."""
    if fence.language not in (*CHECKED, *SHOWN):
        return f"{fence.place}: a block of {fence.language!r}: label it {', '.join(CHECKED)}, or leave the label out"
    if fence.run_by:
        test, page = ROOT / fence.run_by, Path(fence.page)
        text = test.read_text(encoding="utf-8") if test.exists() else ""
        if page.name not in text and f"{page.parent}/*.md" not in text:
            return f"{fence.place}: {fence.run_by} does not run the blocks of this page"
    elif fence.language in SHELLS and not fence.not_run and (others := not_to_be_run(fence.text)):
        return (
            f"{fence.place}: no test types {', '.join(others)}: put <!-- not run: why --> in the line before"
        )
    return ""


@pytest.mark.parametrize("page", pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_every_block_of_a_page_is_checked_or_only_shown(page: Path) -> None:
    assert [said for fence in fences_of(page) if (said := complaint(fence))] == []


def test_the_documentation_has_blocks_of_each_kind() -> None:
    assert {fence.language for fence in FENCES} >= {"bash", "json", "python", "toml", "yaml"}
    assert len(FENCES) > 150


def test_blocks_are_read_as_they_are_shown() -> None:
    page = "<!-- not run: takes a day -->\n```bash\nmake reproduce\n```\n~~~~text\n```python\n1\n```\n~~~~\n"
    first, second = read_fences(page, "page.md")
    assert (first.place, first.language, first.text, first.not_run) == (
        "page.md:2",
        "bash",
        "make reproduce\n",
        "takes a day",
    )
    assert (second.language, second.text) == ("text", "```python\n1\n```\n")
    with pytest.raises(ValueError, match=r"page\.md:1: the block that begins here is never closed"):
        read_fences("```bash\nmake\n", "page.md")


def test_a_mark_needs_a_reason_and_the_test_that_it_names() -> None:
    (fence,) = read_fences("<!-- not run: -->\n```python\n1\n```\n", "page.md")
    assert fence.not_run == ""
    (fence,) = read_fences("<!-- run by: tests/test_readme.py -->\n```python\n1\n```\n", "page.md")
    assert "page.md:2: tests/test_readme.py does not run" in complaint(fence)
    (fence,) = read_fences("```bash\nroll-env list && docker compose up\n```\n", "page.md")
    assert "page.md:1: no test types docker" in complaint(fence)
    assert complaint(replace(fence, not_run="needs Docker")) == ""
    (fence,) = read_fences("```bsh\nmake\n```\n", "page.md")
    assert "page.md:1: a block of 'bsh'" in complaint(fence)


# -- commands ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("fence", of(*SHELLS))
def test_commands_are_understood(fence: Fence, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if fence.run_by:  # with a file that its page has the reader save
        make_readers_folder(tmp_path)
        monkeypatch.syspath_prepend(tmp_path)
    try:
        understood = check_commands(fence.text)
    except MistakeError as mistake:
        pytest.fail(f"{fence.place}: {mistake}")
    if not understood and not (fence.not_run or fence.run_by):
        pytest.fail(
            f"{fence.place}: none of these commands can be checked: put <!-- not run: why --> in the line before"
        )


@pytest.mark.parametrize(
    ("typed", "said"),
    [
        ("roll-train --confg run.yaml", "--confg"),
        ("roll-train --config examples/frozen_lak.yaml", "examples/frozen_lak.yaml is not there"),
        ("roll-train --config examples/frozen_lake.yaml rollout.groups=2", "rollout.groups"),
        ("roll-train rollout.reward=examples.reward:later_is_better", "later_is_better"),
        ("roll-trian steps=1", "no command that is known"),
        ("roll-env play FrozenLake-v9", "no environment 'FrozenLake-v9'"),
        ("roll-env list | roll-env replay - --server x", "--server"),
        ("roll-env sandbox run --lang cobol program", "cobol"),
        ("roll-serve --prt 8000", "--prt"),
        ("roll-serve --operator-kwargs 'Math-v0={'", "not JSON"),
        ("roll-serve token --file tokens.yaml", "--name"),
        ("roll-agent-proxy --upstream http://127.0.0.1", "--model"),
        ("make tea", "no such target"),
        ("python benchmarks/serving/vector.py --rouns 2", "--rouns"),
        ("python -m rollgym.envs.webshop.prepare --products 2", "--products"),
        ("pip install '.[rays]'", "no extra 'rays'"),
        ("docker compose --profile moon up", "no profile 'moon'"),
        ("docker compose up --scale moons=2", "no service 'moons=2'"),
        ("export T=$(docker compose run tokens roll-serve token --nam x)", "--nam"),
        ("curl localhost:8000/v1/sessions -d '{\"env\": 1}'", "env_id"),
        ("ray job submit -- roll-train --nothing", "--nothing"),
    ],
)
def test_a_wrong_command_is_found(typed: str, said: str) -> None:
    with pytest.raises(MistakeError) as found:
        check_commands(typed)
    assert said in str(found.value)


# -- files -------------------------------------------------------------------------------------------------------------


def check_yaml(text: str) -> str:
    """Read settings as what they are for does; gives what that is."""
    values = yaml.safe_load(text)
    if set(values) <= set(RunSettings.model_fields):
        settings_from(values if "datasets" in values else READERS_RUN | values)
        return "run"
    if set(values) == {"services"}:
        for service in values["services"].values():
            if service.get("command", [""])[0] == "sh":
                check_commands(service["command"][-1].replace("$$", "$").replace("exec ", ""))
        return "fleet"
    check_settings(values)
    return "server"


@pytest.mark.parametrize("fence", of("yaml"))
def test_settings_are_read(fence: Fence) -> None:
    try:
        check_yaml(fence.text)
    except MISTAKES as mistake:
        pytest.fail(f"{fence.place}: {mistake}")


@pytest.mark.parametrize(
    "text",
    [
        "rollout: {group_sizes: 8}",
        "operator_kwarg: {}",
        "services: {a: {command: [sh, -c, exec roll-env regster]}}",
    ],
)
def test_wrong_settings_are_found(text: str) -> None:
    with pytest.raises(MISTAKES):
        check_yaml(text)


def check_message(message: dict[str, Any]) -> None:
    """Read a message as the protocol does, where it is one of the protocol."""
    if "op" in message:
        fields = {key: value for key, value in message.items() if key not in ("id", "op", "session_id")}
        _MESSAGES[message["op"]].model_validate(fields)
    elif "ok" in message:
        StepReply.model_validate(message["ok"])
        assert set(message["ok"]) <= set(StepReply.model_fields)
    elif "error" in message:
        assert ProblemError.from_problem(message["error"]).to_problem() == message["error"]
    elif "reasons" in message:
        reasons = [Reason(**reason) for reason in message["reasons"]]
        assert {reason.code for reason in reasons} <= set(typing.get_args(ReasonCode))


@pytest.mark.parametrize("fence", of("json"))
def test_messages_are_the_protocols(fence: Fence) -> None:
    for line in fence.text.splitlines():
        try:
            check_message(json.loads(line))
        except (AssertionError, KeyError, TypeError, ValueError) as mistake:
            pytest.fail(f"{fence.place}: {line}: {mistake!r}")


@pytest.mark.parametrize("fence", of("toml"))
def test_entry_points_are_in_groups_that_are_read(fence: Fence) -> None:
    groups = tomllib.loads(fence.text)["project"]["entry-points"]
    assert set(groups) <= {ENVIRONMENTS, SANDBOXES, *GROUPS_OF_RUNS, *GROUPS_OF_SERVERS}, fence.place


# -- Python ------------------------------------------------------------------------------------------------------------


def compiled(fence: Fence) -> types.CodeType:
    """A block as a program of its own; `await` stands where a reader has an event loop."""
    try:
        code: types.CodeType = compile(fence.text, fence.place, "exec", flags=ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
    except SyntaxError as error:
        pytest.fail(f"{fence.place}: {error}")
    return code


@pytest.mark.parametrize("fence", of("python"))
def test_what_a_program_imports_is_there(fence: Fence) -> None:
    compiled(fence)
    for node in ast.walk(ast.parse(fence.text)):
        if isinstance(node, ast.Import):
            names = [(alias.name, "") for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names = [(node.module, alias.name) for alias in node.names]
        else:
            continue
        for module, name in names:
            if importlib.util.find_spec(module.partition(".")[0]) is None:
                assert fence.run_by, (
                    f"{fence.place}: {module} is not installed, and no test of another runs this"
                )
                continue
            assert not name or hasattr(importlib.import_module(module), name), (
                f"{fence.place}: {module}.{name}"
            )


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    """What stands at the address that the pages name, with a judge behind it."""
    with JudgeDouble() as judge:
        kwargs = json.dumps({"url": judge.url, "model": "big-judge"})
        with ServerProcess(["--allow-expert", "--operator-kwargs", f"Judge-v0={kwargs}"]) as running:
            yield running


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A reader's folder, with the environment and the files that the pages call theirs."""
    make_readers_folder(tmp_path)
    add_token(tmp_path / "tokens.yaml", "trainer", ["play"])
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


async def finished(code: types.CodeType, names: dict[str, Any], url: str) -> None:
    """Run a program that awaits, with the client that its page has opened before."""
    async with EnvClient(url) as client:
        await eval(code, {"client": client} | names)


RUN_HERE = [fence for fence in FENCES if fence.language == "python" and not (fence.not_run or fence.run_by)]


@pytest.mark.parametrize("fence", RUN_HERE, ids=lambda fence: fence.place)
def test_a_program_runs(fence: Fence, server: ServerProcess, place: Path) -> None:
    if "open_sandbox" in fence.text:
        working_sandbox()
    code = compiled(Fence(fence.page, fence.line, "python", fence.text.replace(ADDRESS, server.url)))
    names: dict[str, Any] = {"__name__": "__main__"}
    if code.co_flags & inspect.CO_COROUTINE:
        asyncio.run(finished(code, names, server.url))
    else:
        exec(code, names)


def test_the_page_of_clients_has_a_program_of_every_client() -> None:
    text = "\n".join(fence.text for fence in FENCES if fence.page == "docs/clients.md")
    for name in ("EnvClient", "RemoteEnv", "RemoteVectorEnv", "RemoteVerifier", "gymnasium.make"):
        assert name in text
