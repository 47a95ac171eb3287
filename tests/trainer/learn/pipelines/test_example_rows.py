"""Chat data as training rows: what is read, what is learnt, and what of it is refused."""

import json

import pytest
import torch

from rollgym.trainer.config.data import ExamplesSettings
from rollgym.trainer.config.supervised import DpoSettings
from rollgym.trainer.core.errors import ConfigError
from rollgym.trainer.learn.pipelines.example_rows import ExampleRows, conversation_rows, reply_row
from rollgym.trainer.learn.pipelines.offline import ExampleBatches
from rollgym.trainer.learn.pipelines.preferences import PreferenceRows
from rollgym.trainer.rollout.prompts import ChatRenderer
from rollgym.trainer.tasks.examples import ExampleConversation, read_conversations, read_judged, read_pairs
from tests.support.chat_templates import FAMILIES, tokenizer_of

TALK = (
    {"role": "system", "content": "Play."},
    {"role": "user", "content": "one"},
    {"role": "assistant", "content": "<think>left</think>Up"},
    {"role": "user", "content": "two"},
    {"role": "assistant", "content": "Down"},
)


def renderer_of(family: str) -> ChatRenderer:
    return ChatRenderer(tokenizer_of(family))


def learnt_texts(renderer, rows):
    """What is learnt of each row, as text with its marks, in runs."""
    found = []
    for row in rows:
        runs, ids = [], []
        for token, flag in zip(row.ids.tolist(), [*row.mask.tolist()], strict=True):
            if flag:
                ids.append(token)
            elif ids:
                runs.append("".join(renderer.token_text(each) for each in ids))
                ids = []
        found.append(runs + ["".join(renderer.token_text(each) for each in ids)] * bool(ids))
    return found


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_replies_are_learnt_with_what_closes_them(family):
    renderer = renderer_of(family)
    rows = conversation_rows(renderer, ExampleConversation("row", TALK))
    closing = renderer.token_text(renderer.end_of_turn_id)
    replies = [f"<think>left</think>Up{closing}", f"Down{closing}"]
    texts = learnt_texts(renderer, rows)
    # One row with both where the template only appends; a row for each where it rewrites the past.
    assert texts in ([replies], [replies[:1], replies[1:]])
    assert (len(rows) == 1) == renderer.append_only


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_closes_a_reply_is_learnt_where_it_pads_batches_too(family):
    plain, padding = renderer_of(family), tokenizer_of(family)
    padding.pad_token = plain.token_text(plain.end_of_turn_id)
    assert padding.pad_token_id == plain.end_of_turn_id
    rows = conversation_rows(ChatRenderer(padding), ExampleConversation("row", TALK))
    expected = conversation_rows(plain, ExampleConversation("row", TALK))
    for row, other in zip(rows, expected, strict=True):
        assert row.ids[row.mask].tolist() == other.ids[other.mask].tolist()
        assert row.ids[row.mask][-1] == padding.pad_token_id


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_what_is_read_is_the_prompt_that_the_policy_will_read(family):
    renderer = renderer_of(family)
    first = ExampleConversation("row", TALK[:3])
    (row,) = conversation_rows(renderer, first)
    prompt = renderer.prompt(list(TALK[:2]))
    start = int(row.mask.nonzero()[0, 0])
    assert row.ids[:start].tolist() == prompt
    assert row.ids[start:].tolist() == renderer.reply_ids(TALK[2]["content"])


def test_roles_choose_what_is_learnt():
    renderer = renderer_of("qwen2.5")
    rows = conversation_rows(renderer, ExampleConversation("row", TALK), {"user", "system"})
    assert learnt_texts(renderer, rows) == [["Play.<|im_end|>", "one<|im_end|>", "two<|im_end|>"]]


def test_messages_of_the_prompt_are_never_learnt():
    renderer = renderer_of("llama-3")
    rows = conversation_rows(renderer, ExampleConversation("row", TALK, learnt_from=3))
    assert learnt_texts(renderer, rows) == [["Down<|eot_id|>"]]


