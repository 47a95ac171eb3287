"""Structured outputs in the embedded engine: which tokens may come next in a reply.

The grammars are llguidance's, which reads a tokenizer's bytes, takes microseconds for a token and bounds what it
computes. Nothing here knows torch; the sampler masks with what it is given. Structural tags, as xgrammar has them and
with it vLLM and SGLang, are rewritten in its grammars: only the formats are known that calls of tools are made of
(`rollgym.clients.replies.formats`).
"""

import asyncio
import json
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import orjson
from numpy.typing import NDArray

from rollgym.extras import MissingExtraError, import_extra
from rollgym.trainer.inference.base import SamplingParams, StructuredOutput
from rollgym.trainer.inference.engine import grammar_trial
from rollgym.trainer.inference.errors import StructuredOutputError

_ANY_TEXT = "ANY_TEXT: /(.|\\n)*/"
Format = Mapping[str, Any]


def lark_of(structural_tag: str) -> str:
    """Return a structural tag as a grammar of Lark, as llguidance reads it.

    Raises:
        ValueError: If it is malformed, or of a format that is not known here.
    """
    rules = _Rules()
    try:
        start = rules.expression(json.loads(structural_tag)["format"])
    except (KeyError, TypeError, RecursionError) as error:
        raise ValueError(f"the structural tag is malformed: {error!r}") from error
    return "\n".join([f"start: {start}", *rules.lines])


class _Rules:
    """Writes formats as expressions.

    Attributes:
        lines: Rules that the expressions name.
    """

    def __init__(self) -> None:
        self.lines: list[str] = []
        self._expressions: Mapping[str, Callable[[Format], str]] = {
            "const_string": self._const_string,
            "json_schema": self._json_schema,
            "sequence": self._sequence,
            "or": self._or,
            "optional": self._optional,
            "tag": self._tag,
            "tags_with_separator": self._tags_with_separator,
        }

    def expression(self, form: Format) -> str:
        """Return a format as an expression."""
        kind = form["type"]
        if kind not in self._expressions:
            raise ValueError(f"structural tags of the format {str(kind)[:40]!r} are not known here")
        return self._expressions[kind](form)

    def _named(self, name: str, rule: str, flags: str = "") -> str:
        name = f"{name}_{len(self.lines)}"
        self.lines.append(f"{name}{flags}: {rule}")
        return name

    def _const_string(self, form: Format) -> str:
        return _literal(form["value"])

    def _json_schema(self, form: Format) -> str:
        return self._named("json", f"%json {json.dumps(form['json_schema'])}")

    def _sequence(self, form: Format) -> str:
        return " ".join(map(self.expression, form["elements"]))

    def _or(self, form: Format) -> str:
        return _alternatives([self.expression(each) for each in form["elements"]])

    def _optional(self, form: Format) -> str:
        return f"({self.expression(form['content'])})?"

    def _tag(self, form: Format) -> str:
        begin, content, end = form["begin"], form["content"], form["end"]
        if content["type"] == "any_text":
            if _ANY_TEXT not in self.lines:
                self.lines.append(_ANY_TEXT)
            # The first end is the end.
            return f"{_literal(begin)} {self._named('text', f'ANY_TEXT {_literal(end)}', '[lazy]')}"
        return f"{_literal(begin)} {self.expression(content)} {_literal(end)}"

    def _tags_with_separator(self, form: Format) -> str:
        # Named, so that what repeats is written once.
        one = self._named("call", _alternatives([self.expression(each) for each in form["tags"]]))
        some = one if form["stop_after_first"] else f"{one} ({_literal(form['separator'])} {one})*"
        return some if form["at_least_one"] else f"({some})?"


def _literal(text: str) -> str:
    return json.dumps(text)


def _alternatives(expressions: Sequence[str]) -> str:
    return f"({' | '.join(expressions)})"


_KEPT = 64
"""Grammars that are kept compiled."""
_REMEMBERED = 1024
"""Grammars of which it is known whether they can be had."""
_LONGEST_REASON = 300
_LONGEST_WORD = 60


class GrammarState:
    """State of one reply's grammar. Not thread-safe.

    Args:
        matcher: llguidance's.
    """

    def __init__(self, matcher: Any) -> None:
        self._matcher = matcher

    def allowed(self, vocabulary: int) -> NDArray[np.bool_]:
        """Return for each token id whether the grammar allows it next.

        Args:
            vocabulary: How many ids there are.

        Raises:
            StructuredOutputError: If none is left, or the grammar takes too much to compute.
        """
        packed = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        _require_sound(self._matcher)
        allowed = np.unpackbits(packed, bitorder="little", count=vocabulary).astype(np.bool_)
        if not allowed.any():
            raise StructuredOutputError("no token that the model knows goes on with the structured output")
        return allowed

    def take(self, token: int) -> bool:
        """Advance by an allowed token; return whether it ends the reply.

        Raises:
            StructuredOutputError: If the grammar takes too much to compute.
        """
        self._matcher.consume_token(token)
        _require_sound(self._matcher)
        return bool(self._matcher.stop_reason() == "EndOfSentence")


