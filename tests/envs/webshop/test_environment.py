"""WebShop-v0 as an environment: what is seen, what can be done, how profiles differ, and what the expert does."""

from concurrent.futures import ThreadPoolExecutor
from html.parser import HTMLParser
from typing import Any

import gymnasium
import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

import rollgym  # noqa: F401 - registers
from rollgym.envs.webshop.environment import WebShopEnv, goal_range
from rollgym.envs.webshop.rendering import WORDINGS
from rollgym.envs.webshop.shop import parse_action

MARKED = {
    "answer": "<answer>{}</answer>",
    "action": "<think>so</think><action>{}</action>",
    "boxed": "\\boxed{{{}}}",
}


def say(environment: WebShopEnv, action: str) -> str:
    return MARKED[environment.wording.reading.mark].format(action)


def visit(
    environment: WebShopEnv, *actions: str, goal: int = 0
) -> list[tuple[str, float, bool, bool, dict[str, Any]]]:
    environment.reset(seed=1, options={"goal_index": goal})
    return [environment.step(say(environment, action)) for action in actions]


def play_expert(environment: WebShopEnv, seed: int) -> list[tuple[str, float, bool, bool, dict[str, Any]]]:
    observation, info = environment.reset(seed=seed, options={"expert": True})
    steps: list[tuple[str, float, bool, bool, dict[str, Any]]] = [(observation, 0.0, False, False, info)]
    while not (steps[-1][2] or steps[-1][3]):
        steps.append(environment.step(say(environment, steps[-1][4]["expert_action"])))
    return steps


def test_gymnasium_accepts_it() -> None:
    check_env(gymnasium.make("rollgym/WebShop-v0").unwrapped, skip_render_check=True)
    environment = WebShopEnv(render_mode="ansi")
    visit(environment, "search[lamp]")
    assert environment.render().startswith("  (<answer>search[lamp]</answer>)\nInstruction:\n")


@pytest.mark.parametrize("goals", ["human", "synthetic"])
@pytest.mark.parametrize("profile", sorted(WORDINGS))
def test_the_expert_buys_what_is_wanted_in_every_profile(profile: str, goals: Any) -> None:
    environment = WebShopEnv(profile=profile, goals=goals)
    for seed in range(12):
        steps = play_expert(environment, seed)
        assert all(step[4]["action_is_valid"] for step in steps)
        _, reward, terminated, _, info = steps[-1]
        assert (terminated, info["success"], info["env_reward"]) == (True, True, 1.0)
        assert reward == (10.0 if profile == "verl-agent" else 1.0)
        assert info["score"]["noun_tagger"] == "heuristic"


def test_what_the_expert_does_from_anywhere() -> None:
    environment = WebShopEnv(profile="ragen", max_episode_steps=40)
    _, info = environment.reset(seed=3, options={"expert": True})
    for action in ("search[<r>]", "click[next >]", "click[next >]"):
        *_, info = environment.step(say(environment, action))
    opened = next(name for name in info["available_actions"] if name.startswith("click[b0"))
    for action in (opened, "click[features]"):
        *_, info = environment.step(say(environment, action))
    while "expert_action" in info:
        *_, info = environment.step(say(environment, info["expert_action"]))
    assert info["success"]


@pytest.mark.parametrize(
    ("text", "action"),
    [
        ("search[Red Shoes]", ("search", "red shoes")),
        ("click[buy now] and thanks", ("click", "buy now")),
        ("search[a] click[b]", ("search[a] click", "b")),
        ("search[]", None),
        ("search", None),
        ("", None),
        ("click[a\nb]", None),
    ],
)
def test_what_is_an_action(text: str, action: tuple[str, str] | None) -> None:
    assert parse_action(text) == action


