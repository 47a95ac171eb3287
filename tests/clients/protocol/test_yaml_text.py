"""Settings that people write: a key that stands twice is a mistake, wherever settings are read."""

import math

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from rollgym.clients.protocol.yaml_text import read_word, read_yaml, write_yaml
from rollgym.env_server.access.tokens import read_tokens
from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.common.settings_loading import load_settings
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
    [
        "!!timestamp 2024-13-45",
        "!!bool maybe",
        "!!int x",
        "!!float x",
        "!!timestamp x",
        "9" * 5000,
        '"\\U00110000"',
    ],
)
def test_a_value_that_is_none_of_its_kind_is_refused(text):
    with pytest.raises(yaml.YAMLError, match="none of its kind"):
        read_yaml(text, "it")
    with pytest.raises(ConfigError, match="is not YAML"):
        load_run(None, [f"name=[{text}]"])


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


CORE = {
    **{word: word for word in ("yes", "no", "on", "off", "Yes", "OFF", "y", "n", "=")},
    **{
        word: word
        for word in ("010", "-010", "00", "007.5", "1:30", "1_000", "0b11", "2024-01-02", "1.2.3", "+")
    },
    **{"true": True, "FALSE": False, "null": None, "~": None, "0o17": 15, "0x1F": 31, "+7": 7, "0": 0},
    **{"1e-6": 1e-6, "1E3": 1000.0, "-2.5e+3": -2500.0, ".5": 0.5, "1.": 1.0, "-.inf": -math.inf},
}


@pytest.mark.parametrize("word", CORE)
def test_words_mean_what_version_1_2_says(word):
    found = (read_yaml(word, "it"), read_yaml(f"a: [{word}]", "it")["a"][0], read_word(word, "it"))
    assert found == (CORE[word],) * 3
    assert {type(each) for each in found} == {type(CORE[word])}


@pytest.mark.parametrize(
    "word",
    [
        *(
            "runs/a #1",
            "# no comment",
            "Answer: yes",
            "- a",
            "-",
            "*.py",
            "&x",
            "!important",
            "%d",
            "@me",
            "`x`",
        ),
        *("| a", "<<", "two\nlines: #3", " blanks ", "a\tb", "5 # five"),
    ],
)
def test_other_words_of_a_command_line_are_themselves(word):
    assert read_word(word, "it") == word


def test_lists_mappings_and_quotes_of_a_command_line_are_yaml():
    assert read_word("[a, 'b #1', 010] # three", "it") == ["a", "b #1", "010"]
    assert read_word(' {a: {b: 1e-6}, c: "5"}', "it") == {"a": {"b": 1e-6}, "c": "5"}
    assert read_word("- a: no\n- 5\n", "it") == [{"a": "no"}, 5]
    assert read_word("\n a:\n  b: 1\n c: 2", "it") == {"a": {"b": 1}, "c": 2}
    assert (read_word("'5'", "it"), read_word("", "it"), read_word(" 5 ", "it")) == ("5", None, 5)
    for word in ("[1", "'a' or 'b'", "{a: 1, a: 2}"):
        with pytest.raises(yaml.YAMLError):
            read_word(word, "it")


_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.from_regex(
    r"[-+0-9._xoeE:~nyoft<=#]{0,8}", fullmatch=True
)
_VALUE = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | _TEXT,
    lambda each: st.lists(each, max_size=3) | st.dictionaries(_TEXT, each, max_size=3),
    max_leaves=6,
)


@given(_VALUE)
def test_what_is_written_reads_back_by_either_version(value):
    text = write_yaml(value)
    for found in (read_yaml(text, "it"), yaml.safe_load(text)):
        assert (type(found), found) == (type(value), value)


def test_a_megabyte_of_digits_is_a_text_or_refused_at_once():
    for word in ("0" * 1_000_000, "1:" * 500_000, "1_" * 500_000):
        assert read_word(word, "it") == word
    with pytest.raises(yaml.YAMLError, match="none of its kind"):
        read_word("1" * 1_000_000, "it")
