"""What is read in a reply: thinking, tags, boxes and fences, by the old patterns as oracles."""

import re
import tracemalloc

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.clients.replies.marks import (
    ANSWER_WITHIN,
    _scanned_boxes,
    boxes,
    fenced_blocks,
    fenced_lines,
    last_tagged,
    tagged,
    unfenced,
)
from rollgym.clients.replies.thinking import LONGEST, has_thought, strip_thinking
from rollgym.envs.core.profiles import PROFILES, said_actions
from rollgym.envs.games.guess_number import GuessNumberEnv
from rollgym.envs.verifiers.arithmetic import ArithmeticEnv, number_given

MARKS = st.lists(
    st.sampled_from(
        [
            "<think>",
            "</think>",
            "<answer>",
            "</answer>",
            "a",
            "\n",
            "{",
            "}",
            "\\boxed{",
            "\\",
            "```",
            "~~~",
            " ",
        ]
    ),
    max_size=24,
).map("".join)
THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL)


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("4", "4"),
        ("<think>3</think>4", "4"),
        ("<THINKING>3</thinking><thought>5</Thought>6", "6"),
        # In the middle of what is said a tag is text.
        ("a<think>b</think>c", "a<think>b</think>c"),
        ("<think>3</think>4<think>5</think>6", "4<think>5</think>6"),
        # The opening tag stood in the prompt.
        ("3</think>4", "4"),
        ("3</think>4</think>5", "5"),
        ("<think>1<think>2</think>3</think>4", "4"),
        # Thinking that was cut off.
        ("<think>3", ""),
        ("<think>3</think> <think>5", ""),
        ("4<think>3", "4<think>3"),
        # What was only thought.
        ("<answer>4</answer></think>", ""),
        ("<think><answer>4</answer></think>", ""),
    ],
)
def test_thinking_is_no_reply(reply, said):
    assert strip_thinking(reply) == said


@given(MARKS)
def test_what_is_said_is_the_end_of_a_reply(reply):
    said = strip_thinking(reply)
    assert reply.endswith(said)
    assert not said.lstrip().startswith("<think>")
    assert strip_thinking(f"<think>{THINKING.sub('', reply).replace('</think>', '')}</think>Up") == "Up"
    assert has_thought(reply) == ("</think>" in reply and said != reply)


def test_of_what_goes_on_for_pages_the_end_is_read():
    assert (
        strip_thinking("<think>" + "a" * LONGEST + "</think>" + "b" * LONGEST + "c")
        == "b" * (LONGEST - 1) + "c"
    )
    assert strip_thinking("<think></think>" + "a" * 30 + "b" * 5, 10) == "aaaaabbbbb"
    assert said_actions("x" * ANSWER_WITHIN + " <answer>Up</answer>", PROFILES["native"]) == ["Up"]
    # A reply that is nothing but an action is that from its beginning to its end.
    assert said_actions("x" + " " * ANSWER_WITHIN + "Up", PROFILES["native"]) == []


@pytest.mark.parametrize("profile", sorted(PROFILES))
@pytest.mark.parametrize(
    "thought", ["<think>{}</think>", "{}</think>", "<think>{}", "<think>a</think>{}</think>"]
)
def test_no_profile_takes_an_action_that_was_only_thought(profile, thought):
    marks = {"answer": "<answer>50</answer>", "action": "<action>50</action>", "boxed": "\\boxed{50}"}
    game = GuessNumberEnv(profile=profile)
    game.reset(seed=1)
    said = marks[game.profile.mark]
    assert not game.step(thought.format(said))[4]["action_is_valid"]
    assert game.step(f"I see.</think>{said}")[4]["action_is_valid"]


@pytest.mark.parametrize(
    "thought", ["<answer>19</answer></think>", "\\boxed{19}</think>", "19</think>", "<think>19"]
)
def test_arithmetic_pays_no_answer_that_was_only_thought(thought):
    verdict = ArithmeticEnv().score(thought, {"question": "12 + 7"})
    assert (verdict.score, verdict.outcome) == (0.0, "unparsable")
    assert number_given(f"{thought}</think>\nIt is 19.") == 19


@given(MARKS)
def test_tags_are_read_as_a_pattern_would(text):
    innermost = re.compile(r"<answer>((?:(?!<answer>).)*?)</answer>", re.DOTALL)
    assert tagged(text, "answer") == innermost.findall(text)
    assert last_tagged(text, "answer") == (innermost.findall(text) or [None])[-1]


def test_names_of_tags_are_read_in_any_case_and_are_no_patterns():
    assert tagged("<ANSWER>1</Answer><answer >2</answer>", "answer") == ["1"]
    assert tagged("<axb>1</axb><a.b>2</a.b>", "a.b") == ["2"]


@pytest.mark.parametrize(
    ("text", "contents", "opened"),
    [
        (r"\boxed{1}", ["1"], 1),
        (r"\boxed {1} \fbox{2}", ["1", "2"], 2),
        (r"\boxed 12.5, so", ["12.5"], 1),
        (r"\boxed{\frac{1}{2}}", [r"\frac{1}{2}"], 1),
        (r"\boxed{\{1, 2\}}", [r"\{1, 2\}"], 1),
        (r"\\boxed{5}", ["5"], 1),
        (r"\boxed{a \\{b}}", [r"a \\{b}"], 1),
        (r"\boxed{1 \boxed{2}}", [r"1 \boxed{2}", "2"], 2),
        (r"\boxed{1", [], 1),
        (r"{ \boxed{1} \boxed{2", ["1"], 2),
        ("} {}", [], 0),
    ],
)
def test_boxes(text, contents, opened):
    found, count = boxes(text)
    assert ([box.content for box in found], count) == (contents, opened)
    assert all(text[box.start : box.end].startswith("\\") for box in found)


@given(
    st.lists(
        st.sampled_from(["\\boxed{", "{", "}", "\\", "a ", "box", "\\fbox{", "\\boxed "]), max_size=8
    ).map("".join)
)
def test_the_short_way_to_a_plain_box_finds_what_the_long_way_finds(text):
    assert boxes(text) == _scanned_boxes(text, None)


def test_a_box_knows_in_how_many_it_stands():
    found, _ = boxes(r"\boxed{\boxed{1}\boxed{\boxed{2}}}\boxed{3}")
    assert [box.depth for box in found] == [0, 1, 1, 2, 0]


def test_boxes_within_boxes_take_no_more_room_than_the_text_that_they_stand_in():
    text = "\\boxed{" * 4_000 + "}" * 4_000
    tracemalloc.start()
    try:
        assert boxes(text)[0][-1].content == ""
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 100 * len(text)


def test_lines_with_fences_around_them():
    assert fenced_lines("```bash ls -l```  \n```python  print('```')```\n```bash ```\n```bash\nls\n```") == [
        ("bash", "ls -l"),
        ("python", "print('```')"),
    ]
    assert unfenced("```json\n{}\n```") == "{}"
    assert unfenced("```json {}```") == "```json {}```"


@given(st.text(alphabet="`~\na b", max_size=60))
def test_fences_lose_no_line(text):
    assert all(code in text for _, code in fenced_blocks(text))
