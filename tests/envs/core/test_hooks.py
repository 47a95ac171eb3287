"""Hooks of base classes: their old names work, what is missing is named, and an expert is optional."""

import warnings
from collections.abc import Mapping
from typing import Any

import pytest

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.envs.adapters.pettingzoo import PettingZooAdapter
from rollgym.envs.core.text_game import Move, Refusal, TextGame
from rollgym.envs.games.frozen_lake import FrozenLakeEnv
from rollgym.envs.games.game_2048 import Game2048Env
from rollgym.envs.tools import base
from rollgym.envs.tools.base import ToolEnv, TurnResult
from rollgym.envs.tools.mcp_tools import McpToolsEnv
from rollgym.envs.tools.tool import Tool, Toolbox, tool_parameters
from rollgym.envs.tools.tool_use import ToolUseEnv
from rollgym.envs.verifiers.function import TaskVerifier

SUBMIT = Tool("submit", "End.", tool_parameters(), lambda: "submitted")


class Plain(ToolEnv):
    """The least that a tool environment needs."""

    metadata = {"description": "Submit."}

    def __init__(self) -> None:
        super().__init__(Toolbox([SUBMIT]), max_calls_per_turn=1, max_episode_steps=5)

    def start_episode(self, options: Mapping[str, Any]) -> str:
        return "Submit."

    def describe_rules(self) -> str:
        return "Submit."


def call(name: str) -> str:
    return f'<tool_call>{{"name": "{name}", "arguments": {{}}}}</tool_call>'


def test_two_hooks_are_enough_for_a_tool_environment() -> None:
    env = Plain()
    observation, info = env.reset(seed=1)
    assert (observation, info["rules"]) == ("Submit.", "Submit.")
    assert "submitted" in env.step(call("submit"))[0]
    observation, _, terminated, _, info = env.step("hello")
    assert (observation, terminated) == ("error: the reply calls no tool.", False)
    assert not info["action_is_valid"]


def test_an_environment_without_an_expert_says_so() -> None:
    assert Plain.metadata["expert"] is False
    with pytest.raises(ValueError, match="Plain has no expert"):
        Plain().reset(options={"expert": True})


def test_an_expert_is_known_by_its_hook() -> None:
    class Skilled(Plain):
        def expert_turn(self) -> ToolCall | str:
            return ToolCall("submit")

    assert Skilled.metadata["expert"] is True
    assert call("submit") == Skilled().reset(options={"expert": True})[1]["expert_action"].replace("\n", "")


def test_metadata_that_are_left_out_are_those_of_the_parent() -> None:
    assert Plain.metadata["description"] == "Submit."
    assert Plain.metadata["reset_options"] == ToolEnv.metadata["reset_options"]
    assert "description" not in ToolEnv.metadata


def test_what_a_class_must_define_is_named_when_it_is_made() -> None:
    class Half(ToolEnv):
        def start_episode(self, options: Mapping[str, Any]) -> str:
            return ""

    with pytest.raises(TypeError, match=r"^Half must define describe_rules$"):
        Half(Toolbox([SUBMIT]), max_calls_per_turn=1, max_episode_steps=5)


def test_a_tool_environment_with_old_names_works_and_is_warned_once() -> None:
    with pytest.warns(DeprecationWarning, match=r"Old overrides _begin, _hear.* rename to start_") as caught:

        class Old(Plain):
            def _begin(self, options: Mapping[str, Any]) -> str:
                return f"Old. {super()._begin(options)}"  # type: ignore[misc]

            def _hear(self, text: str) -> TurnResult | str:
                return TurnResult("Heard.", 1.0, terminated=True, success=True)

            def _expert_turn(self) -> ToolCall | str:
                return "done"

    assert len(caught) == 1
    assert caught[0].filename == __file__
    env = Old()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        observation, info = env.reset(options={"expert": True})
        assert (observation, info["expert_action"]) == ("Old. Submit.", "done")
        assert env.step("hello")[:3] == ("Heard.", 1.0, True)


def test_a_new_class_may_derive_from_one_with_old_names() -> None:
    with pytest.warns(DeprecationWarning, match="overrides _begin"):

        class Old(Plain):
            def _begin(self, options: Mapping[str, Any]) -> str:
                return "old"

    class New(Old):
        def start_episode(self, options: Mapping[str, Any]) -> str:
            return f"{super().start_episode(options)}, and new"

    with pytest.warns(DeprecationWarning, match="overrides _begin"):

        class Newest(New):
            def _begin(self, options: Mapping[str, Any]) -> str:
                return f"{super()._begin(options)}, and newest"  # type: ignore[misc]

    assert Newest().reset()[0] == "old, and new, and newest"


def test_a_hook_of_a_mixin_counts_by_either_name() -> None:
    class Mixin:
        def _hear(self, text: str) -> TurnResult | str:
            return TurnResult("mixed in")

    with pytest.warns(DeprecationWarning, match="Mixed overrides _hear"):

        class Mixed(Mixin, Plain):
            pass

    env = Mixed()
    env.reset()
    assert env.step("hello")[0] == "mixed in"


def test_a_game_with_old_names_works() -> None:
    with pytest.warns(
        DeprecationWarning, match="Guess overrides _begin, _read, _move, _board, _facts, _rules"
    ):

        class Guess(TextGame[str]):
            def __init__(self) -> None:
                super().__init__("a word", "yes", max_episode_steps=2)

            def _begin(self, options: Mapping[str, Any]) -> None:
                self._words: list[str] = []

            def _read(self, text: str) -> str | Refusal:
                return text

            def _move(self, action: str) -> Move:
                self._words.append(action)
                return Move(1.0, terminated=True, success=True)

            def _board(self) -> str:
                return " ".join(self._words)

            def _facts(self) -> dict[str, Any]:
                return {"state": {"words": self._words}}

            def _rules(self) -> str:
                return "Say a word."

    env = Guess()
    assert env.reset()[1]["instruction"].startswith("Say a word.")
    assert env.step("yes")[:3] == ("yes", 1.0, True)
    assert Guess.metadata["expert"] is False


def test_a_verifier_with_old_names_works() -> None:
    with pytest.warns(DeprecationWarning, match="rename to grade, answer_instruction"):

        class Old(TaskVerifier):
            tasks = [{"question": "What is 6 * 7?"}]
            instructs = "Reply with a number."

            def worth(self, response: str, task: Mapping[str, Any]) -> bool:
                return response == "42"

    assert Old().instruction() == "Reply with a number."
    assert Old().score("42", {}).score == 1.0


def test_the_result_of_a_turn_is_found_by_its_old_name() -> None:
    with pytest.warns(DeprecationWarning, match="TurnResult"):
        assert base.Heard is TurnResult
    with pytest.raises(AttributeError, match="no attribute 'Herd'"):
        base.Herd  # noqa: B018


def test_our_own_environments_say_by_their_hooks_whether_they_have_an_expert() -> None:
    for environment in (FrozenLakeEnv, ToolUseEnv):
        assert environment.metadata["expert"] is True
    for environment in (Game2048Env, McpToolsEnv, PettingZooAdapter):
        assert environment.metadata["expert"] is False