class Grammars:
    """Compiles the grammars of constrained replies, and caches them.

    Args:
        tokenizer: Of the policy.
        vocabulary: How many token ids its model knows.
    """

    def __init__(self, tokenizer: Any, vocabulary: int) -> None:
        self._tokenizer = tokenizer
        self._vocabulary = vocabulary
        self._lock = threading.Lock()
        self._tokenizers: dict[tuple[int, ...], Any] = {}
        self._matchers: OrderedDict[tuple[StructuredOutput, tuple[int, ...]], Any] = OrderedDict()
        # One at a time: a request with many grammars takes at most one core from the others.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")
        self._trying = asyncio.Lock()
        self._tried: OrderedDict[StructuredOutput, str] = OrderedDict()

    async def compile(self, sampling: SamplingParams) -> None:
        """Compile a reply's grammar without blocking the event loop: in a process of its own first.

        Raises:
            StructuredOutputError: If it is malformed, cannot be had of the library, or nothing fits it.
        """
        if sampling.structured is not None:
            await self._require_tried(sampling.structured)
            await asyncio.get_running_loop().run_in_executor(self._thread, self._matcher, sampling)

    async def _require_tried(self, structured: StructuredOutput) -> None:
        async with self._trying:
            if structured not in self._tried:
                _library("llguidance")
                self._tried[structured] = await _trial(*_kind_and_text(structured))
                if len(self._tried) > _REMEMBERED:
                    self._tried.popitem(last=False)
            error = self._tried[structured]
        if error:
            raise StructuredOutputError(
                f"the structured output cannot be had here: {_brief(error)} (llguidance)"
            )

    def state(self, sampling: SamplingParams) -> GrammarState:
        """Return the initial state of the grammar of a reply that has one.

        Raises:
            StructuredOutputError: As `compile`, which is called before.
        """
        return GrammarState(self._matcher(sampling).deep_copy())

    def close(self) -> None:
        """Stop the compiling thread, and cancel compilations that wait."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _matcher(self, sampling: SamplingParams) -> Any:
        structured, stops = sampling.structured, sampling.stop_token_ids
        assert structured is not None
        key = (structured, stops)
        with self._lock:
            if key in self._matchers:
                self._matchers.move_to_end(key)
                return self._matchers[key]
        # Without the lock: replies whose grammars are there already are drawn meanwhile.
        matcher = _compiled(structured, self._words(stops))
        with self._lock:
            self._matchers[key] = matcher
            if len(self._matchers) > _KEPT:
                self._matchers.popitem(last=False)
        return matcher

    def _words(self, stops: tuple[int, ...]) -> Any:
        """Return llguidance's view of the tokenizer, which takes a second for a large one."""
        if stops not in self._tokenizers:
            library = _library("llguidance.hf")
            try:
                self._tokenizers[stops] = library.from_tokenizer(
                    self._tokenizer,
                    n_vocab=max(self._vocabulary, len(self._tokenizer)),
                    eos_token=list(stops) or None,
                )
            except ValueError as error:
                raise StructuredOutputError(
                    f"structured outputs need a fast tokenizer (of the library tokenizers): {error}"
                ) from error
        return self._tokenizers[stops]


def _kind_and_text(structured: StructuredOutput) -> tuple[str, str]:
    """Return a structured output as llguidance reads it.

    Raises:
        StructuredOutputError: If it has no form for it.
    """
    if structured.kind != "structural_tag":
        return structured.kind, structured.text
    try:
        return "lark", lark_of(structured.text)
    except ValueError as error:
        raise StructuredOutputError(str(error)) from error


async def _trial(kind: str, text: str) -> str:
    """Return what is wrong with a structured output, as `grammar_trial` finds it."""
    program = await asyncio.create_subprocess_exec(
        sys.executable,
        "-P",
        grammar_trial.__file__,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    asked = orjson.dumps({"kind": kind, "text": text})
    try:
        said, _ = await program.communicate(asked)
    except BaseException:
        if program.returncode is None:
            program.kill()
        raise
    if program.returncode:
        return f"it takes more than {grammar_trial.SECONDS} seconds or too much memory to compile"
    return str(orjson.loads(said)["error"])


def _library(module: str) -> Any:
    try:
        return import_extra(module, "structured")
    except MissingExtraError as error:
        raise StructuredOutputError(f"structured outputs: {error}") from error


def _compiled(structured: StructuredOutput, words: Any) -> Any:
    library = _library("llguidance")
    try:
        grammar = library.grammar_from(*_kind_and_text(structured))
    except ValueError as error:
        raise StructuredOutputError(f"the structured output is malformed: {_brief(str(error))}") from error
    matcher = library.LLMatcher(
        words, grammar, log_level=0, limits=library.LLParserLimits(verbose_errors=False)
    )
    _require_sound(matcher)
    # What has no beginning is found with the first token.
    GrammarState(matcher.deep_copy()).allowed(words.vocab_size)
    return matcher


def _require_sound(matcher: Any) -> None:
    if matcher.is_error():
        raise StructuredOutputError(
            f"the structured output cannot be had here: {_brief(matcher.get_error())} (llguidance)"
        )


def _brief(text: str) -> str:
    # What was asked for is quoted in full.
    line = " ".join(word if len(word) <= _LONGEST_WORD else f"{word[:40]}..." for word in text.split())
    return line if len(line) <= _LONGEST_REASON else f"{line[:_LONGEST_REASON]}..."
