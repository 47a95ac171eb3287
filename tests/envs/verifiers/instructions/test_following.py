"""InstructionFollowing-v0: what every instruction decides, and the prompts that it draws."""

import json
import re
from collections import Counter

import pytest
from gymnasium.utils.env_checker import check_env
from hypothesis import given, settings
from hypothesis import strategies as st

from rollgym.envs.core.splits import split_of_text
from rollgym.envs.verifiers.instructions import environment as instruction_following
from rollgym.envs.verifiers.instructions.environment import InstructionFollowingEnv
from rollgym.envs.verifiers.instructions.following import FUNCTIONS, follow, loose_variants, read_constraints
from rollgym.envs.verifiers.instructions.prompts import KINDS
from rollgym.envs.verifiers.instructions.table import INSTRUCTIONS
from rollgym.envs.verifiers.instructions.text import text_tools
from tests.support.instruction_answers import answer

TOOLS = text_tools("builtin", "builtin")
ENVIRONMENT = InstructionFollowingEnv()


def strictly(response, name, **kwargs):
    fields = (
        {"instruction_id_list": [name], "kwargs": [kwargs]} if ":" in name else {"func_name": name, **kwargs}
    )
    return follow(response, read_constraints(fields), TOOLS)[0].strict


def test_the_names_are_all_there():
    assert (len(INSTRUCTIONS), len(FUNCTIONS)) == (25 + 29, 25)


