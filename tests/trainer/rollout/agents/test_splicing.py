"""Conversations as agents send them become prompts in which nothing that was sampled is tokenised again."""

import pytest

from rollgym.trainer.rollout.agents.errors import ApiError
from rollgym.trainer.rollout.agents.replies import read_reply
from rollgym.trainer.rollout.agents.splicing import (
    AgentConversation,
    Found,
    ReplyIndex,
    SampledReply,
    SplicingRenderer,
    message_of,
)
from rollgym.trainer.rollout.prompts import ChatRenderer
from tests.support.agent_policy import tool_tokenizer
from tests.support.chat_templates import FAMILIES, tokenizer_of

TOOLS = [{"type": "function", "function": {"name": "add", "description": "", "parameters": {}}}]
CALL = '<tool_call>\n{"name":   "add", "arguments": {"b":1,  "a":2}}\n</tool_call>'


def user(text):
    return {"role": "user", "content": text}


class Talk:
    """A policy and an agent that talk, with ids that no tokenizer would have chosen."""

    def __init__(self, tokenizer, tools=()):
        self.tokenizer = tokenizer
        self.renderer = ChatRenderer(tokenizer)
        self.splicing = SplicingRenderer(self.renderer)
        self.book = ReplyIndex()
        self.tools = list(tools)
        self.stored = ()

    def prompt(self, messages):
        conversation = AgentConversation.of(messages, self.tools)
        return self.splicing.prompt(conversation, self.book.found(conversation), self.stored).ids

    def reply(self, messages, text, *, closed=True, thinks=False):
        # Letter by letter: another way to write the same text in tokens.
        ids = [each for letter in text for each in self.tokenizer.encode(letter, add_special_tokens=False)]
        ids += [self.renderer.end_of_turn_id] * closed
        reply = read_reply(text, "hermes" if self.tools else None, begun=thinks)
        call_ids = tuple(f"id{number}" for number in range(len(reply.calls)))
        sampled = SampledReply(tuple(ids), text, reply, call_ids)
        self.book.note(AgentConversation.of(messages, self.tools), sampled)
        return ids, message_of(sampled)


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "qwen3"])
@pytest.mark.parametrize("closed", [True, False])
def test_a_conversation_that_goes_on_is_the_stored_ids_and_a_tail(family, closed):
    talk = Talk(tokenizer_of(family))
    messages = [user("Left or right?")]
    stored = talk.prompt(messages)
    for number in range(3):
        ids, message = talk.reply(messages, f"left {number}", closed=closed)
        stored += ids
        messages += [message, user("and now?")]
        prompt = talk.prompt(messages)
        assert prompt[: len(stored)] == stored
        assert prompt == stored + talk.renderer.tail([user("and now?")], stored[-1]).ids
        stored = prompt


def test_calls_of_tools_come_back_as_they_were_sampled():
    talk = Talk(tool_tokenizer(), TOOLS)
    messages = [user("2 + 1?")]
    stored = talk.prompt(messages)
    ids, message = talk.reply(messages, f"I add.\n{CALL}\n{CALL}")
    assert len(message["tool_calls"]) == 2
    results = [{"role": "tool", "content": "3", "tool_call_id": each["id"]} for each in message["tool_calls"]]
    prompt = talk.prompt([*messages, message, *results])
    assert prompt[: len(stored) + len(ids)] == stored + ids
    assert talk.tokenizer.decode(prompt[len(stored) + len(ids) :]).count("<tool_response>") == 2


def test_arguments_that_were_written_anew_are_the_same():
    talk = Talk(tool_tokenizer(), TOOLS)
    messages = [user("2 + 1?")]
    ids, message = talk.reply(messages, CALL)
    (call,) = message["tool_calls"]
    again = {
        "role": "assistant",
        "content": "",
        "tool_calls": [
            {"id": "another", "type": "function", "function": {"name": "add", "arguments": {"a": 2, "b": 1}}}
        ],
    }
    assert call["function"]["arguments"] == again["tool_calls"][0]["function"]["arguments"]
    prompt = talk.prompt([*messages, again, user("so?")])
    start = len(talk.prompt(messages))
    assert prompt[start : start + len(ids)] == ids