def test_calls_of_tools_are_learnt_as_the_template_writes_them():
    tokenizer = tokenizer_of("qwen2.5")
    tokenizer.chat_template = (
        "{%- for message in messages -%}<|im_start|>{{ message.role }}\n"
        "{%- if message.tool_calls -%}<call>{{ message.tool_calls[0].name }}</call>{%- endif -%}"
        "{{ message.content }}<|im_end|>\n{%- endfor -%}"
        "{%- if add_generation_prompt -%}<|im_start|>assistant\n{%- endif -%}"
    )
    renderer = ChatRenderer(tokenizer)
    talk = (
        {"role": "user", "content": "one"},
        {"role": "assistant", "content": "", "tool_calls": [{"name": "look"}]},
    )
    (row,) = conversation_rows(renderer, ExampleConversation("row", talk))
    assert learnt_texts(renderer, [row])[0][0].strip() == "<call>look</call><|im_end|>"


def test_nothing_to_learn_is_said_with_its_place():
    with pytest.raises(ConfigError, match=r"data set chats.jsonl, line 4: no message of assistant"):
        conversation_rows(renderer_of("granite"), ExampleConversation("chats.jsonl, line 4", TALK[:2]))


def written(tmp_path, rows, name="rows.jsonl"):
    path = tmp_path / name
    path.write_text("".join(row if isinstance(row, str) else json.dumps(row) + "\n" for row in rows))
    return [ExamplesSettings(path=str(path))]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (
            {"text": "x"},
            "line 2: the row has no 'prompt' \\(or 'messages'\\); its columns are text, and 'columns'",
        ),
        ({"messages": []}, "line 2: 'messages' must be a list of messages, not \\[\\]"),
        (
            {"messages": [{"content": "x"}]},
            r"line 2: messages\[0\].role must be one of system, user.*not None",
        ),
        (
            {"messages": [{"role": "user", "content": 3}]},
            r"line 2: messages\[0\].content must be a text or parts of text, not 3",
        ),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
            r"line 2: messages\[0\].content must be a text or parts of text",
        ),
        (
            {"messages": [{"role": "assistant", "content": "x", "weight": 0.5}]},
            r"line 2: messages\[0\].weight must be 0 or 1, true or false",
        ),
        (
            {"prompt": "x", "completion": "y", "tools": "[{"},
            "line 2: tools is not JSON",
        ),
        ({"messages": ["hello"]}, r"line 2: messages\[0\] must be a message with 'role' and 'content'"),
        (
            {"prompt": "x", "completion": "y", "tools": 5},
            "line 2: 'tools' must be a list of declarations, not 5",
        ),
        ("{broken\n", "line 2: .*'{broken'"),
    ],
)
def test_a_wrong_row_is_named_with_its_line(tmp_path, row, message):
    good = {"prompt": "x", "completion": "y"}
    with pytest.raises(ConfigError, match=message):
        list(read_conversations(written(tmp_path, [good, row])))


def test_arguments_and_tools_may_be_json_text_and_tables_fill_in_nulls(tmp_path):
    function = {"name": "look", "description": None, "parameters": {"type": "object", "required": None}}
    calls = [
        {
            "id": "1",
            "type": "function",
            "function": {"name": "look", "arguments": '{"q": "x", "near": null}'},
        },
        {
            "id": None,
            "function": {"name": "look", "arguments": {"q": "x", "near": None, "deep": [{"a": None}]}},
        },
    ]
    row = {
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Look"}, {"type": "text", "text": " up."}]},
            {"role": "assistant", "content": None, "tool_calls": calls, "name": None},
        ],
        "tools": json.dumps([{"type": "function", "function": function}]),
    }
    (found,) = read_conversations(written(tmp_path, [row]))
    asked, reply = found.messages
    assert asked == {"role": "user", "content": "Look up."}
    # What is text may say null; what a table holds was filled in.
    assert [call["function"]["arguments"] for call in reply["tool_calls"]] == [
        {"q": "x", "near": None},
        {"q": "x", "deep": [{}]},
    ]
    assert reply.keys() == {"role", "content", "tool_calls"}
    assert found.tools == (
        {"type": "function", "function": {"name": "look", "parameters": {"type": "object"}}},
    )