@pytest.mark.parametrize(
    ("name", "kwargs", "followed", "not_followed"),
    [
        ("keywords:existence", {"keywords": ["cat", "dog"]}, "Cats and DOGS", "cats"),
        ("keywords:existence", {"keywords": ["c++("]}, "I like C++(.", "c"),
        ("keywords:frequency", {"keyword": "a.", "frequency": 2, "relation": "at least"}, "ab ac", "ab"),
        ("keywords:forbidden_words", {"forbidden_words": ["can"]}, "a cannon", "you Can, too"),
        (
            "keywords:letter_frequency",
            {"letter": "#", "let_frequency": 2, "let_relation": "at least"},
            "# a\n# b",
            "# a b c d e",
        ),
        ("length_constraints:number_paragraphs", {"num_paragraphs": 2}, "***\na\n***\nb\n***", "a *** *** b"),
        (
            "length_constraints:nth_paragraph_first_word",
            {"num_paragraphs": 2, "nth_paragraph": 2, "first_word": "Well"},
            'a\n\n"well, b',
            "a\n\nb",
        ),
        ("length_constraints:number_words", {"num_words": 3, "relation": "less than"}, "a-b", "a b c"),
        ("detectable_content:postscript", {"postscript_marker": "P.P.S"}, "a\np. p. s. b", "a P.S. b"),
        ("detectable_format:number_bullet_lists", {"num_bullets": 2}, "* a\n  - b\n**c**", "* a"),
        ("detectable_format:number_highlighted_sections", {"num_highlights": 2}, "*a* **b**", "*a* ****"),
        (
            "detectable_format:multiple_sections",
            {"section_spliter": "Section", "num_sections": 2},
            "Section 1 a Section 2 b",
            "section 1 a section 2",
        ),
        ("detectable_format:json_format", {}, '```json\n{"a": 1}\n```', "{'a': 1}"),
        ("detectable_format:json_format", {}, "[1]", "[" * 100_000),
        ("detectable_format:title", {}, "<<a>>", "<< >>"),
        ("combination:two_responses", {}, "a******b", "a******a"),
        ("combination:repeat_prompt", {"prompt_to_repeat": "Do It"}, " do it. Done", "I do it"),
        ("startend:end_checker", {"end_phrase": "The End."}, '"... the end."', "the end. No."),
        ("startend:quotation", {}, ' "a" ', '"'),
        (
            "change_case:capital_word_frequency",
            {"capital_frequency": 2, "capital_relation": "at least"},
            "WELL-KNOWN, I say",
            "Well SAID",
        ),
        ("change_case:english_capital", {}, "THE END OF THE WORLD", "The END"),
        ("change_case:english_lowercase", {}, "the end of the world", "der hund und die katze sind nicht hier"),
        ("language:response_language", {"language": "de"}, "Das ist der Hund und die Katze.", "This is the dog."),
        ("length_constraints:number_sentences", {"num_sentences": 2, "relation": "at least"}, "Hm. No!", "Mr. A is"),
        ("copy:repeat_phrase", {"phrase": "Time flies when having fun", "small_n": 2},
         "Time runs when having fun and Time flies when making fun", "Time flies when having fun. Time flies far"),
        ("copy:copying_multiple", {"prompt_to_repeat": "Hi", "N": 2}, "hi ****** HI", "hi"),
        ("new:copy_span_idx", {"prompt_to_repeat": "abcdef", "n_start": 1, "n_end": 3}, "bc", "abc"),
        ("detectable_format:sentence_hyphens", {}, "One is here.-Two is there.", "One is here. Two is there."),
        ("detectable_format:square_brackets", {}, "[all] [of] [it]", "[all of it]"),
        ("detectable_format:bigram_wrapping", {}, "<<I am>> <<at home>>", "<<I am at home>>"),
        ("keywords:no_adjacent_consecutive", {}, "a c e", "a big cat"),
        ("keywords:word_once", {"keyword": ["sun"]}, "the sun", "sun and sunlight"),
        ("keywords:word_count_different_numbers", {"keyword": "a", "frequency": 2}, "a a", "a a a"),
        ("keywords:exclude_word_harder", {"keyword": "sun"}, "sunlight", "the Sun."),
        ("keywords:palindrome", {}, "my kayak", "I am a man"),
        ("keywords:keyword_specific_position", {"keyword": "cat", "n": 2, "m": 3}, "Hm! I, the cat.", "A b cat."),
        ("keywords:start_end", {}, "Rain or no rain", "Rain or no rain."),
        ("paragraphs:paragraphs", {}, "a\n***\nb", "a\n\nb"),
        ("paragraphs:paragraphs2", {}, "a\n\nb", "a\n***\nb"),
        ("first_word:first_word_sent", {"first_word": "so"}, "So a. So b!", "So a. b."),
        ("first_word:first_word_answer", {"first_word": "so"}, "So it is", "It is so"),
        ("last_word:last_word_sent", {"last_word": "so"}, "It is so. Is it so?", "So it is."),
        ("last_word:last_word_answer", {"last_word": "so"}, "It is so!", "So it is"),
        ("punctuation:punctuation_dot", {}, "a!", "a."),
        ("punctuation:punctuation_exclamation", {}, "a.", "a!"),
        ("count:lowercase_counting", {"N": 2}, "ABC def ghi", "a b c"),
        ("count:counting_composition", {"n_sent": 2, "n_words": 3},
         "\n***\n".join(["Aa bb cc. Dd ee ff."] * 3), "Aa bb cc. Dd ee ff."),
        ("count:count_unique", {}, "each is here. now", "no and no"),
        ("count:count_increment_word", {"keyword1": "one", "keyword2": "two"}, "one two two", "one two"),
        ("letters:letter_counting", {"N": 3, "relation": "less than"}, "a1b2", "abc"),
        ("verify_keyword_frequency", {"word": "sun", "N": 1, "quantifier": None}, "sun, sunlight", "sun sun"),
        ("validate_forbidden_words", {"forbidden_words": ["can"]}, "may", "a cannon"),
        ("verify_letter_frequency", {"letter": "a", "N": 1}, "Aa", "aa"),
        ("verify_paragraph_count", {"N": 2}, "a\n* * *\nb", "a\n***\nb"),
        ("validate_word_constraint", {"N": 3, "quantifier": "around"}, "a-b c", "a-b"),
        ("validate_paragraphs", {"N": 2, "first_word": "b", "i": 2}, "a\n\nb", "b\n\na"),
        ("validate_choice", {"options": ["yes", "no"]}, "I say yes", "perhaps"),
        ("validate_sections", {"N": 2, "section_splitter": "Part"}, "PART 1 a part 2", "Part a Part b"),
        ("validate_frequency_capital_words", {"N": 1, "quantifier": "at most"}, "A b", "A B"),
    ],
)  # fmt: skip
def test_an_instruction(name, kwargs, followed, not_followed):
    assert strictly(followed, name, **kwargs)
    assert not strictly(not_followed, name, **kwargs)


def test_what_no_response_says_is_not_followed():
    for name in ("punctuation:no_comma", "keywords:palindrome", "validate_lowercase"):
        assert not strictly(" \n", name)


def test_loose_variants():
    assert loose_variants("Sure:\n*a*\nBye") == [
        *("Sure:\n*a*\nBye", "*a*\nBye", "Sure:\n*a*", "*a*"),
        *("Sure:\na\nBye", "a\nBye", "Sure:\na", "a"),
    ]
    task = {"prompt": "?", "instruction_id_list": ["startend:quotation"]}
    response = 'Sure, here it is:\n"so"'
    assert ENVIRONMENT.score(response, task).outcome == "wrong"
    assert ENVIRONMENT.score(response, task | {"mode": "loose"}).outcome == "correct"


TWO = {
    "instruction_id_list": ["punctuation:no_comma", "keywords:word_once"],
    "kwargs": [{}, {"keyword": "sun", "relation": None}],
}
TRUTH = [{"instruction_id": TWO["instruction_id_list"], "kwargs": [None, {"keyword": "sun"}]}]


