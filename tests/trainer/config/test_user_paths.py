"""`~` in settings: the home folder, wherever a setting is a file or a folder."""

from pathlib import Path

import pytest

from rollgym.trainer.config.agents import command_line
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.core.errors import ConfigError

MINIMAL = ["tasks=[{env_id: FrozenLake-v0}]"]
PATHS = {
    "output_dir": "output_dir={}",
    "model.path": "model.path={}",
    "datasets.0.path": "datasets=[{{path: {}, verifier: Math-v0}}]",
    "sft.data.0.path": "sft={{data: [{{path: {}}}]}}",
    "dpo.reference": "dpo={{data: [{{path: a.jsonl}}], reference: {}}}",
    "prompt.chat_template": "prompt.chat_template={}",
    "checkpoint.resume": "checkpoint.resume={}",
    "inference.urls_file": "inference={{kind: vllm, urls_file: {}}}",
    "tracking.mlflow.uri": "tracking.mlflow={{uri: {}}}",
    "agents.sandbox_read_only.0": "agents={{sandbox: namespaces, sandbox_read_only: [{}]}}",
}


@pytest.mark.parametrize("key", PATHS)
def test_the_home_folder_stands_in_place_of_its_sign(key, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "it").write_text("http://a:1\n")
    found = load_settings(None, [*MINIMAL, PATHS[key].format("~/it")])
    for part in key.split("."):
        found = found[int(part)] if part.isdecimal() else getattr(found, part)
    assert found == str(tmp_path / "it")


def test_a_path_below_another_folder_is_as_it_was_written(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    for path in ("runs/~/a", "./~", "a~", "Qwen/Qwen2.5-0.5B"):
        assert load_settings(None, [*MINIMAL, f"output_dir={path}"]).output_dir == path


def test_nobodys_home_is_refused_with_the_way_out():
    with pytest.raises(
        ConfigError, match=r"^output_dir: '~nobody-here' is no home folder: write ./~nobody-here if"
    ):
        load_settings(None, [*MINIMAL, "output_dir=~nobody-here/runs"])


def test_the_command_line_of_an_agent(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    words = command_line("python ~/agent.py --pattern '~x'", here=False)
    assert words == ["python", str(Path(tmp_path, "agent.py")), "--pattern", "~x"]
