"""What a base install, without the packages of any extra, says of what it lacks."""

import ast
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

import rollgym
from rollgym.extras import EXTRAS, ON_AN_INDEX, MissingExtraError, extra_of, install_line, missing_extra
from tests.support.processes import ROOT

IMPORTED_AS = {
    "huggingface-hub": "huggingface_hub",
    "liger-kernel": "liger_kernel",
    "megatron-core": "megatron",
    "math-verify": "math_verify",
    "pillow": "PIL",
    "reasoning-gym": "reasoning_gym",
    "opentelemetry-exporter-otlp-proto-http": "opentelemetry.exporter",
    "opentelemetry-sdk": "opentelemetry.sdk",
}
"""Distributions whose modules are called otherwise."""
BROUGHT_ALONG = {"markupsafe", "sympy"}
"""Modules of the extras' own dependencies that rollgym imports, too."""
FOR_DEVELOPERS = {"dev", "docs"}
NEED_TORCH = {"StepTokens", "SurrogateInputs", "TrajectoryBatch", "model_folder"}
LAKE = "tasks=[{env_id: FrozenLake-v0}]"
CHILD = """
import contextlib, io, json, sys
from tests.support import base_install
commands = json.loads(sys.argv[1])
from rollgym.trainer.cli import main as train
from rollgym.trainer.run.agent_proxy import main as proxy
from rollgym.clients.cli.main import main as env
from rollgym.env_server.cli import main as serve
programs = {"roll-train": train, "roll-agent-proxy": proxy, "roll-env": env, "roll-serve": serve}
answers = []
for program, *words in commands:
    out, err = io.StringIO(), io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        try:
            code = programs[program](words)
        except SystemExit as end:
            code = end.code
    answers.append([code, out.getvalue(), err.getvalue()])
import rollgym
names = {}
for name in rollgym.__all__:
    try:
        getattr(rollgym, name)
    except ImportError as error:
        names[name] = str(error)
print(json.dumps([answers, names]))
"""

