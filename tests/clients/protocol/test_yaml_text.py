"""Settings that people write: a key that stands twice is a mistake, wherever settings are read."""

import pytest
import yaml

from rollgym.clients.protocol.yaml_text import read_yaml
from rollgym.env_server.access.tokens import read_tokens
from rollgym.env_server.common.settings import ConfigurationError, load_settings
from rollgym.trainer.config.load import load_settings as load_run
from rollgym.trainer.core.errors import ConfigError


@pytest.mark.parametrize(
    "text",
    [
        "a: 1\nb: 2\na: 3\n",
        "a: {b: 1,\n b: 2}",
        "{a: 1, 'a': 2}",
        "1: x\n0x1: y\n",
        "x: &x {a: 1}\ny: {<<: *x, b: 1, b: 2}",
    ],
)
def test_a_key_that_stands_twice_is_refused_with_its_lines(text):
    with pytest.raises(yaml.YAMLError, match=r"stands in lines \d and \d"):
        read_yaml(text, "it")


def test_what_is_merged_in_may_be_laid_over():
    found = read_yaml("x: &x {a: 1, b: 1}\ny: {<<: *x, b: 2}\nz: {<<: [*x, *x]}\n2: two\n", "it")
    assert found == {"x": {"a": 1, "b": 1}, "y": {"a": 1, "b": 2}, "z": {"a": 1, "b": 1}, 2: "two"}
    assert read_yaml("", "it") is None


def test_what_is_nested_too_deep_is_refused():
    with pytest.raises(yaml.YAMLError, match="nested too deep"):
        read_yaml("[" * 100_000, "it")


@pytest.mark.parametrize(
    "text",
    ["2024-13-45", "!!bool maybe", "!!int x", "!!float x", "!!timestamp x", "9" * 5000, '"\\U00110000"'],
)
def test_a_value_that_is_none_of_its_kind_is_refused(text):
    with pytest.raises(yaml.YAMLError, match="none of its kind"):
        read_yaml(text, "it")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_run(None, [f"name={text}"])


def test_the_place_of_a_mistake_is_named_as_its_reader_knows_it():
    with pytest.raises(
        yaml.YAMLError, match=r"^line 2, column 4: expected ',' or ']', but got '<stream end>'$"
    ):
        read_yaml("a: 1\nb: [1\n", "run.yaml")


def test_files_of_settings_refuse_it(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_text("steps: 3\nseed: 1\nsteps: 4\n")
    with pytest.raises(
        ConfigError,
        match=r"settings\.yaml is not YAML: line 3, column 1: the key 'steps' stands in lines 1 and 3",
    ):
        load_run(path)
    with pytest.raises(ConfigError, match="the key 'size' stands in lines 1 and 1"):
        load_run(None, ["tasks.0.kwargs={size: 3, size: 4}"])
    path.write_text("port: 3\nport: 4\n")
    with pytest.raises(ConfigurationError, match=r"cannot read .*the key 'port' stands in lines 1 and 2"):
        load_settings({}, path)
    path.write_text("tokens: []\ntokens: []\n")
    with pytest.raises(ConfigurationError, match="the key 'tokens' stands in lines 1 and 2"):
        read_tokens(path)


def test_a_file_of_a_servers_settings_that_is_no_text_is_named(tmp_path):
    path = tmp_path / "settings.yaml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigurationError, match=r"cannot read .*settings\.yaml"):
        load_settings({}, path)