@pytest.mark.parametrize("change", ["content", "arguments", "name", "reasoning"])
def test_a_reply_that_was_altered_is_text(change):
    talk = Talk(tool_tokenizer(), TOOLS)
    messages = [user("2 + 1?")]
    ids, message = talk.reply(messages, f"<think>\nhm\n</think>\n\nWell.{CALL}")
    function = dict(message["tool_calls"][0]["function"])
    match change:
        case "content":
            message["content"] = "Well!"
        case "arguments":
            function["arguments"] = {"a": 2}
        case "name":
            function["name"] = "sub"
        case "reasoning":
            message["reasoning_content"] = "another thought"
    message["tool_calls"] = [message["tool_calls"][0] | {"function": function}]
    prompt = talk.prompt([*messages, message, user("so?")])
    start = len(talk.prompt(messages))
    assert prompt[start : start + len(ids)] != ids


def test_thinking_may_be_left_out_and_comes_back():
    talk = Talk(tool_tokenizer(), TOOLS)
    messages = [user("2 + 1?")]
    ids, message = talk.reply(messages, "<think>\nlong thoughts\n</think>\n\n3")
    assert message.pop("reasoning_content") == "long thoughts"
    prompt = talk.prompt([*messages, message, user("sure?")])
    start = len(talk.prompt(messages))
    assert prompt[start : start + len(ids)] == ids


def test_a_template_that_drops_thinking_has_its_way():
    talk = Talk(tokenizer_of("qwen3"))
    messages = [user("2 + 1?")]
    _, message = talk.reply(messages, "<think>\nlong thoughts\n</think>\n\n3")
    text = talk.tokenizer.decode(talk.prompt([*messages, message, user("sure?")]))
    assert "long thoughts" not in text
    assert "<|im_start|>assistant\n3<|im_end|>" in text
    assert talk.splicing._mark not in text


def test_replies_without_thinking_go_on_even_there():
    talk = Talk(tokenizer_of("qwen3"))
    messages = [user("2 + 1?")]
    stored = talk.prompt(messages)
    ids, message = talk.reply(messages, "3")
    assert talk.prompt([*messages, message, user("sure?")])[: len(stored + ids)] == stored + ids


def test_among_equal_replies_the_one_behind_the_same_conversation_is_meant():
    talk = Talk(tool_tokenizer())
    first, second = [user("a")], [user("b")]
    ids, message = talk.reply(first, "yes")
    other = SampledReply((5, 6, 7), "yes", read_reply("yes"))
    talk.book.note(AgentConversation.of(second, []), other)
    begun = len(talk.prompt(first))
    assert talk.prompt([*first, message, user("c")])[begun : begun + len(ids)] == ids
    assert talk.prompt([*second, message, user("c")])[begun : begun + 3] == [5, 6, 7]
    # In a shortened conversation it is known by what it says.
    assert talk.book.found(AgentConversation.of([message, user("d")], [])) == Found({0: other})


def test_a_template_that_refuses_is_a_refusal_with_its_reason():
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.chat_template = (
        "{%- if messages[0].content == 'no' -%}{{ raise_exception('never') }}{%- endif -%}"
        "{%- for message in messages -%}<|im_start|>{{ message.content }}<|im_end|>{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>{%- endif -%}"
    )
    with pytest.raises(ApiError, match="never") as caught:
        Talk(tokenizer).prompt([user("no")])
    assert caught.value.status == 400


def test_long_pieces_are_tokenised_once_and_forgotten_in_time(monkeypatch):
    talk = Talk(tokenizer_of("qwen2.5"))
    asked = []
    tokenize = talk.splicing._pieces_of._tokenize
    monkeypatch.setattr(
        talk.splicing._pieces_of, "_tokenize", lambda text: asked.append(len(text)) or tokenize(text)
    )
    monkeypatch.setattr("rollgym.trainer.rollout.agents.splicing._KEPT_CHARACTERS", 3000)
    long, other = [user("x" * 2000)], [user("y" * 2000)]
    first = talk.prompt(long)
    assert talk.prompt(long) == first
    assert len(asked) == 1
    talk.prompt(other)
    assert talk.prompt(long) == first
    assert len(asked) == 3