NEED_AN_EXTRA = (
    (["roll-train", LAKE], "training needs the package transformers", "train"),
    (["roll-train", "eval", LAKE], "eval needs the package transformers", "train"),
    (["roll-train", "rollout", LAKE], "rollout --policy model needs the package transformers", "train"),
    (["roll-train", "export", LAKE, "--output", "x"], "export needs the package transformers", "train"),
    (["roll-train", "sft", "sft.data=[{path: chats.jsonl}]"], "training needs the package", "train"),
    (["roll-train", "dpo", "dpo.data=[{path: chats.jsonl}]"], "training needs the package", "train"),
    (["roll-train", "reward", "reward.data=[{path: chats.jsonl}]"], "training needs the package", "train"),
    (["roll-train", "replay", "run", "--step", "1"], "replay needs the package transformers", "train"),
    (["roll-train", "report", "run"], "report needs the package", "train"),
    (["roll-train", LAKE, "model.lora={}"], "model.lora needs the package peft", "lora"),
    (["roll-train", LAKE, "tracking.wandb={}"], "tracking.wandb needs the package wandb", "wandb"),
    (["roll-agent-proxy", "--model", "x"], "the proxy needs the package transformers", "train"),
    (["roll-serve", "--port", "0", "--workers", "ray"], "`workers: ray` needs Ray", "ray"),
    (
        ["roll-serve", "--port", "0", "--trace-endpoint", "http://127.0.0.1:4318/v1/traces"],
        "needs the extra otel",
        "otel",
    ),
    (
        ["roll-serve", "--port", "0", "--gateway", "--journal-url", "redis://127.0.0.1"],
        "needs the extra redis",
        "redis",
    ),
    (["roll-env", "sandbox", "check", "docker:python"], "docker needs the package docker", "docker"),
)
WORK = (
    ["roll-train", "algorithms"],
    ["roll-train", "algorithms", "grpo"],
    ["roll-train", LAKE, "--dry-run"],
    ["roll-train", "rollout", LAKE, "--policy", "random", "--episodes", "1"],
    ["roll-env", "verify", "rewards:plus", "item.json"],
)


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[tuple[int, str, str]], dict[str, str]]:
    """What all commands answer in one child interpreter, and which public names cannot be imported."""
    here = tmp_path_factory.mktemp("base")
    (here / "chats.jsonl").write_text('{"prompt": "a", "chosen": "b", "rejected": "c"}\n')
    (here / "item.json").write_text('{"response": "4", "answer": "4", "seed": 1}')
    (here / "run").mkdir()
    (here / "run" / "config.yaml").write_text(
        f"{{tasks: [{{env_id: FrozenLake-v0}}], output_dir: {here}/run}}\n"
    )
    (here / "rewards.py").write_text(
        "from rollgym import Trajectory, Verdict, verifier\n\n\n"
        "@verifier(tasks=[{}])\ndef plus(response, task):\n    return response == task['answer']\n\n\n"
        "def sooner(trajectory: Trajectory) -> list[float]:\n    return [0.0 for _ in trajectory.turns]\n"
    )
    commands = [words for words, *_ in NEED_AN_EXTRA] + list(WORK)
    done = subprocess.run(
        [sys.executable, "-c", CHILD, json.dumps(commands)],
        cwd=here,
        env={"PATH": "/usr/bin:/bin", "PYTHONPATH": str(ROOT), "HOME": str(here)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    answers, names = json.loads(done.stdout.splitlines()[-1])
    return [(code, out, err) for code, out, err in answers], names


def test_every_command_names_the_extra_that_it_lacks_in_one_line(base) -> None:
    for (words, what, extra), (code, out, err) in zip(NEED_AN_EXTRA, base[0], strict=False):
        assert what in err, (words, code, out, err)
        assert f"[{extra}]" in err, (words, err)
        assert "Traceback" not in err
        assert "internal error" not in err
        assert (code, err.count("\n")) == (2, 1), (words, err)


def test_what_needs_no_extra_works_without_any(base) -> None:
    for words, (code, _, err) in zip(WORK, base[0][len(NEED_AN_EXTRA) :], strict=True):
        assert code == 0, (words, err)


def test_every_public_name_can_be_imported_or_names_its_extra(base) -> None:
    assert base[1].keys() == NEED_TORCH
    for name, said in base[1].items():
        assert said.startswith(f"rollgym.{name} needs the package "), said
        assert "[train]" in said


def test_the_table_of_extras_is_that_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    for extra, requirements in project.items():
        if extra in FOR_DEVELOPERS:
            continue
        names = [re.split(r"[^\w.-]", each)[0] for each in requirements if not each.startswith("rollgym[")]
        assert {IMPORTED_AS.get(name, name) for name in names} == set(EXTRAS[extra]) - BROUGHT_ALONG
    assert EXTRAS.keys() == project.keys() - FOR_DEVELOPERS


def test_a_module_of_the_users_is_not_called_an_extra(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "wants_ray.py").write_text("import ray\n")
    monkeypatch.setitem(sys.modules, "ray", None)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ModuleNotFoundError) as raised:
        __import__("wants_ray")
    assert missing_extra(raised.value) is None
    assert extra_of("no_such_package") is None


def test_a_missing_extra_is_an_import_error_with_the_module_and_the_extra() -> None:
    error = MissingExtraError("this needs the package torch", "train", "torch")
    assert isinstance(error, ImportError)
    assert (error.name, error.extra) == ("torch", "train")
    assert str(error) == f"this needs the package torch: {install_line('train')}"


def test_a_clone_is_installed_from_its_folder(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assert install_line("math") == "pip install -e '.[math]'"
    monkeypatch.chdir(ROOT / "docs")
    assert install_line("train", "ray") == f"pip install -e '{ROOT}[train,ray]'"


@pytest.mark.parametrize(
    ("origin", "line"),
    [
        (
            {"url": "file:///tmp/rollgym-0.1.0-py3-none-any.whl", "archive_info": {}},
            "pip install 'rollgym[math] @ file:///tmp/rollgym-0.1.0-py3-none-any.whl'",
        ),
        ({"url": "file:///srv/my%20clone", "dir_info": {}}, "pip install '/srv/my clone[math]'"),
        (
            {"url": "https://host/rollgym", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'rollgym[math] @ git+https://host/rollgym@abc'",
        ),
        (None, "pip install '.[math]'"),
    ],
)
def test_an_installed_copy_is_installed_from_where_it_came_from(
    origin: dict[str, object] | None, line: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    site = tmp_path / "site"
    (site / "rollgym").mkdir(parents=True)
    monkeypatch.setattr("rollgym.extras.__file__", str(site / "rollgym" / "extras.py"))
    record = site / "rollgym-0.1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text("Metadata-Version: 2.1\nName: rollgym\nVersion: 0.1.0\n")
    if origin is not None:
        (record / "direct_url.json").write_text(json.dumps(origin))
    monkeypatch.setattr(sys, "path", [str(site), *sys.path])
    assert install_line("math") == line


def test_a_copy_from_an_index_is_installed_from_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rollgym.extras.__file__", str(tmp_path / "rollgym" / "extras.py"))
    monkeypatch.setattr("rollgym.extras._origin", str)
    monkeypatch.setattr("rollgym.extras.ON_AN_INDEX", True)
    assert install_line("math") == "pip install 'rollgym[math]'"


def test_the_page_of_the_installation_says_whether_it_is_on_an_index() -> None:
    page = (ROOT / "docs" / "installation.md").read_text(encoding="utf-8")
    assert ("not on a package index yet" in page) is not ON_AN_INDEX


def test_human_rendering_names_pygame_alone_and_no_extra_with_games() -> None:
    program = (
        "from tests.support import base_install\n"
        "from gymnasium.error import DependencyNotInstalled\n"
        "from rollgym.clients.client.env import checked_mode\n"
        "try:\n"
        "    checked_mode('CartPole-v1', ['human'], 'human')\n"
        "except DependencyNotInstalled as error:\n"
        "    print(error)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert done.stdout == "render_mode='human' needs pygame on this machine: pip install pygame\n"


def test_no_text_names_an_install_line_that_would_ask_an_index() -> None:
    """The project is not on an index: that name may be anybody's."""
    wrong = re.compile(r"pip install (?:-\S+ )*['\"]?rollgym(?:\[[\w,-]+\])?['\"]?(?! @| *\[)(?=\s|$|`|\")")
    places = (
        "README.md",
        "docs",
        "examples",
        "clients",
        "env_server",
        "envs",
        "sandbox",
        "trainer",
        "deploy",
    )
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for place in places
        for path in ([ROOT / place] if (ROOT / place).is_file() else sorted((ROOT / place).rglob("*")))
        if path.suffix in (".md", ".py", ".yaml", ".yml", ".html", ".js", ".sh")
        for line in path.read_text(encoding="utf-8").splitlines()
        if wrong.search(line)
    ]
    assert not found


def test_the_page_of_the_installation_names_every_extra() -> None:
    page = (ROOT / "docs" / "installation.md").read_text()
    assert [extra for extra in EXTRAS if f"`{extra}`" not in page] == []
    assert rollgym.__all__


HEAVY = ("torch", "transformers", "ray")
REPORT = f"import sys; print([name for name in {HEAVY} if name in sys.modules])"


def run(code: str) -> str:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    ).stdout.splitlines()[-1]


@pytest.mark.parametrize(
    "code",
    [
        "import rollgym; rollgym.EnvClient, rollgym.RemoteEnv, rollgym.RemoteVectorEnv, rollgym.RemoteVerifier",
        "import rollgym.clients.cli.main",
        "import runpy, sys, contextlib; sys.argv = ['roll-serve', '--help']\n"
        "with contextlib.suppress(SystemExit): runpy.run_module('rollgym.env_server', run_name='__main__')",
    ],
)
def test_nothing_heavy_is_imported(code: str) -> None:
    assert run(f"{code}\n{REPORT}") == "[]"


def test_our_environments_are_registered_as_names_only() -> None:
    code = (
        "import sys, rollgym, gymnasium; spec = gymnasium.spec('rollgym/FrozenLake-v0');"
        "print('rollgym.envs.games.frozen_lake' in sys.modules, 'rollgym.clients.client.env' in sys.modules,"
        " 'pydantic' in sys.modules)"
    )
    assert run(code) == "False False False"


def test_gymnasium_finds_them_by_the_name_of_the_package() -> None:
    code = "import gymnasium; print(gymnasium.make('rollgym:rollgym/FrozenLake-v0').spec.id)"
    assert run(code) == "rollgym/FrozenLake-v0"


WITHOUT_PILLOW = """
import importlib.metadata, sys
from importlib.machinery import PathFinder

found = PathFinder.find_spec
PathFinder.find_spec = classmethod(lambda cls, name, *rest: None if name.split(".")[0] == "PIL" else found(name, *rest))
version = importlib.metadata.version
def installed(name):
    if name.lower() in ("pil", "pillow"):
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)
importlib.metadata.version = installed
"""


def test_a_policy_of_text_needs_no_pillow_and_a_run_says_first_that_its_curves_do(tmp_path: Path) -> None:
    """As in an environment with torch and transformers of another library's."""
    tiny = "from rollgym.trainer.models.tiny import build_tiny_tokenizer\nprint(len(build_tiny_tokenizer()) > 100)"
    assert run(WITHOUT_PILLOW + tiny) == "True"
    train = f"from rollgym.trainer.cli import main\nsys.exit(main(['{LAKE}', 'output_dir={tmp_path}/run']))"
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_PILLOW + train], capture_output=True, text=True, check=False
    )
    assert done.returncode == 2
    assert "roll-train: training needs the package PIL, which is not installed" in done.stderr
    assert not (tmp_path / "run").exists()


def test_python_310_can_read_how_it_is_built_and_so_pip_says_there_what_is_needed() -> None:
    tree = ast.parse((ROOT / "setup.py").read_text(), feature_version=(3, 10))
    imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
    imported |= {name.name for node in ast.walk(tree) if isinstance(node, ast.Import) for name in node.names}
    assert imported <= {"os", "re", "shutil", "collections.abc", "pathlib"} | {
        name for name in imported if name is not None and name.partition(".")[0] == "setuptools"
    }