@pytest.mark.parametrize("key", ["weight", "loss", "loss_mask", "train", "trainable"])
@pytest.mark.parametrize("value", [0, 0.0, False])
def test_a_message_without_weight_is_read_and_not_learnt(tmp_path, key, value):
    talk = [*TALK[:2], dict(TALK[2]) | {key: value}, TALK[3], dict(TALK[4]) | {key: True}]
    (found,) = read_conversations(written(tmp_path, [{"messages": talk}]))
    renderer = renderer_of("granite")
    assert learnt_texts(renderer, conversation_rows(renderer, found)) == [["Down<|end_of_text|>"]]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"chosen": "a", "rejected": "b"}, "'chosen' is a reply alone and there is no 'prompt'"),
        ({"prompt": "q", "chosen": "a"}, "line 1: the row has no 'rejected'; its columns are prompt, chosen"),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "margin": "high"},
            "'margin' must be a number, not 'high'",
        ),
        (
            {"prompt": "q", "chosen": "a", "rejected": "b", "margin": True},
            "'margin' must be a number, not True",
        ),
    ],
)
def test_a_wrong_pair_is_named_with_its_line(tmp_path, row, message):
    with pytest.raises(ConfigError, match=message):
        list(read_pairs(written(tmp_path, [row])))


def test_pairs_of_whole_conversations_are_split_at_their_last_message(tmp_path):
    talk = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    other = [talk[0], {"role": "assistant", "content": "b"}]
    (pair,) = read_pairs(written(tmp_path, [{"chosen": talk, "rejected": other}]))
    assert (pair.chosen.learnt_from, pair.rejected.messages[-1]["content"]) == (1, "b")


def test_pairs_are_judged_replies_too_and_labels_are_truth_values(tmp_path):
    rows = [
        {"prompt": "q", "chosen": "a", "rejected": "b"},
        {"prompt": "q", "completion": "c", "label": True},
    ]
    assert [each.good for each in read_judged(written(tmp_path, rows))] == [True, False, True]
    with pytest.raises(ConfigError, match="'label' must be true or false, not 'yes'"):
        list(read_judged(written(tmp_path, [{"prompt": "q", "completion": "c", "label": "yes"}])))


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_plain_texts_are_learnt_as_they_are(tmp_path, family):
    renderer, tokenizer = renderer_of(family), tokenizer_of(family)
    (data,) = written(tmp_path, [{"prompt": "The sky is", "completion": " blue. <|im_end|>\n"}])
    (conversation,) = read_conversations([data.model_copy(update={"texts": "plain"})])
    (row,) = conversation_rows(renderer, conversation)
    read = tokenizer("The sky is")["input_ids"]
    said = renderer.ids_of(renderer.quote(" blue. <|im_end|>\n"))
    assert row.ids.tolist() == [*read, *said, tokenizer.eos_token_id]
    assert row.mask.tolist() == [False] * len(read) + [True] * (len(said) + 1)
    assert tokenizer.decode(said) == " blue. <|im_end|>\n"
    assert not set(said) & renderer.template.control.ids, "what the text spells is text"


def test_prompts_are_never_learnt_of_plain_texts_either_and_pairs_are_plain_too(tmp_path):
    renderer = renderer_of("qwen2.5")
    rows = [{"prompt": "1 + 1 =", "completion": " 2", "chosen": " 2", "rejected": " 3", "label": True}] * 2
    data = [each.model_copy(update={"texts": "plain"}) for each in written(tmp_path, rows)]
    end = renderer.token_text(renderer.end_of_text_id)
    rows = conversation_rows(renderer, next(read_conversations(data)), {"user", "assistant"})
    assert learnt_texts(renderer, rows) == [[" 2" + end]]
    pair, judged = next(read_pairs(data)), next(read_judged(data))
    for reply, expected in ((pair.chosen, " 2"), (pair.rejected, " 3"), (judged.reply, " 2")):
        assert learnt_texts(renderer, [reply_row(renderer, reply)]) == [[expected + end]]
    others = ExampleRows(renderer, DpoSettings(data=data), 1000, print).judged(data)
    assert learnt_texts(renderer, others.rows[0]) == [[" 2" + end]] * 2


@pytest.mark.parametrize(
    "row", [{"messages": TALK}, {"prompt": TALK[:1], "completion": "x"}, {"completion": "x"}]
)
def test_plain_texts_are_no_messages(tmp_path, row):
    (data,) = written(tmp_path, [row])
    with pytest.raises(ConfigError, match=r"line 1: .*prompt"):
        list(read_conversations([data.model_copy(update={"texts": "plain"})]))


def example_rows(said):
    return ExampleRows(renderer_of("qwen2.5"), DpoSettings(data=[{"path": "rows.jsonl"}]), 1000, said.append)


PAIR = {"prompt": "q", "chosen": "a", "rejected": "b"}