def test_pages_and_what_can_be_clicked() -> None:
    environment = WebShopEnv(show_attributes=True)
    (first,) = visit(environment, "search[green tea]")
    assert first[4]["available_actions"][:2] == ["click[back to search]", "click[next >]"]
    opened = first[4]["available_actions"][2]
    (_, item, attributes, back, again) = visit(
        environment, "search[green tea]", opened, "click[attributes]", "click[< prev]", "click[buy now]"
    )
    names = ["back to search", "< prev", "description", "features", "reviews", "attributes", "buy now"]
    assert item[4]["available_actions"][:7] == [f"click[{name}]" for name in names]
    assert item[4]["state"]["page"] == back[4]["state"]["page"] == "item_page"
    assert item[4]["anchor"] == back[4]["anchor"] != attributes[4]["anchor"]
    assert attributes[0].count(" [SEP] ") >= 5
    assert again[2]
    assert again[4]["available_actions"] == []
    assert again[4]["goal"]["asin"].startswith("B0")
    pages = visit(environment, "search[green tea]", *["click[next >]"] * 6, "click[< prev]")
    assert [step[4]["state"]["results_page"] for step in pages] == [1, 2, 3, 4, 5, 6, 7, 6]
    assert "Page 6 (Total results: 50) [SEP] < Prev [SEP] Next >" in pages[-1][0]


def test_options_are_kept_until_the_results_are_seen_again() -> None:
    environment = WebShopEnv(observation="text_rich")
    (results,) = visit(environment, "search[yoga pants size color]")
    shown = results[4]["available_actions"][2:]
    pages = {opened: visit(environment, "search[yoga pants size color]", opened)[1] for opened in shown}
    opened, page = next(
        (opened, page) for opened, page in pages.items() if "\nsize\n" in page[0] and "\ncolor\n" in page[0]
    )
    size, colour = page[4]["available_actions"][6], page[4]["available_actions"][-1]
    steps = visit(
        environment,
        "search[yoga pants size color]",
        opened,
        size,
        colour,
        "click[reviews]",
        "click[< prev]",
        "click[< prev]",
    )
    assert list(steps[3][4]["state"]["options"]) == ["size", "color"]
    assert steps[3][0].startswith("You have clicked ")
    assert steps[5][4]["state"]["options"] == steps[3][4]["state"]["options"]
    assert steps[6][4]["state"]["options"] == {}
    asin = opened.removeprefix("click[").removesuffix("]").upper()
    assert f"\n[clicked button] {asin} [clicked button_]\n" in steps[6][0]


@pytest.mark.parametrize(
    ("query", "expected"),
    [("<c> beauty", 400), ("<q> olive oil", 80), ("<r>", 50), ("<a> gluten free", None), ("<c> nothing", 0)],
)
def test_browsing(query: str, expected: int | None) -> None:
    environment = WebShopEnv()
    (step,) = visit(environment, f"search[{query}]")
    total = int(step[0].split("Total results: ")[1].split(")")[0])
    assert total == expected if expected is not None else total > 50


