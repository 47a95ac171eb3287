"""ToolUse-v0: its tools, its tasks, and what becomes of replies of every kind."""

import json
import re
import subprocess
import sys
import time

import pytest
from gymnasium.utils.env_checker import check_env

from rollgym.clients.protocol.tool_calls import ToolCall
from rollgym.clients.replies.formats.hermes import HERMES
from rollgym.clients.replies.formats.table import FORMATS
from rollgym.envs.core.splits import split_of_text
from rollgym.envs.tools.basic_tools import DATE_TOOLS, Corpus, Document
from rollgym.envs.tools.tasks import KINDS, answers_agree
from rollgym.envs.tools.tool import Tool, Toolbox, tool_parameters
from rollgym.envs.tools.tool_use import TOOL_GROUPS, ToolUseEnv
from tests.support.processes import ROOT

OPEN_KINDS = [name for name, kind in KINDS.items() if kind.needs <= set(TOOL_GROUPS)]


def call(name, **arguments):
    return HERMES.write([ToolCall(name, arguments)])


def play(env, seed, **options):
    """Play as the expert does; gives every step's reply and the observations."""
    observation, info = env.reset(seed=seed, options={"expert": True, **options})
    seen = [observation]
    while True:
        action = info["expert_action"]
        observation, reward, terminated, truncated, info = env.step(action)
        seen += [action, observation]
        if terminated or truncated:
            return seen, reward, info


@pytest.mark.parametrize("kind", OPEN_KINDS)
def test_the_expert_solves_every_kind_of_task(kind):
    env = ToolUseEnv(kinds=[kind])
    for seed in range(40):
        _, reward, info = play(env, seed)
        assert info["success"]
        assert reward == 1.0
        assert info["metrics"]["invalid_replies"] == info["metrics"]["tool_errors"] == 0


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_plays(name):
    env = ToolUseEnv(call_format=name)
    for seed in range(8):
        _, reward, info = play(env, seed)
        assert reward == 1.0
        assert info["call_format"] == name


def test_gymnasium_accepts_it():
    check_env(ToolUseEnv(render_mode="ansi"), skip_render_check=True)


def test_equal_seeds_are_equal_episodes_in_another_process():
    code = (
        "import json; from rollgym.envs.tools.tool_use import ToolUseEnv; "
        "from tests.envs.tools.test_tool_use import play; "
        "print(json.dumps([play(ToolUseEnv(), seed)[0] for seed in range(6)]))"
    )
    other = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert json.loads(other.stdout) == [play(ToolUseEnv(), seed)[0] for seed in range(6)]


def test_tasks_are_of_the_split_that_was_asked_for():
    for split in ("train", "valid", "test"):
        env = ToolUseEnv(split=split)
        questions = {env.reset(seed=seed)[0] for seed in range(20)}
        assert len(questions) > 15
        assert {split_of_text(question) for question in questions} == {split}
    assert split_of_text(ToolUseEnv().reset(seed=1, options={"split": "test"})[0]) == "test"


def test_tools_are_declared_and_described():
    env = ToolUseEnv(tools=["dates", "calculator"])
    observation, info = env.reset(seed=1)
    names = [tool["function"]["name"] for tool in info["tools"]]
    assert names == ["calculator", "date_add", "date_difference", "weekday"]
    for tool in info["tools"]:
        assert tool["type"] == "function"
        assert tool["function"]["name"] in info["instruction"]
        assert tool["function"]["parameters"]["type"] == "object"
    assert info["messages"] == [{"role": "user", "content": observation}]
    plain = ToolUseEnv(describe_tools=False).reset(seed=1)[1]
    assert "store_set" not in plain["instruction"]
    assert "store_set" in json.dumps(plain["tools"])


