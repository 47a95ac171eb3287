"""Items in the forms in which others publish them.

The private tests of LiveCodeBench are packed pickles of JSON text from untrusted sources: only plain values are read.
"""

import base64
import binascii
import io
import json
import pickle
import re
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NoReturn

from rollgym.envs.code.item import Item, ItemError, ProgramCall, Reference, Stream
from rollgym.envs.code.suites import readable, suite_of_check, suite_of_list, suite_of_pytest

_MOST_BYTES = 256 * 1024 * 1024


_LEETCODE_NAMES = """\
import bisect, collections, datetime, functools, heapq, itertools, math, operator, random, re, string, sys
from bisect import bisect_left, bisect_right, insort
from collections import Counter, OrderedDict, defaultdict, deque
from functools import cache, cmp_to_key, lru_cache, reduce
from heapq import heapify, heappop, heappush, heappushpop, heapreplace, nlargest, nsmallest
from itertools import accumulate, chain, combinations, count, permutations, product
from math import ceil, comb, floor, gcd, inf, log, log2, prod, sqrt
from typing import *
"""
_DEFINED = re.compile(r"^[ \t]*(?:async[ \t]+)?def[ \t]+(\w+)", re.MULTILINE)
_CONTEST_LIMIT = 60.0


def read_question(fields: Mapping[str, Any]) -> Item:
    """Return the item that task fields describe, which must say what is asked, as none needs to that is only graded.

    Raises:
        ItemError: As `read_item`, or nothing is asked.
    """
    item = read_item(fields)
    if not item.question.strip():
        raise ItemError(f"the item, read as {item.form}, asks no question")
    return item


def read_item(fields: Mapping[str, Any]) -> Item:
    """Return the item that task fields describe.

    Raises:
        ItemError: They are of no known form, or something in them is missing or makes no sense.
    """
    for names, read in _FORMS:
        if names <= fields.keys():
            item = _in_language(read(fields), fields.get("language"))
            if not item.tests:
                raise ItemError(f"the item, read as {item.form}, has no tests")
            return item
    known = "; ".join(" and ".join(sorted(names)) for names, _ in _FORMS)
    raise ItemError(f"the item is of no known form: it needs one of these sets of fields: {known}")


def _in_language(item: Item, language: Any) -> Item:
    if language is None or (isinstance(language, str) and language.lower() in ("python", "python3", "py")):
        return item
    if isinstance(language, str) and language.lower() in ("cpp", "c++") and item.streams:
        return replace(item, language="cpp")
    raise ItemError(
        f"an item of the form {item.form} is not solved in {language!r}: Python, or C++ for programs"
    )


def _human_eval(fields: Mapping[str, Any]) -> Item:
    prompt, entry = _text(fields, "prompt", ""), _text(fields, "entry_point")
    suite = suite_of_check(_text(fields, "test"), entry, _preamble(prompt, entry))
    return Item(
        form="HumanEval",
        question=f"Complete this Python function:\n\n```python\n{prompt.strip()}\n```",
        entry=entry,
        before=_preamble(prompt, entry),
        prompt=prompt,
        suite=suite,
        visible=1 if suite.tests > 1 else 0,
    )


def _preamble(prompt: str, entry: str) -> str:
    """Return what stands in a prompt before the function that is asked for, such as imports and helpers."""
    found = re.search(rf"^(?:async[ \t]+)?def[ \t]+{re.escape(entry)}\b", prompt, re.MULTILINE)
    before = prompt[: found.start()] if found else prompt
    return before if readable(before) else ""


def _eval_plus(fields: Mapping[str, Any]) -> Item:
    prompt, entry = _text(fields, "prompt"), _text(fields, "entry_point")
    inputs = [*_list(fields, "base_input"), *_list(fields, "plus_input", [])]
    tolerance = _number(fields.get("atol", 0), "atol")
    return Item(
        form="EvalPlus",
        question=f"Complete this Python function:\n\n```python\n{prompt.strip()}\n```",
        entry=entry,
        before=_preamble(prompt, entry),
        prompt=prompt,
        reference=Reference(
            f"{prompt}\n{_text(fields, 'canonical_solution')}",
            entry,
            [_sequence(each, "base_input") for each in inputs],
            tolerance or None,
        ),
        visible=min(len(_list(fields, "base_input")), 3),
    )