def test_pairs_of_two_prompts_are_told(tmp_path):
    def talk(*texts):
        roles = ("user", "assistant", "user", "assistant")
        return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]

    rows = [
        {"chosen": talk("q", "a"), "rejected": talk("q", "b")},
        {"chosen": talk("q", "a"), "rejected": talk("other", "b")},
        {"chosen": talk("q", "a", "more", "c"), "rejected": talk("q", "b", "more", "d")},
    ]
    said = []
    assert len(example_rows(said).pairs(written(tmp_path, rows)).rows) == 3
    assert said == [
        "2 of 3 examples have another prompt before 'chosen' than before 'rejected', so that replies to two questions "
        f"are compared; the first: {tmp_path}/rows.jsonl, line 2"
    ]


def test_held_out_examples_that_are_learnt_from_are_told(tmp_path):
    other = PAIR | {"prompt": "another"}
    for name in ("pairs", "judged"):
        said = []
        rows = example_rows(said)
        read = getattr(rows, name)
        learnt = read(written(tmp_path, [PAIR, other]))
        for held_out in ([], [PAIR | {"prompt": "new", "chosen": "x", "rejected": "y"}]):
            rows.tell_overlap(learnt, read(written(tmp_path, held_out)) if held_out else PreferenceRows([]))
        assert said == []
        rows.tell_overlap(learnt, read(written(tmp_path, [PAIR | {"prompt": "new"}, other])))
        count = "1 of 2" if name == "pairs" else "2 of 4"
        assert [line.partition(":  ")[0].partition(", too")[0] for line in said] == [
            f"warning: {count} held-out examples are learnt from"
        ]
    talks = [{"prompt": text, "completion": "x"} for text in "ab"]
    said = []
    rows = example_rows(said)
    rows.tell_overlap(
        rows.conversations(written(tmp_path, talks)), rows.conversations(written(tmp_path, talks[1:]))
    )
    assert said[0].startswith("warning: 1 of 1 held-out examples are learnt from, too: their loss")


def test_replies_that_hardly_anybody_means_are_told_and_kept(tmp_path):
    same, empty = PAIR | {"rejected": "a"}, PAIR | {"chosen": " "}
    said = []
    data = written(tmp_path, [PAIR, same, empty, same])
    assert len(example_rows(said).pairs(data).rows) == 4
    assert said == [
        "1 of 4 examples have an empty reply, of which only the end of the turn is learnt; the first: "
        f"{tmp_path}/rows.jsonl, line 3",
        "2 of 4 examples have the same reply as 'chosen' and as 'rejected', of whose order nothing is learnt; the "
        f"first: {tmp_path}/rows.jsonl, line 2",
    ]
    said.clear()
    example_rows(said).judged(data)
    talk = [{"role": "user", "content": ""}, {"role": "assistant", "content": ""}]
    example_rows(said).conversations(
        written(tmp_path, [{"messages": talk}, {"prompt": "q", "completion": "x"}])
    )
    assert [line.partition(" have an empty reply")[0] for line in said] == [
        "1 of 8 examples",
        "1 of 2 examples",
    ]


def test_nothing_is_said_of_what_is_as_it_should_be(tmp_path):
    said = []
    call = {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    talk = {"messages": [{"role": "user", "content": "q"}, call, {"role": "assistant", "content": "done"}]}
    example_rows(said).pairs(written(tmp_path, [PAIR]))
    example_rows(said).conversations(written(tmp_path, [talk]))
    assert said == []


def test_pairs_that_are_all_one_reply_twice_are_refused(tmp_path):
    (settings,) = written(tmp_path, [PAIR, PAIR])
    twice = settings.model_copy(update={"columns": {"rejected": "chosen"}})
    with pytest.raises(
        ConfigError, match=r"line 1: here and in all other rows 'chosen' and 'rejected' are the same"
    ):
        example_rows([]).pairs([twice])


def test_columns_have_names_of_their_own_and_odd_ones_are_refused(tmp_path):
    (settings,) = written(tmp_path, [{"question": "q", "answer": "a"}])
    named = settings.model_copy(update={"columns": {"prompt": "question", "completion": "answer"}})
    (found,) = read_conversations([named])
    assert [message["content"] for message in found.messages] == ["q", "a"]
    with pytest.raises(ConfigError, match="columns names 'question', which is none of messages, prompt"):
        list(read_conversations([settings.model_copy(update={"columns": {"question": "q"}})]))


@pytest.mark.parametrize("system", [[], [{"role": "system", "content": "Be brief."}]])
def test_a_reply_that_repeats_its_prompt_is_a_whole_conversation(tmp_path, system):
    path = tmp_path / "rows.jsonl"
    question, answer = {"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}
    row = {"prompt": "q", "chosen": [*system, question, answer], "rejected": "b"}
    path.write_text(json.dumps(row) + "\n")
    (pair,) = read_pairs([ExamplesSettings(path=str(path))])
    assert pair.chosen.messages == (*system, question, answer), "the question stands there once"
    assert pair.chosen.learnt_from == len(pair.chosen.messages) - 1
    assert pair.rejected.messages == (question, {"role": "assistant", "content": "b"})


def test_a_column_that_no_row_has_is_refused(tmp_path):
    path = tmp_path / "rows.jsonl"
    rows = [{"prompt": "q", "chosen": "a", "rejected": "b"}, {"prompt": "q", "chosen": "a", "rejected": "b"}]
    rows[1] = rows[1] | {"by": 2.0}
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))

    def margins(**settings):
        return [each.margin for each in read_pairs([ExamplesSettings(path=str(path), **settings)])]

    assert margins(columns={"margin": "by"}) == [0.0, 2.0]
    with pytest.raises(ConfigError, match="columns says that 'margin' is called 'bye' there, and no row has"):
        margins(columns={"margin": "bye"})
    # Behind a limit it may be there.
    assert margins(columns={"margin": "by"}, limit=1) == [0.0]