def test_results_are_messages_with_the_ids_of_their_calls():
    env = ToolUseEnv(call_format="openai")
    env.reset(seed=1)
    said = [
        ToolCall("calculator", {"expression": "6 * 7"}, "c1"),
        ToolCall("calculator", {"expression": "1 / 0"}, "c2"),
    ]
    observation, reward, terminated, truncated, info = env.step(FORMATS["openai"].write(said))
    assert (reward, terminated, truncated) == (0.0, False, False)
    assert observation == "42\nerror: division by zero"
    assert info["messages"] == [
        {"role": "tool", "tool_call_id": "c1", "name": "calculator", "content": "42"},
        {"role": "tool", "tool_call_id": "c2", "name": "calculator", "content": "error: division by zero"},
    ]
    # What a tool says is an observation; the call itself was good.
    assert info["action_is_valid"]
    assert info["failed_calls"] == info["metrics"]["tool_errors"] == 1
    as_user = ToolUseEnv(result_role="user")
    as_user.reset(seed=1)
    info = as_user.step(call("calculator", expression="6 * 7"))[4]
    assert info["messages"] == [{"role": "user", "content": "<tool_response>\n42\n</tool_response>"}]


@pytest.mark.parametrize(
    ("reply", "said"),
    [
        ("I do not know.", "neither a call"),
        ("", "neither a call"),
        ("<think><answer>4</answer></think>", "neither a call"),
        ("<tool_call>{</tool_call>", "not JSON"),
        (call("fly"), "there is no tool 'fly'; the tools are calculator"),
        (call("calculator"), "'expression' is a required property"),
        (call("calculator", expression=4), "expression: 4 is not of type 'string'"),
        (call("calculator", expression="1", exact=True), "'exact' was unexpected"),
        (call("search", query="x", top_k=99), "top_k"),
        (call("store_set", key="a", value="b") + call("fly"), "Nothing was run"),
        ("\n".join([call("store_set", key="a", value="b")] * 9), "at most 8"),
    ],
)
def test_what_cannot_be_run_leaves_the_state_and_says_why(reply, said):
    env = ToolUseEnv(format_penalty=-0.25)
    before = env.reset(seed=1)[1]
    observation, reward, terminated, truncated, info = env.step(reply)
    assert said in observation
    assert (reward, terminated, truncated) == (-0.25, False, False)
    assert (info["action_is_valid"], info["format_penalty"], info["env_reward"]) == (False, -0.25, 0.0)
    assert info["state"] == before["state"]
    assert info["anchor"] == before["anchor"]
    assert info["metrics"]["steps"] == 1
    assert info["messages"]


def test_a_reply_of_nothing_but_faults_gets_a_short_answer():
    env = ToolUseEnv()
    env.reset(seed=1)
    observation, *_ = env.step("<tool_call>" * 10_000)
    assert "and 995 more" in observation
    assert len(observation) < 2_000


def test_the_example_of_the_page_runs():
    page = (ROOT / "docs" / "environments" / "tools.md").read_text()
    (example,) = re.findall(r"```python\n(.*?)```", page, re.DOTALL)
    names = {}
    exec(compile(example, "docs/environments/tools.md", "exec"), names)
    assert "Friday" in names["observation"]


def test_an_answer_ends_the_episode_right_or_wrong():
    env = ToolUseEnv(kinds=["sum"])
    env.reset(seed=5)
    observation, reward, terminated, _, info = env.step("<answer>0</answer>")
    assert (observation, reward, terminated, info["success"]) == ("The answer is wrong.", 0.0, True, False)


def test_a_right_answer_is_not_enough_where_the_store_has_to_change():
    env = ToolUseEnv(kinds=["stock"])
    env.reset(seed=5, options={"expert": True})
    answer = play(ToolUseEnv(kinds=["stock"]), 5)[0][-2]
    observation, reward, terminated, _, info = env.step(answer)
    assert "store" in observation
    assert (reward, terminated, info["success"]) == (0.0, True, False)