@pytest.mark.parametrize(
    "task", [TWO, {"ground_truth": TRUTH}, {"ground_truth": json.dumps(TRUTH)}, {"ground_truth": repr(TRUTH)}]
)
@pytest.mark.parametrize(
    ("response", "reward", "score", "outcome"),
    [
        ("the sun", "all", 1.0, "correct"),
        ("<think>sun, sun</think>the sun", "all", 1.0, "correct"),
        ("sun, sun</think>the sun", "all", 1.0, "correct"),
        ("the sun, yes", "all", 0.0, "wrong"),
        ("the sun, yes", "fraction", 0.5, "partial"),
        ("a, b", "fraction", 0.0, "wrong"),
        ("<think>the sun", "fraction", 0.0, "unparsable"),
    ],
)
def test_scores_of_every_form_of_a_row(task, response, reward, score, outcome):
    verdict = ENVIRONMENT.score(response, task | {"reward": reward})
    assert (verdict.score, verdict.outcome) == (score, outcome)


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ({}, "a task needs"),
        ({"instruction_id_list": []}, "1 to 64 instructions"),
        ({"instruction_id_list": ["a:b"]}, "no instruction 'a:b'"),
        ({"instruction_id_list": [["x"]]}, "no instruction"),
        ({"instruction_id_list": "punctuation:no_comma"}, "list of names"),
        ({"instruction_id_list": ["keywords:word_once"]}, "needs the argument 'keyword'"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": [{"a": 1}]}, "no argument 'a'"),
        ({"instruction_id_list": ["punctuation:no_comma"], "kwargs": []}, "one mapping for each"),
        ({"func_name": "verify_paragraph_count", "N": "many"}, "a whole number from 0"),
        ({"func_name": "verify_paragraph_count", "N": float("inf")}, "verify_paragraph_count"),
        ({"func_name": ["x"]}, "no instruction"),
        ({"ground_truth": "]"}, "neither JSON nor a literal"),
        ({"ground_truth": 3}, "must be a mapping"),
        (TWO | {"mode": "lenient"}, "mode must be one of"),
    ],
)
def test_a_task_that_makes_no_sense_is_an_error_of_ours(task, message):
    verdict = ENVIRONMENT.score("text", task)
    assert (verdict.outcome, verdict.score) == ("error", 0.0)
    assert message in verdict.detail
    with pytest.raises(ValueError, match=re.escape(message)):
        ENVIRONMENT.reset(options={"prompt": "?"} | task)


def test_a_keyword_that_takes_for_ever_is_a_timeout_only_where_the_prompt_takes_as_long():
    task = {"instruction_id_list": ["keywords:existence"], "kwargs": [{"keywords": ["(a|aa)+(b|bb|c)*\\1$"]}]}
    endless = "a" * 5000 + "!"
    assert ENVIRONMENT.score(endless, task).outcome == "unparsable"
    assert ENVIRONMENT.score(endless, task | {"prompt": endless}).outcome == "timeout"


@pytest.mark.parametrize(
    "response",
    ["\n" * 33_000, "[" * 33_000, "<<" * 16_000, "." * 33_000 + "x", "*" * 33_000, "Mr. " * 16_000, "a " * 33_000,
     "- \n" * 10_000, "<<a>> " * 10_000, "p. " * 16_000, "A" * 33_000, "a-" * 16_000, "'" * 33_000, "***\n" * 10_000,
     "<think>" * 10_000 + "</think>" + "#" * 16_000, "\t" * 33_000 + "x"],
    ids=lambda response: repr(response[:6]),
)  # fmt: skip
def test_no_response_takes_for_ever(response):
    for name, instruction in {**INSTRUCTIONS, **FUNCTIONS}.items():
        said = {"texts": ["ab"], "relation": "at least", "quantifier": "at least", "count": 2}
        kwargs = {key: said.get(reader.__name__, "a b") for key, reader in instruction.arguments.items()}
        fields = (
            {"instruction_id_list": [name], "kwargs": [kwargs]}
            if ":" in name
            else {"func_name": name} | kwargs
        )
        assert ENVIRONMENT.score(response, fields).outcome in ("correct", "wrong", "unparsable")


def test_every_drawn_prompt_can_be_followed_and_needs_work():
    environment = InstructionFollowingEnv(least=1, most=3)
    counts = Counter()
    for seed in range(400):
        prompt, info = environment.reset(seed=seed)
        task = environment.task
        verdict = environment.score(answer(task), task)
        assert verdict.outcome == "correct", (verdict.detail, task, answer(task))
        for idle in ("yes", prompt, info["instruction"], "I do not know.", ""):
            assert environment.score(idle, task).score == 0.0, (idle, task)
        counts.update(task["instruction_id_list"])
        counts[len(task["kwargs"])] += 1
    assert {kind.partition(",")[0] for kind in KINDS} <= set(counts)
    assert min(counts[1], counts[2], counts[3]) > 80


