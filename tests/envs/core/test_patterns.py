"""Regular expressions of strangers."""

import re
import weakref

import pytest
import regex
from hypothesis import given
from hypothesis import strategies as st

from rollgym.envs.core import patterns

SIGNS = st.text(alphabet="ab(){}[]*+?|\\^$.,0123456789-:#ixVe<=", max_size=30)


@given(pattern=SIGNS, text=st.text(alphabet="ab({5", max_size=20))
def test_whatever_is_written_is_used_or_refused(pattern, text):
    try:
        patterns.check_pattern(pattern)
    except ValueError as error:
        assert "regular expression" in str(error) or "repeats too much" in str(error)  # noqa: PT017
        return
    found = patterns.searches(pattern, text)
    assert found == (patterns.occurrences(pattern, text) > 0)
    assert found or not patterns.matches(pattern, text)


@given(
    words=st.lists(st.text(alphabet="ab.+*", min_size=1), min_size=1, max_size=4),
    text=st.text(alphabet="ab.+*"),
)
def test_escaped_texts_are_found_where_they_are(words, text):
    for word in words:
        assert patterns.searches(re.escape(word), text) == (word in text)
        assert patterns.occurrences(re.escape(word), text) == text.count(word)
        assert patterns.matches(re.escape(word), text) == (word == text)


@pytest.mark.parametrize(
    "pattern",
    [
        "(?:a{1000}){1000}",
        "((a{100}){10,100}b){3}",
        "[(]{3}(a{200}){200}",
        "(?:(?:a{30}){30}){30,}",
        "a" * 2001,
        "(?:a{00000000200}){00000000200}",
        "((){200}){200}",
    ],
)
def test_what_would_grow_too_large_is_refused(pattern):
    with pytest.raises(ValueError, match=r"repeats too much|at most 2000 characters"):
        patterns.check_pattern(pattern)


@pytest.mark.parametrize(
    "pattern",
    [
        "(?:a{100}(?#()){100}",
        "(?x)(?:a {100}){100}",
        "(?ix-s:(?:a {100}){100})",
        "(?:a{100}(?x)){100}",
        "(?V1)(?:a{100}[[(]a]){100}",
        "(?iV1:a)",
        "(?:a{100}[[:alpha:](]){100}",
        "(?:a{100}[^b[:^alpha:](]){100}",
        "(?:a{100}){e<=0}{100}",
        "(?:a{100}){2i+3s<=4}{100}",
        "(?:a{100}){1<=e<=2:[(]}{100}",
    ],
)
def test_what_hides_repetitions_is_refused(pattern):
    with pytest.raises(ValueError, match="is not taken in a regular expression"):
        patterns.check_pattern(pattern)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [
        ("(?P<x>a)(?P=x)", "aa"),
        ("(?i-x:a b)", "A B"),
        ("(?s:.)", "\n"),
        ("[(?#]x:", "#x:"),
        (r"\(?#", "(#"),
        (r"\{e\}", "{e}"),
        ("{name}", "{name}"),
        ("[[:]", ":"),
        ("[a:]{2}", "a:"),
        ("(?V0)a{2,3}", "aaa"),
    ],
)
def test_what_only_looks_like_it_is_taken(pattern, text):
    assert patterns.matches(pattern, text)


def test_few_of_the_patterns_that_take_much_memory_are_kept(monkeypatch):
    compile_pattern, made = regex.compile, []

    def compiled(*arguments, **options):
        found = compile_pattern(*arguments, **options)
        made.append(weakref.ref(found))
        return found

    monkeypatch.setattr(regex, "compile", compiled)
    for number in range(100):
        patterns.check_pattern(f"(?:ab{number}){{900}}")
    assert len(made) == 100
    assert sum(each() is not None for each in made) < 50


@pytest.mark.parametrize("pattern", ["(x+x+)+y\\1", "(x|xx)+(y|z)\\1"])
def test_what_takes_for_ever_ends(pattern):
    for look in (patterns.searches, patterns.occurrences, patterns.matches):
        with pytest.raises(patterns.TooMuchWorkError, match="takes over"):
            look(pattern, "x" * 5000)
