"""Docstrings and comments use the words of the field: patterns that only this code base had stay away."""

import ast
import io
import re
import tokenize
from collections.abc import Iterator

import pytest

from tests.support.processes import ROOT

FLOORS = ("clients", "env_server", "envs", "sandbox", "trainer")
PER_1000_WORDS = {
    r"\b(?:nobody|somebody|anybody|whoever)\b": 0.05,
    r"\btold\b": 0.1,
    r"\b(?:go|goes|going|gone|went) on\b": 0.05,
    r"\b(?:is|are|was|were) no \w+": 0.3,
    r"\bwhere (?:it|there|they|that|none|one)\b": 0.1,
    r"\banew\b": 0.02,
}
"""How often each may occur; ten other code bases of the field are at or below these, measured alike."""


def prose(source: str) -> Iterator[str]:
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


@pytest.fixture(scope="module")
def texts() -> dict[str, str]:
    files = [path for floor in FLOORS for path in sorted((ROOT / floor).rglob("*.py"))]
    named = {path.relative_to(ROOT).as_posix(): path.read_text() for path in files}
    return {name: "\n".join(prose(source)) for name, source in named.items()}


@pytest.mark.parametrize("pattern", PER_1000_WORDS)
def test_words_of_our_own_are_rare(texts, pattern):
    words = sum(len(text.split()) for text in texts.values())
    found = [
        f"{name}: {match.group()}"
        for name, text in texts.items()
        for match in re.finditer(pattern, text, re.I)
    ]
    assert len(found) <= PER_1000_WORDS[pattern] * words / 1000, "\n".join(found)