def test_splits_and_seeds():
    seen = {}
    for split in ("train", "valid", "test"):
        environment = InstructionFollowingEnv(split=split)
        for seed in range(20):
            prompt = environment.reset(seed=seed)[0]
            assert split_of_text(prompt) == split
            assert seen.setdefault(prompt, split) == split
            assert environment.reset(seed=seed)[0] == prompt


def test_a_response_is_read_once(monkeypatch):
    """The four accuracies of an episode's metrics are of the reading that the verdict is of."""
    read = []
    monkeypatch.setattr(
        instruction_following, "follow", lambda *arguments: read.append(arguments) or follow(*arguments)
    )
    environment = InstructionFollowingEnv()
    environment.reset(seed=3)
    *_, info = environment.step("a")
    assert len(read) == 1
    assert info["metrics"].keys() == InstructionFollowingEnv.metadata["metrics"].keys()


def test_an_episode():
    environment = InstructionFollowingEnv(least=2, most=2, reward="fraction")
    environment.reset(options={"prompt": "Name a star."} | TWO)
    _, reward, terminated, truncated, info = environment.step("the sun, of course")
    assert (reward, terminated, truncated, info["success"], info["outcome"]) == (
        0.5,
        True,
        False,
        False,
        "partial",
    )
    assert info["metrics"] == {
        "score": 0.5,
        "prompt_strict": 0.0,
        "prompt_loose": 0.0,
        "instruction_strict": 0.5,
        "instruction_loose": 0.5,
    }
    check_env(InstructionFollowingEnv(render_mode="ansi"))


@pytest.mark.parametrize(
    "kwargs",
    [{"least": 0}, {"least": 3, "most": 2}, {"most": 9}, {"mode": "x"}, {"reward": "x"}, {"tokenizer": "x"},
     {"language_detector": "x"}, {"split": "x"}],
)  # fmt: skip
def test_bad_kwargs_are_refused(kwargs):
    with pytest.raises(ValueError, match="must be"):
        InstructionFollowingEnv(**kwargs)


ANY_TEXT = st.text(alphabet=st.sampled_from("aA. \n*-[]<>\"'!?,#{}Эи漢\x00\ud800"), max_size=80) | st.text()


@settings(max_examples=25)
@given(
    response=ANY_TEXT,
    keyword=ANY_TEXT,
    number=st.integers(0, 5),
    how=st.sampled_from(["less than", "at least"]),
)
def test_no_text_is_too_odd_for_any_instruction(response, keyword, number, how):
    said = {
        **dict.fromkeys(("relation", "let_relation", "capital_relation"), how),
        **{key: [keyword or "a"] for key in ("keywords", "forbidden_words", "keyword_list", "options")},
        "quantifier": "around",
    }
    for name, instruction in {**INSTRUCTIONS, **FUNCTIONS}.items():
        kwargs = {
            key: said.get(key, number if reader.__name__ == "count" else keyword or "a")
            for key, reader in instruction.arguments.items()
        }
        fields = (
            {"instruction_id_list": [name], "kwargs": [kwargs]}
            if ":" in name
            else {"func_name": name} | kwargs
        )
        verdict = ENVIRONMENT.score(response, fields)
        assert verdict.outcome in ("correct", "wrong", "unparsable", "error", "timeout"), verdict


@pytest.mark.parametrize(
    "thoughts", ["<think>Alpha?</think>\n\n", "Beta first.\n</think>\n\n\n", "<think></think>", ""]
)
def test_paragraphs_are_counted_behind_thoughts(thoughts):
    kwargs = [{"num_paragraphs": 2, "nth_paragraph": 1, "first_word": "alpha"}]
    task = {"instruction_id_list": ["length_constraints:nth_paragraph_first_word"], "kwargs": kwargs}
    assert ENVIRONMENT.score(f"{thoughts}Alpha is first.\n\nBeta is second.", task).outcome == "correct"
    assert ENVIRONMENT.score(f"{thoughts}Beta is first.\n\nAlpha is second.", task).outcome == "wrong"
    # Without thoughts, blank lines at the beginning are a paragraph, as in IFEval.
    assert ENVIRONMENT.score("\n\nAlpha is first.\n\nBeta is second.", task).outcome == "wrong"


@pytest.mark.parametrize(
    ("keyword", "text", "is_found"),
    [("art", "smart", True), ("3.5", "3x5", True), ("What?", "Wha", True), ("$5", "it costs $5", False)],
)
def test_keywords_are_patterns_that_are_found_within_words_as_in_ifeval(keyword, text, is_found):
    assert strictly(text, "keywords:existence", keywords=[keyword]) is is_found
