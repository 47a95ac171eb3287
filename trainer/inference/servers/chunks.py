"""Generation chunks of a reply: their requests, their answers, and the checks of those. No I/O.

With them come, where a run asks for it, the experts that the server's mixture of experts took for each token.
"""

import binascii
from base64 import b64decode
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from io import BytesIO
from math import prod
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rollgym.trainer.inference.base import FinishReason, SamplingParams
from rollgym.trainer.inference.errors import MalformedReplyError
from rollgym.trainer.records.experts import Experts


@dataclass(frozen=True, slots=True)
class GenerationCall:
    """A request for one generation chunk of a reply.

    Attributes:
        request_id: Unique at the server; all of one length, because SGLang aborts by prefix.
        prompt_ids: All that the policy reads.
        sampling: How tokens are drawn.
        seed: Of this stretch.
        session_key: Names the episode; routers keep its requests together.
        cache_salt: Requests of different salts share no prefix cache.
        adapter: Name of the adapter that draws; None for the base model.
    """

    request_id: str
    prompt_ids: Sequence[int]
    sampling: SamplingParams
    seed: int
    session_key: str = ""
    cache_salt: str = ""
    adapter: str | None = None


@dataclass(frozen=True, slots=True)
class GenerationChunk:
    """One generation chunk of a reply, as parsed from an answer.

    Attributes:
        token_ids: What was sampled.
        logprobs: Log-probability of each, of whatever the server reports.
        labels: Name of the weights that drew each token; None where the server does not say.
        finish_reason: Why it ended.
        experts: Experts that tokens of prompt and stretch took; None if not requested.
    """

    token_ids: list[int]
    logprobs: list[float]
    labels: list[str] | None
    finish_reason: FinishReason
    experts: Experts | None = field(default=None, compare=False)


def common_sampling(sampling: SamplingParams) -> dict[str, Any]:
    """Return the sampling parameters that servers of all kinds call alike; what would change nothing is left out."""
    params: dict[str, Any] = {
        "temperature": sampling.temperature,
        "stop_token_ids": list(sampling.stop_token_ids),
    }
    if sampling.top_p < 1.0:
        params["top_p"] = sampling.top_p
    if sampling.top_k > 0:
        params["top_k"] = sampling.top_k
    return params


def labels_of_spans(spans: object, tokens: int, where: str) -> list[str] | None:
    """Return the label of each token from `[{"version", "start", "end"}]`, `end` exclusive; None without labels.

    Raises:
        MalformedReplyError: If the spans do not cover the tokens, each once and in order.
    """
    if spans is None:
        return None
    if not isinstance(spans, list):
        raise MalformedReplyError(f"{where}: weight_versions is no list")
    labels: list[str] = []
    for span in spans:
        if not isinstance(span, dict):
            raise MalformedReplyError(f"{where}: a weight version is no object")
        version, start, end = span.get("version"), span.get("start"), span.get("end")
        if type(version) not in (str, int) or type(start) is not int or type(end) is not int:
            raise MalformedReplyError(f"{where}: a weight version lacks version, start or end")
        if start != len(labels) or not start <= end <= tokens:
            raise MalformedReplyError(
                f"{where}: weight versions do not follow each other: {start}..{end} after {len(labels)} of {tokens}"
            )
        labels += [str(version)] * (end - start)
    if len(labels) != tokens:
        raise MalformedReplyError(f"{where}: weight versions cover {len(labels)} of {tokens} tokens")
    return labels


def checked_stretch(stretch: GenerationChunk, call: GenerationCall, where: str) -> GenerationChunk:
    """Check what must hold of every stretch.

    Raises:
        MalformedReplyError: If lengths differ, or more came than was asked for.
    """
    tokens = len(stretch.token_ids)
    if len(stretch.logprobs) != tokens:
        raise MalformedReplyError(f"{where}: {len(stretch.logprobs)} log-probabilities for {tokens} tokens")
    if tokens > call.sampling.max_new_tokens:
        raise MalformedReplyError(
            f"{where}: {tokens} tokens, and {call.sampling.max_new_tokens} were asked for"
        )
    if tokens == 0 and stretch.finish_reason != "abort":
        raise MalformedReplyError(f"{where}: it ended by {stretch.finish_reason!r} without a token")
    return stretch