def test_a_template_that_passes_over_tools_is_told_of_once():
    tool = {"type": "function", "function": {"name": "look", "parameters": {}}}
    call = {"type": "function", "function": {"name": "look", "arguments": {}}}
    reply = {"role": "assistant", "content": "I look.", "tool_calls": [call]}
    talk = ExampleConversation("row", ({"role": "user", "content": "one"}, reply), tools=(tool,))
    told: dict[bool, list[str]] = {True: [], False: []}
    for shows, heard in told.items():
        tokenizer = tokenizer_of("qwen2.5")
        if shows:
            tokenizer.chat_template = (
                "{{ tools }}{% for message in messages %}{{ message.tool_calls }}" + tokenizer.chat_template
            ) + "{% endfor %}"
        renderer = ChatRenderer(tokenizer)
        renderer.template.say = heard.append
        for _ in range(2):
            renderer.template.note_unshown(talk.messages, talk.tools)
    assert told[True] == []
    assert told[False] == [
        "chat template: it passes over declarations of tools; what is learnt is learnt without them",
        "chat template: it passes over calls of tools; they are neither read nor learnt",
    ]
    renderer = renderer_of("llama-3")
    renderer.template.say = told[False].append
    conversation_rows(renderer, talk)
    assert len(told[False]) == 4, "whoever renders examples says so"


def test_a_reply_of_a_pair_is_one_row_whatever_the_template():
    row = reply_row(renderer_of("qwen3"), ExampleConversation("row", TALK, learnt_from=4))
    assert row.ids.dtype == torch.int64
    assert int(row.mask.sum()) == len(renderer_of("qwen3").reply_ids("Down"))


def test_batches_are_passes_over_all_examples_each_in_its_own_order():
    batches = ExampleBatches([3] * 10, seed=1, size=4)
    first, second = ([batches.batch(step).indices for step in range(start, start + 3)] for start in (0, 3))
    assert [len(part) for part in first] == [4, 4, 2]
    assert sorted(place for part in first for place in part) == list(range(10))
    assert first != second
    assert [each.indices for each in batches.of_epochs(2)] == [*first, *second]
    assert batches.batch(5).ends_epoch
    assert batches.batch(5).epoch == 1
    assert not batches.batch(4).ends_epoch
    assert batches.steps(2) == 6


def test_batches_by_tokens_cost_alike():
    lengths = [7, 1, 1, 9, 30, 2, 2, 2]
    batches = ExampleBatches(lengths, seed=5, size=100, tokens=10)
    parts = [batches.batch(step).indices for step in range(batches.steps(1))]
    assert sorted(place for part in parts for place in part) == list(range(8))
    assert all(sum(lengths[place] for place in part) <= 10 or len(part) == 1 for part in parts)
    assert batches.batch(batches.steps(1)).epoch == 1
    # Asked out of order, a step's batch is the same: a resumed run asks for a later one first.
    assert ExampleBatches(lengths, seed=5, size=100, tokens=10).batch(3) == batches.batch(3)