def _mbpp(fields: Mapping[str, Any]) -> Item:
    sources = [*_list(fields, "test_list"), *_list(fields, "challenge_test_list", [])]
    if not all(isinstance(each, str) for each in sources):
        raise ItemError("the field 'test_list' must hold assertions as text")
    imports = "\n".join(str(each) for each in _list(fields, "test_imports", []))
    setup = f"{imports}\n{_text(fields, 'test_setup_code', '')}".strip()
    suite = suite_of_list(sources, setup)
    question = _text(fields, "text", None) or _text(fields, "prompt", "")
    return Item(
        form="MBPP",
        question=question
        and f"{question}\nYour function is tested like this: {sources[0].strip() if sources else ''}",
        before=setup,
        suite=suite,
        visible=1 if suite.tests > 1 else 0,
    )


def _apps(fields: Mapping[str, Any]) -> Item:
    tests = fields["input_output"]
    tests = _json(tests, "input_output") if isinstance(tests, str) else tests
    if not isinstance(tests, Mapping):
        raise ItemError("the field 'input_output' must hold an object with inputs and outputs")
    question, starter = _text(fields, "question", ""), _text(fields, "starter_code", "")
    return _inputs_and_outputs("APPS", tests, question, starter)


def _bare(fields: Mapping[str, Any]) -> Item:
    question = _text(fields, "question", None) or _text(fields, "prompt", "")
    return _inputs_and_outputs("inputs and outputs", fields, question, "")


def _inputs_and_outputs(form: str, tests: Mapping[str, Any], question: str, starter: str) -> Item:
    inputs, outputs = _list(tests, "inputs"), _list(tests, "outputs")
    if len(inputs) != len(outputs):
        raise ItemError(f"there are {len(inputs)} inputs and {len(outputs)} outputs")
    name = tests.get("fn_name")
    if name is None:
        streams = [
            Stream(_stream(one), _accepted_streams(two)) for one, two in zip(inputs, outputs, strict=True)
        ]
        return Item(form=form, question=question, starter=starter, streams=streams, visible=_visible(streams))
    calls = [
        ProgramCall(_identifier(name), _arguments(one), _accepted_values(one, two))
        for one, two in zip(inputs, outputs, strict=True)
    ]
    return Item(
        form=form,
        question=question,
        starter=starter,
        entry=_identifier(name),
        before=_LEETCODE_NAMES,
        calls=calls,
        visible=_visible(calls),
        loose=True,
    )


def _code_contests(fields: Mapping[str, Any]) -> Item:
    public = _contest_streams(fields, "public_tests")
    others = [
        each for name in ("private_tests", "generated_tests") for each in _contest_streams(fields, name)
    ]
    memory = _number(fields.get("memory_limit_bytes") or 0, "memory_limit_bytes")
    return Item(
        form="CodeContests",
        question=_text(fields, "description", None) or _text(fields, "question", ""),
        streams=[*public, *others],
        visible=len(public) if others else 0,
        seconds=_time_limit(fields.get("time_limit")),
        memory_mb=max(64, min(4096, int(memory) >> 20)) if memory else None,
    )


def _contest_streams(fields: Mapping[str, Any], name: str) -> list[Stream]:
    tests = fields.get(name)
    if tests is None:
        return []
    tests = _json(tests, name) if isinstance(tests, str) else tests
    if not isinstance(tests, Mapping):
        raise ItemError(f"the field {name!r} must hold an object with input and output")
    inputs, outputs = _list(tests, "input"), _list(tests, "output")
    if len(inputs) != len(outputs):
        raise ItemError(f"the field {name!r} has {len(inputs)} inputs and {len(outputs)} outputs")
    return [Stream(_stream(one), _accepted_streams(two)) for one, two in zip(inputs, outputs, strict=True)]


def _time_limit(limit: Any) -> float | None:
    """Return seconds, given as such or as a protobuf duration."""
    if limit is None:
        return None
    if isinstance(limit, Mapping):
        limit = (
            _number(limit.get("seconds", 0), "time_limit")
            + _number(limit.get("nanos", 0), "time_limit") / 1e9
        )
    seconds = _number(limit, "time_limit")
    return min(seconds, _CONTEST_LIMIT) if seconds > 0 else None


