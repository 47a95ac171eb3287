"""Inspect AI, with its mock model, on environments and verifiers of a real server."""

import math
from typing import Any

import pytest

from rollgym.integrations.inspect_ai import environment_task, verifier_task
from tests.integrations.pages import blocks, run_block
from tests.support.client_server import ServerProcess
from tests.support.snippets import Fence

inspect_ai = pytest.importorskip(
    "inspect_ai", reason="Inspect is installed by .ci/peers, in an environment of its own"
)


def evaluated(task: Any, outputs: list[Any], tmp_path: Any) -> Any:
    """The log of an evaluation by a model that gives these outputs one after another."""
    from inspect_ai import eval as evaluate
    from inspect_ai.model import ModelUsage, get_model

    for output in outputs:
        # Without it, Inspect fetches a tokenizer to count tokens.
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
    model = get_model("mockllm/model", custom_outputs=outputs)
    (log,) = evaluate(
        task, model=model, log_dir=str(tmp_path), display="none", max_samples=1, fail_on_error=False
    )
    assert log.status == "success", log.error
    assert [sample.error.traceback for sample in log.samples if sample.error] == []
    return log


@pytest.mark.parametrize("block", blocks("inspect_ai.md"), ids=lambda block: block.place)
def test_the_page_is_right(
    server: ServerProcess, tmp_path: Any, monkeypatch: pytest.MonkeyPatch, block: Fence
) -> None:
    from inspect_ai.model import ModelUsage, get_model

    def answer(*_: Any) -> Any:
        output = says("<answer>408</answer>")
        output.usage = ModelUsage(input_tokens=1, output_tokens=1, total_tokens=2)
        return output

    monkeypatch.chdir(tmp_path)
    model = get_model("mockllm/model", custom_outputs=answer)
    # A model with tools that never submits an answer is stopped without anybody having asked for it.
    limit = "" if "tools_of" in block.text else ", message_limit=6"
    text = block.text.replace('model="openai/gpt-4.1-mini"', f'model=model, display="none"{limit}')
    (log,) = run_block(text, server, model=model)["logs"]
    assert log.status == "success"
    assert [sample.error for sample in log.samples if sample.error] == []
    assert {sample.limit.type for sample in log.samples} == {"message"}


def says(text: str) -> Any:
    from inspect_ai.model import ModelOutput

    return ModelOutput.from_content("mockllm/model", text)


def calls(tool: str, **arguments: Any) -> Any:
    from inspect_ai.model import ModelOutput

    return ModelOutput.for_tool_call("mockllm/model", tool, arguments)


def values(log: Any) -> dict[str, float]:
    return {score.name: score.metrics["mean"].value for score in log.results.scores}


def test_an_episode_is_played_and_scored_by_the_environment(server: ServerProcess, tmp_path: Any) -> None:
    task = environment_task(server.url, "FrozenLake-v0", {"map": ["SFF", "FFF", "FFG"]}, episodes=2)
    won = [says(f"<answer>{move}</answer>") for move in ("Right", "Right", "Down", "Down")]
    lost = [says("no action")] * 64
    log = evaluated(task, won + lost, tmp_path)
    assert values(log) == {"success": 0.5, "reward": 0.5}
    first = log.samples[0].messages
    assert "frozen lake" in first[0].text
    assert first[2].text == "_P_\n___\n__G"


def test_a_limit_of_inspect_ends_an_episode_that_is_scored(server: ServerProcess, tmp_path: Any) -> None:
    task = environment_task(server.url, "FrozenLake-v0", episodes=1)
    task.message_limit = 4
    log = evaluated(task, [says("no action")] * 9, tmp_path)
    assert values(log) == {"success": 0.0, "reward": 0.0}


def test_an_environment_that_says_nothing_of_success_is_unscored(
    server: ServerProcess, tmp_path: Any
) -> None:
    task = environment_task(server.url, "Random-v0", episodes=2, max_turns=2)
    log = evaluated(task, [says("1")] * 4, tmp_path)
    success, reward = (
        score for name in ("success", "reward") for score in log.results.scores if score.name == name
    )
    assert (success.scored_samples, success.unscored_samples) == (0, 2)
    assert (reward.scored_samples, reward.unscored_samples) == (2, 0)
    assert math.isnan(log.samples[0].scores["environment"].value["success"])


def test_tools_are_called_in_the_environment(server: ServerProcess, tmp_path: Any) -> None:
    task = environment_task(server.url, "ToolUse-v0", episodes=1)
    log = evaluated(task, [calls("calculator", expression="6 * 7"), says("<answer>0</answer>")], tmp_path)
    results = [message for message in log.samples[0].messages if message.role == "tool"]
    assert [message.text for message in results] == ["42"]
    assert values(log)["reward"] == 0.0


def test_a_verifier_scores_answers(server: ServerProcess, tmp_path: Any) -> None:
    items = [{"question": "2 + 2"}, {"question": "2 + 3"}]
    task = verifier_task(server.url, "Arithmetic-v0", items, instruction="Answer in answer tags.")
    log = evaluated(task, [says("<answer>4</answer>"), says("<answer>4</answer>")], tmp_path)
    assert values(log) == {"Arithmetic-v0": 0.5}
    assert log.samples[0].input == "Answer in answer tags.\n\n2 + 2"


def test_tools_come_by_mcp(server: ServerProcess, tmp_path: Any) -> None:
    pytest.importorskip("mcp")
    items = [{"question": "6 * 7"}]
    task = verifier_task(server.url, "Arithmetic-v0", items, tools_of="ToolUse-v0")
    outputs = [
        calls("reset"),
        calls("calculator", expression="6 * 7"),
        calls("submit", answer="<answer>42</answer>"),
    ]
    log = evaluated(task, outputs, tmp_path)
    results = [message.text for message in log.samples[0].messages if message.role == "tool"]
    assert any("42" in text for text in results[1:2])
    assert values(log) == {"Arithmetic-v0": 1.0}


def test_an_item_without_its_question_is_refused(server: ServerProcess) -> None:
    with pytest.raises(ValueError, match="prompt_field"):
        verifier_task(server.url, "Arithmetic-v0", [{"expression": "2 + 2"}])