def test_the_expert_mends_what_a_policy_has_spoilt():
    env = ToolUseEnv(kinds=["stock"])
    _, info = env.reset(seed=5, options={"expert": True})
    first = next(iter(info["state"]["store"]))
    env.step(call("store_set", key="rubbish", value="1"))
    *_, info = env.step(call("store_set", key=first, value="0"))
    terminated = False
    while not terminated:
        _, reward, terminated, truncated, info = env.step(info["expert_action"])
        assert not truncated
    assert reward == 1.0


def weigh(**properties):
    return Toolbox([Tool("weigh", "", tool_parameters((), **properties), lambda **arguments: "weighed")])


@pytest.mark.parametrize(
    ("schema", "value", "said"),
    [
        ({"multipleOf": 0.01}, float("inf"), "weigh: x: is not finite"),
        ({"multipleOf": 0.01}, 10**400, None),
        ({"type": "number"}, True, "weigh: x: True is not of type 'number'"),
        ({"pattern": "(x+x+)+y\\1"}, "x" * 5_000, "takes over"),
        ({"patternProperties": {"(x+x+)+y\\1": {}}}, {"x" * 5_000: 1}, "takes over"),
        ({"uniqueItems": True}, [{"a": number} for number in range(1_900)], None),
    ],
)
def test_whatever_arguments_are_their_fault_is_told_to_the_policy(schema, value, said):
    found = weigh(x=schema).faults([ToolCall("weigh", {"x": value})])[0]
    assert found is None if said is None else said in found


def test_a_number_beyond_floating_point_ends_no_episode():
    env = ToolUseEnv()
    env.reset(seed=1)
    env.toolbox = weigh(x={"multipleOf": 0.01})
    assert "weighed" in env.step(call("weigh", x=10**400))[0]
    observation, *_, info = env.step(call("weigh", x=0.5).replace("0.5", "1e999"))
    assert "Nothing was run" in observation
    assert info["action_is_valid"] is False


def test_a_tool_whose_parameters_are_no_schema_is_refused_when_it_is_declared():
    with pytest.raises(ValueError, match=r"the parameters of the tool 'weigh' cannot be used: .*'heavy'"):
        weigh(x={"type": "heavy"})
    with pytest.raises(ValueError, match="nothing is fetched"):
        weigh(x={"$ref": "http://127.0.0.1:1/schema"})


def test_a_limit_truncates():
    env = ToolUseEnv(max_episode_steps=2)
    env.reset(seed=1)
    assert env.step("hm")[3] is False
    assert env.step("hm")[2:4] == (False, True)


def test_turns_are_alike_where_the_store_and_what_is_known_are():
    env = ToolUseEnv(kinds=["noted"])
    start = env.reset(seed=1)[1]["anchor"]
    known = env.step(call("search", query="amber"))[4]["anchor"]
    again = env.step(call("search", query="amber"))[4]["anchor"]
    changed = env.step(call("store_set", key="a", value="b"))[4]["anchor"]
    assert known == again
    assert len({start, known, changed}) == 3


def test_what_was_stored_is_another_state_however_it_came_about():
    def after(*calls):
        env = ToolUseEnv(kinds=["noted"])
        env.reset(seed=1)
        for each in calls:
            anchor = env.step(each)[4]["anchor"]
        return anchor

    one, other = (call("store_set", key=key, value="x") for key in "ab")
    gone = call("store_delete", key="a")
    assert after(one, other) == after(other, one) == after(one, other, one)
    assert after(one, gone, one) == after(gone, one, gone, one)
    assert after(one, call("store_set", key="a", value="y")) != after(one)
    assert len({after(one), after(other), after(one, other), after(one, gone)}) == 4