# The shape of Mistral's: user and assistant alternate, and replies that call tools are none of these.
MISTRAL_TOOLS = (
    "{{- bos_token -}}{%- set place = namespace(turn=0) -%}"
    "{%- for message in messages -%}"
    "{%- if message.role == 'user' or (message.role == 'assistant' and not message.tool_calls) -%}"
    "{%- if (message.role == 'user') != (place.turn % 2 == 0) -%}"
    "{{ raise_exception('user and assistant must alternate, but for calls of tools') }}{%- endif -%}"
    "{%- set place.turn = place.turn + 1 -%}{%- endif -%}"
    "{%- if message.role == 'user' -%}[INST] {{ message.content }}[/INST]"
    "{%- elif message.tool_calls -%}[TOOL_CALLS]{{ message.tool_calls | map(attribute='function') | list | tojson }}"
    "{{ eos_token }}"
    "{%- elif message.role == 'tool' -%}[TOOL_RESULTS]{{ message.content }}[/TOOL_RESULTS]"
    "{%- else -%}{{ message.content }}{{ eos_token }}{%- endif -%}{%- endfor -%}"
)


@pytest.mark.parametrize("closed", [True, False])
def test_calls_go_on_as_sampled_where_a_template_wants_them_as_such(closed):
    tokenizer = tokenizer_of("mistral")
    tokenizer.chat_template = MISTRAL_TOOLS
    talk = Talk(tokenizer, TOOLS)
    messages = [user("2 + 1?")]
    for number in range(4):
        prompt = talk.prompt(messages)
        assert prompt[: len(talk.stored)] == list(talk.stored)
        ids, message = talk.reply(messages, CALL, closed=closed)
        talk.stored = [*prompt, *ids]
        messages += [message, {"role": "tool", "content": f"r{number}", "tool_call_id": "x"}]
    prompt = talk.prompt(messages)
    end = "" if closed else "</s>"
    assert prompt[: len(talk.stored)] == talk.stored
    assert talk.tokenizer.decode(prompt[len(talk.stored) :]) == f"{end}[TOOL_RESULTS]r3[/TOOL_RESULTS]"


def test_calls_are_written_anew_where_that_template_would_write_the_past_otherwise():
    tokenizer = tokenizer_of("mistral")
    tokenizer.chat_template = MISTRAL_TOOLS.replace("[/INST]", "[/INST]{{ messages | length }}")
    talk = Talk(tokenizer, TOOLS)
    messages = [user("2 + 1?")]
    for _ in range(3):
        prompt = talk.prompt(messages)
        ids, message = talk.reply(messages, CALL)
        talk.stored = [*prompt, *ids]
        messages += [message, {"role": "tool", "content": "3", "tool_call_id": "x"}]
    text = talk.tokenizer.decode(talk.prompt(messages))
    assert text == talk.renderer.template.text(messages, generation_prompt=True, tools=TOOLS)


@pytest.mark.parametrize("value", [1 << 70, "half \ud800", float("inf")])
def test_arguments_that_few_can_write_are_found_again(value):
    call = {"id": "a", "type": "function", "function": {"name": "add", "arguments": {"a": value}}}
    messages = [user("x"), {"role": "assistant", "content": "", "tool_calls": [call]}]
    assert len(set(AgentConversation.of(messages, TOOLS).histories)) == 2
    other = {**call, "function": {"name": "add", "arguments": {"a": 2}}}
    changed = [user("x"), {"role": "assistant", "content": "", "tool_calls": [other]}]
    assert (
        AgentConversation.of(messages, TOOLS).histories[1]
        != AgentConversation.of(changed, TOOLS).histories[1]
    )
