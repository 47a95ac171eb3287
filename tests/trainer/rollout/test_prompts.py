"""Prompts continue the stored tokens wherever they can, and say so where they cannot."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.config.rollout import PromptSettings
from rollgym.trainer.core.errors import ConfigError, UnplayableTaskError
from rollgym.trainer.inference.base import GenerationResult
from rollgym.trainer.models.tiny import CHAT_TEMPLATE, build_tiny_tokenizer
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.rollout.context import context_policy, with_instruction
from rollgym.trainer.rollout.prompts import ChatRenderer, PromptBuilder
from rollgym.trainer.rollout.recorder import Recorder
from rollgym.trainer.tasks.task import Task

TOKENIZER = build_tiny_tokenizer()
RENDERER = ChatRenderer(TOKENIZER)
# Drops what the assistant thought in earlier turns, as some published templates do.
FORGETFUL = (
    "{%- for message in messages -%}<|{{ message.role }}|>"
    "{%- if message.role == 'assistant' -%}{{ message.content.split('</think>')[-1] }}"
    "{%- else -%}{{ message.content }}{%- endif -%}<|end|>{%- endfor -%}"
    "{%- if add_generation_prompt -%}<|assistant|>{%- endif -%}"
)


TOOLS = [
    {
        "type": "function",
        "function": {"name": "add", "description": "Adds.", "parameters": {"type": "object"}},
    }
]
WITH_TOOLS = (
    "{%- for tool in tools or [] -%}<|tool|>{{ tool.function.name }}<|end|>{%- endfor -%}" + CHAT_TEMPLATE
)


def play(builder: PromptBuilder, observations, replies, *, closed=True):
    """Feed observations and replies through a builder and return the record and every prompt."""
    trajectory, prompts = Trajectory(Task(0, "Any-v0", 0), 0), []
    builder.begin({"instruction": "Play.", "tools": TOOLS})
    recorder = Recorder(trajectory)
    for turn, (observation, reply) in enumerate(zip(observations, replies, strict=True)):
        messages = ({"role": "user", "content": observation},)
        prompts.append(builder.prompt(trajectory, messages).ids)
        ids = TOKENIZER.encode(reply, add_special_tokens=False)
        if closed:
            ids.append(RENDERER.end_of_turn_id)
        segment = recorder.place(prompts[-1])
        recorder.record(segment, GenerationResult(ids, [0.0] * len(ids), [0] * len(ids)), turn)
        builder.replied(messages, reply, segment)
    return trajectory, prompts


def builder_of(renderer=RENDERER, placement="system", **settings):
    settings = PromptSettings(instruction=placement, **settings)
    return PromptBuilder(renderer, context_policy(settings), settings)


texts = st.text(st.characters(codec="utf-8", exclude_characters="<|>"), max_size=12)


@given(turns=st.lists(st.tuples(texts, texts), min_size=1, max_size=4), closed=st.booleans())
def test_full_history_is_one_segment_equal_to_the_template(turns, closed):
    observations, replies = [turn[0] for turn in turns], [turn[1] for turn in turns]
    trajectory, prompts = play(builder_of(), observations, replies, closed=closed)
    assert (len(trajectory.segments), trajectory.prefix_breaks) == (1, 0)
    messages = [{"role": "system", "content": "Play."}]
    for observation, reply, prompt in zip(observations, replies, prompts, strict=True):
        messages.append({"role": "user", "content": observation})
        assert TOKENIZER.decode(prompt) == TOKENIZER.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True
        )
        messages.append({"role": "assistant", "content": reply})
    # Each prompt starts with all that was stored before it.
    for before, after in itertools.pairwise(prompts):
        assert after[: len(before)] == before


def test_a_reply_cut_by_its_length_is_closed_by_a_masked_token():
    trajectory, _ = play(builder_of(), ["a", "b"], ["Up", "Up"], closed=False)
    segment = trajectory.segments[0]
    end = trajectory.segments[0].ids.index(RENDERER.reply_ids("Up")[0]) + 1
    assert segment.ids[end] == RENDERER.end_of_turn_id
    assert segment.action_mask[end] is False


def test_the_closing_token_is_not_repeated():
    trajectory, _ = play(builder_of(placement="none"), ["a", "b"], ["Up", "Up"])
    ids = trajectory.segments[0].ids
    assert ids.count(RENDERER.end_of_turn_id) == 2 + 2  # two observations, two replies


@pytest.mark.parametrize(
    ("context", "segments"), [("full_history", 1), ("last_turns", 3), ("single_turn", 4)]
)
def test_windows_open_segments_and_count_them(context, segments):
    builder = builder_of(context=context, **({"turns": 2} if context == "last_turns" else {}))
    trajectory, _ = play(builder, ["a", "b", "c", "d"], ["Up"] * 4)
    assert len(trajectory.segments) == segments
    assert trajectory.prefix_breaks == segments - 1


def test_a_template_that_rewrites_the_past_is_found_out_and_breaks_the_prefix():
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = FORGETFUL
    renderer = ChatRenderer(tokenizer)
    assert RENDERER.append_only
    assert not renderer.append_only
    trajectory, prompts = play(builder_of(renderer), ["a", "b"], ["<think>x</think>Up", "Up"])
    assert trajectory.prefix_breaks == 1
    assert (
        tokenizer.decode(prompts[1])
        == "<|system|>Play.<|end|><|user|>a<|end|><|assistant|>Up<|end|><|user|>b<|end|><|assistant|>"
    )


@pytest.mark.parametrize("context", ["full_history", "single_turn"])
def test_the_template_is_given_the_tools_if_it_takes_them(context):
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = WITH_TOOLS
    renderer = ChatRenderer(tokenizer)
    renderer.require_tools()
    _, told = play(builder_of(renderer, context=context, tools="template"), ["a", "b"], ["Up", "Up"])
    _, untold = play(builder_of(renderer, context=context), ["a", "b"], ["Up", "Up"])
    for prompt, without in zip(told, untold, strict=True):
        assert tokenizer.decode(prompt) == "<|tool|>add<|end|>" + tokenizer.decode(without)
    with pytest.raises(ValueError, match="passes over tools"):
        RENDERER.require_tools()


def test_a_tokenizer_without_a_template_is_refused():
    tokenizer = build_tiny_tokenizer()
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="no chat template"):
        ChatRenderer(tokenizer)


def test_where_the_instruction_goes():
    messages = [{"role": "user", "content": "board"}]
    assert with_instruction(messages, "Play.", "none") == messages
    assert with_instruction(messages, "Play.", "system")[0] == {"role": "system", "content": "Play."}
    assert with_instruction(messages, "Play.", "first_user") == [
        {"role": "user", "content": "Play.\n\nboard"}
    ]
    assert with_instruction(messages, None, "system") == messages


def test_a_text_that_spells_a_token_which_the_model_does_not_know_is_refused():
    """Some tokenizers have more tokens than their model has rows for."""
    tokenizer = build_tiny_tokenizer()
    known = len(tokenizer)
    tokenizer.add_tokens(["<|added|>"])
    renderer = ChatRenderer(tokenizer, vocabulary=known)
    renderer.prompt([{"role": "user", "content": "Which way?"}])
    message = rf"a text holds <\|added\|>, id {known} of the tokenizer, and the model knows ids below {known}: keep it"
    with pytest.raises(UnplayableTaskError, match=message):
        renderer.prompt([{"role": "user", "content": "Which <|added|> way?"}])
    with pytest.raises(UnplayableTaskError, match=message):
        renderer.tail([{"role": "user", "content": "<|added|>"}], renderer.end_of_turn_id)
    tokenizer.chat_template = tokenizer.chat_template.replace("<|end|>", "<|added|>")
    with pytest.raises(ConfigError, match=message):
        ChatRenderer(tokenizer, vocabulary=known)


@pytest.mark.parametrize(("dated", "renderings"), [(False, 1), (True, 3)])
def test_equal_messages_are_rendered_once_unless_the_template_writes_the_date(monkeypatch, dated, renderings):
    tokenizer = build_tiny_tokenizer()
    if dated:
        tokenizer.chat_template = "<|system|>{{ strftime_now('%d %b %Y') }}<|end|>" + CHAT_TEMPLATE
    renderer = ChatRenderer(tokenizer)
    rendered = []
    text = renderer.template.text
    monkeypatch.setattr(
        renderer.template, "text", lambda *seen, **options: rendered.append(seen) or text(*seen, **options)
    )
    messages = ({"role": "user", "content": "Where to?"},)
    for read in (renderer.read, lambda shown: renderer.tail(shown, 0)):
        rendered.clear()
        prompts = [read(messages).ids for _ in range(3)]
        assert len(rendered) == renderings
        assert prompts[0] == prompts[1] == prompts[2]
        # Who is given ids may change them.
        prompts[0].append(0)
        assert prompts[1] == prompts[2] == read(messages).ids
    assert renderer.tail(messages, renderer.end_of_turn_id).ids == renderer.tail(messages, 0).ids[1:]
    assert renderer.read([*messages, {"role": "user", "content": "Up?"}]).ids != renderer.read(messages).ids


class Counting:
    """A tokenizer that counts how often its template writes a conversation."""

    def __init__(self, template=CHAT_TEMPLATE):
        self._tokenizer = build_tiny_tokenizer()
        self._tokenizer.chat_template = template
        self.written = 0

    def __getattr__(self, name):
        return getattr(self._tokenizer, name)

    def __call__(self, *words, **named):
        return self._tokenizer(*words, **named)

    def apply_chat_template(self, *words, **named):
        self.written += 1
        return self._tokenizer.apply_chat_template(*words, **named)


ASKED = [{"role": "system", "content": "Play."}, {"role": "user", "content": "P__\n_O_"}]


def test_conversations_that_differ_are_told_apart():
    other = [ASKED[0], {"role": "assistant", "content": ASKED[1]["content"]}]
    assert RENDERER.prompt(ASKED) != RENDERER.prompt(other)
    assert RENDERER.prompt(ASKED) != RENDERER.tail(ASKED, 0).ids
    assert RENDERER.prompt(ASKED) != ChatRenderer(Counting(WITH_TOOLS)).prompt(ASKED, TOOLS)


@pytest.mark.parametrize(
    ("template", "conversation"),
    [
        ("{#- strftime_now -#}" + CHAT_TEMPLATE, ASKED),
        (CHAT_TEMPLATE, [{"role": "user", "content": "_O" * 4_000}]),
    ],
    ids=["a template that may write the date", "a long conversation"],
)
def test_what_may_change_or_is_long_is_written_each_time(template, conversation):
    tokenizer = Counting(template)
    renderer = ChatRenderer(tokenizer)
    before = tokenizer.written
    assert renderer.prompt(conversation) == renderer.prompt(conversation)
    assert tokenizer.written == before + 2
