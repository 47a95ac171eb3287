"""InstructionFollowing-v0 against recorded verdicts of IFEval's own checkers."""

import json
from collections import Counter

import pytest

from rollgym.envs.verifiers.instructions.following import follow, read_constraints
from rollgym.envs.verifiers.instructions.text import DetectorName, NltkTokenizer, text_tools
from tests.support.recorded_data import recorded

# Word salad in capitals is English to us, and German or Danish to langdetect.
BY_LANGUAGE = {"change_case:english_capital", "change_case:english_lowercase", "language:response_language"}


def agreement(detector: DetectorName, *, by_language: bool = False) -> tuple[Counter[str], Counter[str]]:
    """Count verdicts, and those that agree, by instruction; of all rows, or of those that ask for a language."""
    tools = text_tools("builtin", detector)
    total: Counter[str] = Counter()
    agreed: Counter[str] = Counter()
    for line in recorded("ifeval_cases.jsonl").read_text().splitlines():
        row = json.loads(line)
        if by_language and not BY_LANGUAGE & set(row["instruction_id_list"]):
            continue
        found = follow(row["response"], read_constraints(row), tools)
        for each, strict, loose in zip(found, row["strict"], row["loose"], strict=True):
            total[each.name] += 1
            agreed[each.name] += (each.strict, each.loose) == (strict, loose)
        if detector == "langdetect" or not BY_LANGUAGE & set(row["instruction_id_list"]):
            assert all(each.strict for each in found) == row["prompt_strict"]
            assert all(each.loose for each in found) == row["prompt_loose"]
    return total, agreed


def test_the_builtin_tools_agree_wherever_no_language_is_guessed() -> None:
    total, agreed = agreement("builtin")
    assert total.total() == 2490
    differing = total - agreed
    assert set(differing) <= BY_LANGUAGE
    assert differing["language:response_language"] <= 3
    assert differing.total() <= 19


def test_with_langdetect_all_agree() -> None:
    pytest.importorskip("langdetect", reason="the extra ifeval is not installed")
    total, agreed = agreement("langdetect", by_language=True)
    assert set(total) >= BY_LANGUAGE
    assert total == agreed


def test_the_builtin_tokenizer_finds_what_punkt_and_the_treebank_find() -> None:
    pytest.importorskip("nltk", reason="the extra ifeval is not installed")
    try:
        NltkTokenizer()
    except ValueError as error:
        assert "python -m nltk.downloader punkt_tab" in str(error)  # noqa: PT017
        pytest.skip(str(error))
    builtin, reference = text_tools("builtin", "builtin"), text_tools("nltk", "builtin")
    for line in recorded("ifeval_cases.jsonl").read_text().splitlines():
        row = json.loads(line)
        constraints = [
            each
            for each in read_constraints(row)
            if each.name in ("length_constraints:number_sentences", "change_case:capital_word_frequency")
        ]
        assert follow(row["response"], constraints, builtin) == follow(
            row["response"], constraints, reference
        )