def _live_code_bench(fields: Mapping[str, Any]) -> Item:
    public = _cases(fields.get("public_test_cases") or [], "public_test_cases")
    private = _private_cases(fields.get("private_test_cases") or [])
    metadata = fields.get("metadata") or {}
    metadata = _json(metadata, "metadata") if isinstance(metadata, str) else metadata
    name = metadata.get("func_name") if isinstance(metadata, Mapping) else None
    cases = [*public, *_cases(private, "private_test_cases")]
    functional = [case.get("testtype") == "functional" for case in cases]
    question, starter = _text(fields, "question_content", ""), _text(fields, "starter_code", "")
    visible = len(public) if private else 0
    if not any(functional):
        streams = [Stream(_text(case, "input"), [_text(case, "output")]) for case in cases]
        return Item(
            form="LiveCodeBench", question=question, starter=starter, streams=streams, visible=visible
        )
    if not all(functional):
        raise ItemError("the item has functional tests beside others")
    if name is None:
        raise ItemError("the field 'metadata' names no func_name for functional tests")
    calls = [
        ProgramCall(
            _identifier(name),
            [_json(line, "input") for line in _text(case, "input").split("\n") if line.strip()],
            [_json(_text(case, "output"), "output")],
        )
        for case in cases
    ]
    return Item(
        form="LiveCodeBench",
        question=question,
        starter=starter,
        entry=_identifier(name),
        before=_LEETCODE_NAMES,
        calls=calls,
        visible=visible,
        loose=True,
    )


def _cases(cases: Any, name: str) -> list[Mapping[str, Any]]:
    cases = _json(cases, name) if isinstance(cases, str) else cases
    if not isinstance(cases, list) or not all(isinstance(case, Mapping) for case in cases):
        raise ItemError(f"the field {name!r} must hold a list of objects with input, output and testtype")
    return cases


def _kod_code(fields: Mapping[str, Any]) -> Item:
    question = _text(fields, "question", "")
    info = fields.get("test_info")
    if isinstance(info, list) and info and isinstance(info[0], Mapping) and "function_declaration" in info[0]:
        question = f"{question}\n\nBegin with: {info[0]['function_declaration']}"
    suite = suite_of_pytest(_text(fields, "test"), _text(fields, "solution", ""))
    return Item(form="KodCode", question=question, suite=suite, visible=1 if suite.tests > 1 else 0)


def _sandbox_fusion(fields: Mapping[str, Any]) -> Item:
    """Read a row of assertions, or of inputs and outputs."""
    tests = fields["test"]
    question = _text(fields, "content")
    if isinstance(tests, str):
        labels = fields.get("labels") or {}
        labels = _json(labels, "labels") if isinstance(labels, str) else labels
        entry = labels.get("entry_point") if isinstance(labels, Mapping) else None
        if entry and "check" in _DEFINED.findall(tests):
            return _human_eval({"prompt": "", "test": tests, "entry_point": entry})
        return Item(form="SandboxFusion", question=question, suite=suite_of_list([tests], ""))
    streams = []
    for test in _cases(tests, "test"):
        one, two = test.get("input"), test.get("output")
        if not isinstance(one, Mapping) or not isinstance(two, Mapping):
            raise ItemError("a test needs input {stdin} and output {stdout}")
        streams.append(Stream(_text(one, "stdin"), [_text(two, "stdout")]))
    return Item(form="SandboxFusion", question=question, streams=streams, visible=_visible(streams))


_FORMS: Sequence[tuple[frozenset[str], Callable[[Mapping[str, Any]], Item]]] = (
    (frozenset({"base_input", "entry_point", "canonical_solution"}), _eval_plus),
    (frozenset({"test", "entry_point"}), _human_eval),
    (frozenset({"test_list"}), _mbpp),
    (frozenset({"input_output"}), _apps),
    (frozenset({"public_tests"}), _code_contests),
    (frozenset({"private_tests"}), _code_contests),
    (frozenset({"generated_tests"}), _code_contests),
    (frozenset({"public_test_cases"}), _live_code_bench),
    (frozenset({"private_test_cases"}), _live_code_bench),
    (frozenset({"content", "test"}), _sandbox_fusion),
    (frozenset({"test"}), _kod_code),
    (frozenset({"inputs", "outputs"}), _bare),
)