def test_a_turn_costs_what_is_new_in_it():
    env = ToolUseEnv(max_episode_steps=1000, max_calls_per_turn=64)
    env.reset(seed=1)
    for turn in range(40):
        env.step("".join(call("store_set", key=f"{turn} {each}", value="x" * 9_000) for each in range(20)))
    begun = time.process_time()
    for _ in range(10):
        env.step("Hello?")
    # It took two seconds: the names of all that was ever stored and found were made anew each time.
    assert time.process_time() - begun < 0.2


@pytest.mark.parametrize(
    ("kwargs", "said"),
    [
        ({"tools": []}, "tools must be some of"),
        ({"tools": ["python"]}, "tools must be some of"),
        ({"kinds": ["flying"]}, "kinds must be some of"),
        ({"kinds": []}, "kinds must be some of"),
        ({"tools": ["store"]}, "the tools store are enough for no kind of task"),
        ({"tools": ["store"], "kinds": ["stock"]}, "no kind of task"),
        ({"tools": ["dates"], "kinds": ["stock"]}, "need the tools calculator, store"),
        ({"call_format": "yaml"}, "call_format must be one of"),
        ({"split": "dev"}, "split must be"),
        ({"max_episode_steps": 0}, "max_episode_steps"),
        ({"max_calls_per_turn": 0}, "max_calls_per_turn"),
        ({"result_role": "system"}, "result_role"),
        ({"render_mode": "rgb_array"}, "render_mode"),
    ],
)
def test_arguments_that_make_no_sense(kwargs, said):
    with pytest.raises(ValueError, match=said):
        ToolUseEnv(**kwargs)


@pytest.mark.parametrize(
    ("said", "wanted", "agree"),
    [
        *(("1,234", "1234", True), (" 42.0 ", "42", True), ("0.50", "1/2", True), ("−3", "-3", True)),
        *(
            ("42 apples", "42", False),
            ("forty-two", "42", False),
            ("1e9999999", "42", False),
            ("", "42", False),
        ),
        *(("  salt. ", "salt", True), ("Ada  Belton", "Ada Belton", True), ("salt mine", "salt", False)),
        ("1,2", "12", False),
        ("12,34", "1234", False),
        ("1,2,3", "123", False),
    ],
)
def test_answers_agree_by_value_or_by_words(said, wanted, agree):
    assert answers_agree(said, wanted) is agree


def test_search_ranks_and_leaves_out_what_shares_no_word():
    corpus = Corpus()
    assert corpus.find("salt", 3) == []
    documents = [
        Document("Salt", "Salt is mined."),
        Document("Tea", "Tea needs no salt."),
        Document("Sea", "Deep."),
    ]
    corpus.fill(documents)
    assert [each.title for each in corpus.find("salt mined", 3)] == ["Salt", "Tea"]
    assert [each.title for each in corpus.find("salt mined", 1)] == ["Salt"]
    box = Toolbox([corpus.tool()])
    assert box.run(ToolCall("search", {"query": "gold"})).text == "nothing was found"
    assert box.run(ToolCall("search", {"query": "deep"})).text == "Doc 1(Title: Sea) Deep."


def test_dates_are_of_one_form():
    box = Toolbox(DATE_TOOLS)
    assert box.run(ToolCall("date_add", {"date": "2024-02-28", "days": 2})).text == "2024-03-01"
    assert box.run(ToolCall("date_difference", {"start": "2024-03-01", "end": "2023-03-01"})).text == "-366"
    assert box.run(ToolCall("weekday", {"date": "2000-01-01"})).text == "Saturday"
    for name, arguments in (
        ("weekday", {"date": "2024-W01-1"}),
        ("weekday", {"date": "2023-02-29"}),
        ("date_add", {"date": "2024-02-28", "days": 10**9}),
        ("date_add", {"date": "9999-12-31", "days": 1}),
    ):
        assert box.run(ToolCall(name, arguments)).error


def test_two_tools_of_one_name_are_an_error():
    with pytest.raises(ValueError, match="same name"):
        Toolbox([DATE_TOOLS[0], DATE_TOOLS[0]])
