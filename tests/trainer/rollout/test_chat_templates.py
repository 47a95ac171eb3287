"""Conversations on templates of the published families' shapes: accepted, continued by ids, and told where changed."""

import itertools
from types import SimpleNamespace

import pytest

from rollgym.trainer.config.checks import check_settings
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.config.rollout import PromptSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.inference.base import GenerationResult
from rollgym.trainer.models.load import stop_ids
from rollgym.trainer.records.trajectory import PrefixBreak, Trajectory
from rollgym.trainer.rollout.context import context_policy
from rollgym.trainer.rollout.prompts import ChatRenderer, Prompt, PromptBuilder
from rollgym.trainer.rollout.recorder import Recorder
from rollgym.trainer.run.policy import chat_renderer
from rollgym.trainer.tasks.task import Task
from tests.support.chat_templates import FAMILIES, QWEN3, tokenizer_of

STRICT = ("gemma", "mistral")
REFUSES_SYSTEM = "it takes no system message in this place; it is put before the first user message"
ALTERNATES = "it demands that user and assistant alternate; messages of one role are joined"
REWRITES = "it rewrites earlier turns, so a turn may be a segment of its own"


def renderer_of(family, **options):
    said = []
    renderer = ChatRenderer(tokenizer_of(family), options)
    renderer.template.say = said.append
    return renderer, said


def play(renderer, turns, instruction="Play."):
    """Feed lists of messages and replies through a builder; return the record and the texts of all prompts."""
    settings = PromptSettings(instruction="system")
    builder = PromptBuilder(renderer, context_policy(settings), settings)
    trajectory, prompts = Trajectory(Task(0, "Any-v0", 0), 0), []
    builder.begin({"instruction": instruction})
    recorder = Recorder(trajectory)
    for number, (messages, reply) in enumerate(turns):
        prompts.append(builder.prompt(trajectory, messages).ids)
        ids = renderer.reply_ids(reply)
        segment = recorder.place(prompts[-1])
        recorder.record(segment, GenerationResult(ids, [0.0] * len(ids), [0] * len(ids)), number)
        builder.replied(messages, reply, segment)
    return trajectory, prompts


def user(*texts):
    return tuple({"role": "user", "content": text} for text in texts)


TURNS = [(user("P__"), "Up"), (user("_P_"), "Down"), (user("__P"), "Left")]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_conversation_is_one_segment_wherever_the_template_only_appends(family):
    renderer, said = renderer_of(family)
    trajectory, prompts = play(renderer, TURNS)
    assert renderer.append_only is (family not in ("qwen3", "deepseek"))
    assert trajectory.prefix_breaks == 0, "a template that may rewrite costs segments only where it does"
    text = tokenizer_of(family).decode(prompts[-1])
    for part in ("Play.", "P__", "Up", "_P_", "Down", "__P"):
        assert text.count(part) == 1
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before)] == before
    if renderer.append_only:
        # What is stored is what the template makes of the whole, tokenised at once.
        messages = [{"role": "system", "content": "Play."}]
        for observation, reply in TURNS[:-1]:
            messages += [*observation, {"role": "assistant", "content": reply}]
        assert prompts[-1] == renderer.prompt([*messages, *TURNS[-1][0]])
    assert said == {
        "gemma": [f"chat template: {REFUSES_SYSTEM}"],
        "mistral": [f"chat template: {REFUSES_SYSTEM}"],
        "qwen3": [f"chat template: {REWRITES}"],
        "deepseek": [f"chat template: {REWRITES}"],
    }.get(family, [])


@pytest.mark.parametrize("family", FAMILIES)
def test_messages_of_one_role_that_follow_each_other(family):
    renderer, said = renderer_of(family)
    turns = [(user("one", "two"), "Up"), (user("three", "four", "five"), "Down")]
    trajectory, prompts = play(renderer, turns, instruction=None)
    text = tokenizer_of(family).decode(prompts[-1])
    joined = family in STRICT
    assert ("one\n\ntwo" in text) is joined
    assert ("three\n\nfour\n\nfive" in text) is joined
    assert said.count(f"chat template: {ALTERNATES}") == int(joined), "and it is said once"
    assert trajectory.prefix_breaks == 0


@pytest.mark.parametrize("family", FAMILIES)
def test_a_turn_ends_with_the_templates_own_closing(family):
    tokenizer = tokenizer_of(family)
    renderer, _ = renderer_of(family)
    closing = tokenizer.convert_tokens_to_ids(FAMILIES[family][2])
    assert renderer.end_of_turn_id == closing
    assert set(renderer.stop_token_ids) == {closing, tokenizer.eos_token_id}


def test_tools_that_a_template_refuses_are_given_as_the_users_words():
    renderer, said = renderer_of("gemma")
    messages = [
        *user("add"),
        {"role": "assistant", "content": "add(1, 2)"},
        {"role": "tool", "content": "3"},
        *user("go on"),
    ]
    text = tokenizer_of("gemma").decode(renderer.prompt(messages))
    assert "<start_of_turn>user\n3\n\ngo on<end_of_turn>" in text
    assert "chat template: it takes no tool message in this place; it is given as the user's" in said


@pytest.mark.parametrize(
    ("family", "content"), [("gemma", ["<start_of_turn>user\nPlay.\n\nboard"]), ("qwen2.5", [])]
)
def test_where_a_system_message_goes(family, content):
    renderer, _ = renderer_of(family)
    text = tokenizer_of(family).decode(
        renderer.prompt([{"role": "system", "content": "Play."}, *user("board")])
    )
    assert all(part in text for part in content)
    if not content:
        assert text.startswith("<|im_start|>system\nPlay.<|im_end|>")
        assert "helpful" not in text