class _Texts(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []
        self.clickable: list[str] = []

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        given = dict(attrs)
        if tag == "input":
            self.clickable.append(given["value"])
        elif given.get("class") in ("btn", "product-link"):
            self.clickable.append("")

    def handle_data(self, data: str) -> None:
        if data.strip():
            self.texts.append(data.strip())
            if self.clickable and not self.clickable[-1]:
                self.clickable[-1] = data.lower()


def test_html_says_what_the_text_says() -> None:
    plain, page = WebShopEnv(), WebShopEnv(observation="html")
    for seed in range(5):
        told, drawn = play_expert(plain, seed), play_expert(page, seed)
        for text, html in zip(told, drawn, strict=True):
            parser = _Texts()
            parser.feed(html[0].split("<body>")[1])
            assert " [SEP] ".join(parser.texts) == text[0]
            if text[4]["state"]["page"] not in ("index", "done"):
                wanted = {
                    name.removeprefix("click[").removesuffix("]") for name in text[4]["available_actions"]
                }
                assert set(parser.clickable) == wanted


def test_what_cannot_be_done() -> None:
    for profile, penalty in (
        ("native", 0.0),
        ("ragen", -0.1),
        ("roll", -0.05),
        ("verl-agent", -0.1),
        ("gem", -0.1),
    ):
        environment = WebShopEnv(profile=profile)
        _, info = environment.reset(seed=1)
        for reply in ("", "I do not know", say(environment, "click[buy now]"), say(environment, "fly[home]")):
            text, reward, terminated, truncated, after = environment.step(reply)
            assert (reward, terminated, truncated) == (penalty, False, False)
            assert (after["action_is_valid"], after["format_penalty"]) == (False, penalty)
            assert after["anchor"] == info["anchor"]
            assert environment.wording.reading.invalid_note in text
    chinese = WebShopEnv(profile="verl-agent")
    chinese.reset(seed=1)
    assert not chinese.step("<think>好</think><action>search[tea]</action>")[4]["action_is_valid"]


@pytest.mark.parametrize("profile", sorted(WORDINGS))
def test_where_a_search_is_possible(profile: str) -> None:
    environment = WebShopEnv(profile=profile)
    first, second = visit(environment, "search[tea]", "search[lamp]")
    assert first[4]["action_is_valid"]
    assert second[4]["action_is_valid"] == (profile in ("native", "gem"))


def test_verl_agent_quotes_the_page_behind_the_task() -> None:
    environment = WebShopEnv(profile="verl-agent")
    text, _ = environment.reset(seed=1)
    plain, _ = WebShopEnv().reset(seed=1)
    task = plain.split(" [SEP] ")[2]
    assert text == (
        f"Your task is to: {task}.\nCurrent observation: 'Search'\nAdmissible actions: search[KEYWORDS]."
    )
    (results,) = visit(environment, "search[tea]")
    assert "Current observation: 'Back to Search' [SEP] 'Page 1 (Total results: 50)' [SEP] " in results[0]


def test_ragen_hides_a_lonely_next() -> None:
    environment = WebShopEnv(profile="ragen")
    hidden, refused = visit(environment, "search[qwertyuiop]", "click[next >]")
    assert hidden[4]["available_actions"] == ["click[back to search]"]
    assert not refused[4]["action_is_valid"]
    assert visit(WebShopEnv(), "search[qwertyuiop]", "click[next >]")[1][4]["action_is_valid"]


def test_compact_pages_are_short_and_codes_work() -> None:
    environment = WebShopEnv(profile="compact")
    for seed in range(40):
        for step in play_expert(environment, seed):
            assert len(step[0]) < 450
            assert all(len(code) <= 2 for code in step[4]["available_actions"])
    observation, _ = environment.reset(seed=5)
    assert observation.endswith("\ns")
    assert environment.step("7")[4]["action_is_valid"] is False
    *_, info = environment.step("s")
    assert info["state"]["page"] == "search_results"
    *_, info = environment.step("click[back to search]")
    assert info["state"]["page"] == "index"
    with pytest.raises(ValueError, match="compact"):
        WebShopEnv(profile="compact", observation="text")


def test_what_compact_marks() -> None:
    environment = WebShopEnv(profile="compact")
    for seed in range(40):
        steps = play_expert(environment, seed)
        before, after = steps[-3][0], steps[-2][0]
        chosen = steps[-2][4]["state"]["options"]
        assert after.count("*") == len(chosen)
        if chosen:
            code = steps[-3][4]["expert_action"]
            assert f" +{code} " in before
            assert f" *{code} " in after
        results = next(step for step in steps if step[4]["state"]["page"] == "search_results")
        place = int(results[4]["expert_action"]) if results[4]["expert_action"].isdigit() else None
        if place is not None:
            line = results[0].splitlines()[2 + place]
            assert "!" not in line


def test_an_episode_is_cut_at_its_limit() -> None:
    environment = WebShopEnv(max_episode_steps=3)
    steps = visit(environment, "search[tea]", "nonsense", "click[next >]")
    assert [step[3] for step in steps] == [False, False, True]
    assert steps[-1][4]["metrics"] == {"steps": 3, "invalid_replies": 1, "score": 0.0}


def test_splits() -> None:
    assert [goal_range(12_087, split) for split in ("test", "valid", "train")] == [
        range(500),
        range(500, 1500),
        range(1500, 12_087),
    ]
    assert [goal_range(10, split) for split in ("test", "valid", "train", None)] == [
        range(2),
        range(2, 4),
        range(4, 10),
        range(10),
    ]
    with pytest.raises(ValueError, match="too few"):
        goal_range(3, "test")
    seen = {}
    for split in ("train", "valid", "test"):
        environment = WebShopEnv(split=split)
        seen[split] = {environment.reset(seed=seed)[1]["state"]["goal_index"] for seed in range(200)}
    assert max(seen["test"]) < min(seen["valid"]) <= max(seen["valid"]) < min(seen["train"])


def test_weights_prefer_rare_attributes() -> None:
    weights = {}
    for sampling in ("uniform", "weighted"):
        environment = WebShopEnv(goals="synthetic", sampling=sampling, split="test")
        drawn = [environment.reset(seed=seed)[1]["state"]["goal_index"] for seed in range(400)]
        assert 0 <= min(drawn) <= max(drawn) < 500
        weights[sampling] = sum(environment._goals[index].weight for index in drawn)
    assert weights["weighted"] > 1.1 * weights["uniform"]


def test_equal_seeds_are_equal_episodes_in_any_thread() -> None:
    def play(seed: int) -> list[Any]:
        environment = WebShopEnv()
        environment.reset(seed=seed)
        return [environment.step("search[<r>]"), *play_expert(environment, seed)]

    with ThreadPoolExecutor(4) as threads:
        told = list(threads.map(play, [7, 8, 7, 8]))
    assert told[0] == told[2] != told[1] == told[3]


@settings(max_examples=50)
@given(
    profile=st.sampled_from(sorted(WORDINGS)), replies=st.lists(st.text(max_size=30), min_size=1, max_size=4)
)
def test_no_reply_is_an_error(profile: str, replies: list[str]) -> None:
    environment = WebShopEnv(profile=profile)
    environment.reset(seed=2)
    for reply in (*replies, *(say(environment, f"search[{reply}]") for reply in replies)):
        observation, _, terminated, _, _ = environment.step(reply)
        assert observation in environment.observation_space
        assert not terminated


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"goals": "dog"}, "goals must be"),
        ({"sampling": "best"}, "sampling must be"),
        ({"observation": "picture"}, "observation must be"),
        ({"profile": "none"}, "profile must be"),
        ({"split": "dev"}, "split must be"),
        ({"max_episode_steps": 0}, "at least 1"),
        ({"num_products": 10}, "data_dir"),
        ({"data_dir": "/no/such/place"}, "items_shuffle"),
        ({"noun_tagger": "guess"}, "noun_tagger"),
        ({"render_mode": "human"}, "render_mode"),
    ],
)
def test_arguments_that_make_no_sense(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WebShopEnv(**kwargs)


@pytest.mark.parametrize("index", [-1, 10**6, "three", True])
def test_goals_that_are_not_there(index: Any) -> None:
    with pytest.raises(ValueError, match="goal_index must be"):
        WebShopEnv().reset(seed=1, options={"goal_index": index})


@pytest.mark.parametrize("profile", ["native", "compact"])
def test_actions_have_labels_for_people_where_they_are_asked_for(profile: str) -> None:
    environment = WebShopEnv(profile=profile)
    _, info = environment.reset(seed=4, options={"labels": True})
    assert info["action_labels"] == {}  # a search says itself
    seen = []
    for wanted in ("Pillow Cover, $8.82", "size: 18x18"):
        _, _, _, _, info = environment.step(info["available_actions"][0] if not seen else seen[-1])
        labels = info["action_labels"]
        assert labels.keys() <= set(info["available_actions"])
        seen.append(next(action for action, label in labels.items() if wanted in label))
    _, _, _, _, info = environment.step(seen[-1])
    assert info["action_labels"][seen[-1]] == "size: 18x18 ✓"
    assert "action_labels" not in environment.reset(seed=4)[1]
    with pytest.raises(ValueError, match="'labels' is true or false"):
        environment.reset(seed=4, options={"labels": "yes"})