def prompt_logprobs(
    entries: Sequence[Any], prompt_ids: Sequence[int], value_of: Callable[[Any, int, int], Any], where: str
) -> list[float]:
    """Return the log-probabilities of a prompt's tokens after the first.

    Args:
        entries: What the server says of each token.
        prompt_ids: The tokens.
        value_of: Finds the log-probability in what is said of a token, given that, the token and its index.
        where: What `entries` are of, for the message.

    Raises:
        MalformedReplyError: If one is missing or is not a number.
    """
    if len(entries) != len(prompt_ids):
        raise MalformedReplyError(
            f"{where}: {len(entries)} log-probabilities for a prompt of {len(prompt_ids)}"
        )
    values = []
    for index, (entry, token) in enumerate(zip(entries[1:], prompt_ids[1:], strict=True), start=1):
        value = value_of(entry, token, index)
        if type(value) not in (float, int):
            raise MalformedReplyError(f"{where}: no log-probability of the prompt's token {index}")
        values.append(float(value))
    return values


def read_array_file(text: object, tokens: int, where: str) -> Experts:
    """Read vLLM's: a file of numpy in base64, `[tokens - 1, layers, taken]`.

    Args:
        text: What the reply has.
        tokens: Tokens of prompt and reply together; of the last one nothing was computed.
        where: What is read, for messages.

    Raises:
        MalformedReplyError: If it is none, or of other tokens.
    """
    stream = BytesIO(_bytes(text, where))
    try:
        version = np.lib.format.read_magic(stream)
        read = (
            np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
        )
        shape, _, kind = read(stream)
    except (ValueError, EOFError) as error:
        raise MalformedReplyError(f"{where}: routed_experts is no file of numpy: {error}") from error
    raw = stream.read()
    # Nothing is made of a size that the file only says it has.
    if (
        kind.kind not in "biuf"
        or len(shape) != 3
        or min(shape) < 0
        or prod(shape) * kind.itemsize != len(raw)
    ):
        raise MalformedReplyError(f"{where}: routed_experts is no array of tokens, layers and experts")
    return _checked(np.frombuffer(raw, dtype=kind).reshape(shape), tokens, where)


def read_integers(text: object, tokens: int, where: str) -> Experts:
    """Read SGLang's: integers of 4 bytes in base64, as many for each token; see `read_array_file`.

    Raises:
        MalformedReplyError: If it is none, or of other tokens.
    """
    raw = _bytes(text, where)
    if len(raw) % 4:
        raise MalformedReplyError(
            f"{where}: routed_experts has {len(raw)} bytes, which are no integers of 4 bytes"
        )
    return _checked(np.frombuffer(raw, dtype="<i4"), tokens, where)


def _bytes(text: object, where: str) -> bytes:
    if not isinstance(text, str):
        raise MalformedReplyError(
            f"{where} has no routed_experts: start vLLM with --enable-return-routed-experts (SGLang with "
            "--enable-return-routed-experts), or set inference.routed_experts=false"
        )
    try:
        return b64decode(text, validate=True)
    except (binascii.Error, ValueError) as error:
        raise MalformedReplyError(f"{where}: routed_experts is not base64: {error}") from error


def _checked(content: NDArray[np.generic], tokens: int, where: str) -> Experts:
    computed = tokens - 1
    if computed < 1 or content.size == 0 or content.size % computed:
        raise MalformedReplyError(
            f"{where}: routed_experts has {content.size} numbers for {computed} tokens that were computed"
        )
    if content.ndim == 3 and len(content) != computed:
        raise MalformedReplyError(
            f"{where}: routed_experts is of {len(content)} tokens, and {computed} were computed"
        )
    if (
        content.dtype.kind not in "iu"
        or int(content.min()) < 0
        or int(content.max()) > np.iinfo(np.int16).max
    ):
        raise MalformedReplyError(f"{where}: routed_experts has something that is no expert's number")
    return content.reshape(computed, -1).astype(np.int16)