# -- fields ------------------------------------------------------------------------------------------------------


_NEEDED: Any = object()


def _text(fields: Mapping[str, Any], name: str, default: Any = _NEEDED) -> str:
    value = fields.get(name)
    if value is None and default is not _NEEDED:
        return default if isinstance(default, str) else ""
    if not isinstance(value, str):
        raise ItemError(f"the item needs the field {name!r}, as text")
    return value


def _list(fields: Mapping[str, Any], name: str, default: Any = _NEEDED) -> list[Any]:
    value = fields.get(name)
    if value is None and default is not _NEEDED:
        return list(default)
    if isinstance(value, str):
        value = _json(value, name)
    if not isinstance(value, list):
        raise ItemError(f"the item needs the field {name!r}, as a list")
    return value


def _sequence(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise ItemError(f"the field {name!r} must hold lists of arguments")
    return value


def _number(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < float("inf"):
        raise ItemError(f"the field {name!r} must be a number, not {value!r}")
    return float(value)


def _identifier(name: Any) -> str:
    if not isinstance(name, str) or not name.rpartition(".")[2].isidentifier():
        raise ItemError(f"{name!r} is no name of a function")
    # Some items name the method with its class.
    return name.rpartition(".")[2]


def _json(text: Any, name: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise ItemError(f"the field {name!r} holds no JSON: {str(error)[:100]}") from None


def _stream(value: Any) -> str:
    """Return what a program reads or writes; some items have it as a list of lines."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(line, str) for line in value):
        return "\n".join(value)
    raise ItemError("an input or output of a program must be text, or a list of lines")


def _accepted_streams(value: Any) -> list[str]:
    # A list of lists of lines: several answers are right.
    if isinstance(value, list) and value and all(isinstance(each, list) for each in value):
        return [_stream(each) for each in value]
    return [_stream(value)]


def _arguments(value: Any) -> list[Any]:
    if isinstance(value, str):
        return [_json(line, "inputs") for line in value.split("\n") if line.strip()]
    return _sequence(value, "inputs")


def _accepted_values(given: Any, value: Any) -> list[Any]:
    if isinstance(given, str) and isinstance(value, str):
        return [_json(value, "outputs")]
    # Many items wrap the one value that is returned in a list.
    return [value, value[0]] if isinstance(value, list) and len(value) == 1 else [value]


def _visible(tests: Sequence[Any]) -> int:
    return min(2, len(tests) - 1)


class _TextUnpickler(pickle.Unpickler):
    """Reads plain values only: a pickle can name any function of any module otherwise."""

    def find_class(self, module: str, name: str) -> NoReturn:
        raise pickle.UnpicklingError(f"it names {module}.{name}")

    def persistent_load(self, pid: Any) -> NoReturn:
        raise pickle.UnpicklingError("it refers to something outside")


def _private_cases(field: Any) -> Any:
    """Return the cases of the field `private_test_cases`: a list, JSON text, or the packed form.

    Raises:
        ItemError: It is none of these.
    """
    if not isinstance(field, str):
        return field
    if field.lstrip().startswith("["):
        return _json(field, "private_test_cases")
    try:
        packed = base64.b64decode(field, validate=True)
        unpacking = zlib.decompressobj()
        data = unpacking.decompress(packed, _MOST_BYTES)
        if unpacking.unconsumed_tail:
            raise ItemError(f"the field 'private_test_cases' is larger than {_MOST_BYTES >> 20} MiB")
        found = _TextUnpickler(io.BytesIO(data)).load()
    except (
        *(binascii.Error, zlib.error, pickle.UnpicklingError, EOFError, ValueError, LookupError),
        *(TypeError, AttributeError, MemoryError, RecursionError, OverflowError),
    ) as error:
        if isinstance(error, ItemError):
            raise
        raise ItemError(f"the field 'private_test_cases' cannot be unpacked: {str(error)[:100]}") from None
    return _json(found, "private_test_cases") if isinstance(found, str) else found