def test_a_system_message_that_moves_is_put_before_the_first_user_message():
    renderer, _ = renderer_of("mistral")
    _, prompts = play(renderer, TURNS)
    text = tokenizer_of("mistral").decode(prompts[-1])
    assert text == "<s>[INST] Play.\n\nP__[/INST]Up</s>[INST] _P_[/INST]Down</s>[INST] __P[/INST]"


@pytest.mark.parametrize(
    ("options", "opening"), [({}, ""), ({"enable_thinking": False}, "<think>\n\n</think>\n\n")]
)
def test_variables_of_the_template_are_set_by_the_run(options, opening):
    renderer, _ = renderer_of("qwen3", **options)
    text = tokenizer_of("qwen3").decode(renderer.prompt(user("board")))
    assert text.endswith(f"<|im_start|>assistant\n{opening}")
    # Turns that opened with a thought are written without it later: never one segment.
    assert not renderer.append_only


def test_what_a_template_writes_of_earlier_thoughts_is_what_the_policy_reads():
    renderer, _ = renderer_of("qwen3")
    turns = [(user("a"), "<think>long</think>Up"), (user("b"), "Down")]
    trajectory, prompts = play(renderer, turns)
    assert [segment.prefix_break for segment in trajectory.segments] == [None, PrefixBreak.REWRITE]
    assert "long" not in tokenizer_of("qwen3").decode(prompts[1])
    assert "Up" in tokenizer_of("qwen3").decode(prompts[1])


def test_a_conversation_that_no_change_makes_acceptable_is_refused_in_words():
    renderer, _ = renderer_of("gemma")
    with pytest.raises(
        ConfigError, match=r"refuses a conversation of 1 messages \(assistant\): Conversation roles"
    ):
        renderer.prompt([{"role": "assistant", "content": "Hello"}])


@pytest.mark.parametrize("name", ["add_generation_prompt", "tools", "tokenize"])
def test_variables_that_the_run_sets_itself_are_refused(name):
    words = ["tasks=[{env_id: FrozenLake-v0}]", f"prompt.template_kwargs={{{name}: true}}"]
    with pytest.raises(ConfigError, match=f"{name}: set by the run itself"):
        load_settings(None, words)


@pytest.mark.parametrize(
    ("of_generation", "of_config", "expected"),
    [(7, 2, {2, 7}), ([7, 8], 2, {2, 7, 8}), (None, None, set()), (None, [3, 4], {3, 4}), ([0], None, {0})],
)
def test_stop_ids_come_from_the_models_generation_config_too(of_generation, of_config, expected):
    model = SimpleNamespace(
        generation_config=SimpleNamespace(eos_token_id=of_generation),
        config=SimpleNamespace(eos_token_id=of_config),
    )
    assert stop_ids(model) == expected
    stops = ChatRenderer(tokenizer_of("llama-3"), {}, stop_ids(model)).stop_token_ids
    assert expected <= set(stops)


def test_parts_of_a_message_stay_parts():
    settings = PromptSettings(instruction="first_user")
    seen = []

    class Listening:
        append_only = False
        template = SimpleNamespace(note=lambda text: None)

        def read(self, messages, tools):
            seen.extend(messages)
            return Prompt([1])

    builder = PromptBuilder(Listening(), context_policy(settings), settings)
    builder.begin({"instruction": "Look."})
    parts = [{"type": "image"}, {"type": "text", "text": "this"}]
    builder.prompt(Trajectory(Task(0, "Any-v0", 0), 0), ({"role": "user", "content": parts},))
    assert seen[0]["content"] == [{"type": "text", "text": "Look."}, *parts]


def test_a_template_that_knows_only_texts_refuses_parts_in_words():
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.chat_template = (
        "{%- for message in messages -%}{{ message.role + ': ' + message.content }}<|im_end|>{% endfor %}"
    )
    with pytest.raises(
        ConfigError, match=r"refuses a conversation of 1 messages \(user\): can only concatenate"
    ):
        ChatRenderer(tokenizer).prompt([{"role": "user", "content": [{"type": "text", "text": "x"}]}])


def test_a_template_of_the_users_replaces_the_tokenizers(tmp_path):
    """Qwen3's own takes earlier thoughts away; one that keeps them makes the conversation one segment."""
    file = tmp_path / "keeps.jinja"
    kept = QWEN3.replace("message.content.split('</think>')[-1].lstrip('\n') if not loop.last else ", "")
    assert kept != QWEN3
    file.write_text(kept, encoding="utf-8")
    words = ["tasks=[{env_id: FrozenLake-v0}]", f"prompt.chat_template={file}"]
    tokenizer = tokenizer_of("qwen3")
    renderer = chat_renderer(load_settings(None, words), tokenizer)
    assert renderer.append_only
    assert tokenizer.chat_template == kept
    trajectory, prompts = play(renderer, [(user("a"), "<think>long</think>Up"), (user("b"), "Down")])
    assert trajectory.prefix_breaks == 0
    assert "long" in tokenizer.decode(prompts[1])
    with pytest.raises(ConfigError, match=r"prompt\.chat_template: there is no .*gone\.jinja here"):
        check_settings(load_settings(None, [words[0], f"prompt.chat_template={tmp_path}/gone.jinja"]))
