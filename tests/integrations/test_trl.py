"""TRL's `GRPOTrainer` plays environments of a real server: episodes by the class, and a run with the real trainer."""

import inspect
from pathlib import Path

import pytest

from rollgym.clients.protocol.errors import ProblemError
from rollgym.integrations.trl import RemoteToolEnvironment, environment_factory, tasks
from tests.integrations.pages import blocks, run_block
from tests.support.client_server import ServerProcess

LAKE = {"map": ["SFF", "FFF", "FFG"]}


@pytest.fixture(scope="module")
def lake(server: ServerProcess) -> type[RemoteToolEnvironment]:
    return environment_factory(server.url, "FrozenLake-v0", LAKE)


def test_an_environment_of_text_has_one_method(lake: type[RemoteToolEnvironment]) -> None:
    public = [name for name, _ in inspect.getmembers(lake, inspect.isfunction) if not name.startswith("_")]
    assert public == ["act", "get_reward", "reset"]
    assert lake.__name__ == "FrozenLake_v0"


def test_an_episode_gives_its_reward(lake: type[RemoteToolEnvironment]) -> None:
    environment = lake()
    opening = environment.reset(prompt=[], seed=0)
    assert "frozen lake" in opening
    assert opening.endswith("P__\n___\n__G")
    for action in ("Right", "Right", "Down", "Down"):
        assert environment.get_reward() == 0.0
        said = environment.act(action)
    assert said.endswith("The episode is over.")
    assert environment.get_reward() == 1.0
    assert environment.act("Left") == "The episode is over."
    assert environment.get_reward() == 1.0
    assert environment.reset(seed=1).endswith("__G")
    assert environment.get_reward() == 0.0


def test_the_form_of_a_reply_that_the_environment_asks_for_is_said_to_be_the_argument_of_the_tool(
    server: ServerProcess,
) -> None:
    for profile, mark in (("native", "<answer>"), ("gem", "\\boxed{")):
        environment = environment_factory(server.url, "FrozenLake-v0", LAKE | {"profile": profile})()
        instruction, how = environment.reset(seed=0).split("\n\n")[:2]
        form = instruction.rpartition("Reply with the action in this form: ")[2]
        assert how.startswith("Here you reply by calling the tool `act`: its argument `action` is the reply")
        assert form.startswith(mark)
        assert "Invalid" not in environment.act(form)


@pytest.mark.parametrize("row", [{}, {"seed": None}, {"seed": "3"}, {"seed": True}])
def test_a_row_without_a_seed_is_refused(lake: type[RemoteToolEnvironment], row: dict) -> None:
    with pytest.raises(ValueError, match="column 'seed'"):
        lake().reset(**row)


def test_an_environment_of_tools_has_a_method_for_each(server: ServerProcess) -> None:
    environment = environment_factory(server.url, "ToolUse-v0")()
    opening = environment.reset(seed=0)
    assert "Tools, as JSON" not in opening
    assert environment.calculator(expression="6 * 7") == "42"
    assert environment.date_add(date="2026-01-01", days=3) == "2026-01-04"
    said = environment.reply("<answer>nothing</answer>")
    assert said.endswith("The episode is over.")
    assert environment.get_reward() == 0.0


def test_a_call_that_cannot_be_written_is_told_to_the_model_and_the_episode_goes_on(
    server: ServerProcess,
) -> None:
    environment = environment_factory(server.url, "ToolUse-v0")()
    environment.reset(seed=0)
    for expression in ("half \ud800", float("nan"), {1: 2}):
        assert environment.calculator(expression=expression).endswith("Nothing was run.")
    assert environment.calculator(expression="6 * 7") == "42"
    assert environment.get_reward() == 0.0


def test_schemas_of_tools_reach_the_model_whole(server: ServerProcess) -> None:
    transformers_utils = pytest.importorskip("transformers.utils")
    environment = environment_factory(server.url, "ToolUse-v0")()
    schema = transformers_utils.get_json_schema(environment.search)["function"]
    assert schema["name"] == "search"
    assert schema["description"] == "Search the encyclopedia; returns the articles that fit best."
    assert schema["parameters"]["required"] == ["query"]
    assert schema["parameters"]["properties"]["query"]["type"] == "string"
    assert schema["parameters"]["properties"]["top_k"]["type"] == "integer"


@pytest.mark.parametrize("env_id", ["ToolUse-v0", "Retail-v0", "FrozenLake-v0"])
def test_every_method_has_a_schema(server: ServerProcess, env_id: str) -> None:
    transformers_utils = pytest.importorskip("transformers.utils")
    environment = environment_factory(server.url, env_id)()
    for name, _ in inspect.getmembers(type(environment), inspect.isfunction):
        if not name.startswith("_") and name not in ("reset", "get_reward"):
            assert transformers_utils.get_json_schema(getattr(environment, name))["function"]["name"] == name


def test_an_environment_that_is_not_text_is_refused(server: ServerProcess) -> None:
    with pytest.raises(ValueError, match="--gymnasium-text"):
        environment_factory(server.url, "CartPole-v1")


def test_an_episode_that_the_environment_fails_has_no_reward(server: ServerProcess) -> None:
    environment = environment_factory(server.url, "Fragile-v0")()
    environment.reset(seed=0)
    environment.act("walk")
    assert environment.get_reward() is not None
    with pytest.raises(ProblemError):
        environment.act("raise RuntimeError")
    assert environment.get_reward() is None
    environment.reset(seed=0)
    assert environment.get_reward() == 0.0


def test_seeds_follow_each_other() -> None:
    pytest.importorskip("datasets")
    assert tasks(3, first_seed=5)["seed"] == [5, 6, 7]


def test_grpo_trains_on_episodes_of_the_server(
    server: ServerProcess, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The program of docs/coming_from/trl.md, with a tiny model that calls the tool."""
    pytest.importorskip("trl", reason="TRL is installed by .ci/peers, in an environment of its own")
    from tests.support.trl_model import calling_model

    monkeypatch.chdir(tmp_path)
    model, tokenizer = calling_model('{"name": "act", "arguments": {"action": "Right"}}')
    (block,) = blocks("trl.md")
    text = block.text
    for shown, here in (
        ('model="Qwen/Qwen3-0.6B"', "model=model, processing_class=tokenizer"),
        ("max_steps=200, num_generations=8, max_completion_length=1024, logging_steps=1", "**settings"),
        ('{"size": 3}', '{"map": ["SFG", "FFF", "FFF"]}'),
    ):
        assert shown in text
        text = text.replace(shown, here)
    settings = {
        "max_steps": 2,
        "num_generations": 4,
        "per_device_train_batch_size": 4,
        "max_completion_length": 96,
        "max_tool_calling_iterations": 4,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
    }
    trainer = run_block(text, server, model=model, tokenizer=tokenizer, settings=settings)["trainer"]
    logged = [entry for entry in trainer.state.log_history if "reward" in entry]
    assert len(logged) == 2
    assert max(entry["tools/call_frequency"] for entry in logged) > 0
    assert max(entry["rewards/FrozenLake_v0/mean"] for entry in logged) > 0
