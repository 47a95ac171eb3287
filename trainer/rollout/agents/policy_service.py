"""The service that answers agents: the policy, an agent's own sampling parameters, and what its replies must look like.

Constraints of calls are as vLLM and SGLang have them: a call that must be made looks as the family writes it, with
arguments by the tool's schema; beside a form the reply is either calls or an answer.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rollgym.clients.replies.formats.calls import CallGrammar
from rollgym.clients.replies.formats.hermes import HERMES
from rollgym.clients.replies.formats.table import FORMATS
from rollgym.trainer.core.seeding import derive_seed
from rollgym.trainer.inference.base import InferenceClient, SamplingParams, StructuredOutput
from rollgym.trainer.rollout.agents.calls import AgentCall, RequestedSampling
from rollgym.trainer.rollout.agents.errors import ApiError, unsupported
from rollgym.trainer.rollout.agents.splicing import SplicingRenderer
from rollgym.trainer.rollout.agents.structured import RequiredForm, is_deep, plain_schema

_MOST_BYTES = 1 << 17
"""Of all tools that may be called."""
_NO_PARAMETERS = {"type": "object", "properties": {}}
_Format = Mapping[str, Any]


def held_reply(call: AgentCall, tool_format: str) -> tuple[RequiredForm | None, tuple[str, ...]]:
    """Return the constraint on a request's reply, and the fields that are ignored if no constraint is possible.

    Args:
        call: The request.
        tool_format: The policy family's format of tool calls.
    """
    wanted = call.wishes.structured
    asked = () if wanted is None else (wanted.param,)
    if call.must_call:
        spare = ("tool_choice", *asked)
        held = _held_to_calls(call, tool_format, spare)
    elif wanted is not None and call.reads_tools:
        spare = asked
        held = _held_to_either(call, tool_format, wanted)
    else:
        return wanted, ()
    return held, (() if held is not None else spare)


def _held_to_calls(call: AgentCall, tool_format: str, spare: tuple[str, ...]) -> RequiredForm | None:
    grammar = FORMATS[tool_format].grammar
    tags = None if grammar is None else _tags(grammar, call.tools, call.must_call)
    if grammar is None or tags is None:
        return None
    return _wanted(
        _calls(grammar, tags, several=call.parallel_tools), RequiredForm(_NOTHING, "tool_choice", spare)
    )


def _held_to_either(call: AgentCall, tool_format: str, wanted: RequiredForm) -> RequiredForm | None:
    """Hold a reply to calls of tools or to an answer; None if the two cannot be distinguished by how they begin."""
    grammar = FORMATS[tool_format].grammar
    if grammar is None or not grammar.marked or wanted.output.kind != "json":
        return None
    tags = _tags(grammar, call.tools, [tool["function"]["name"] for tool in call.tools])
    if tags is None:
        return None
    answer = {"type": "json_schema", "json_schema": json.loads(wanted.output.text)}
    either = {"type": "or", "elements": [_calls(grammar, tags, several=call.parallel_tools), answer]}
    begins = tuple(grammar.opening + tag["begin"] for tag in tags)
    return _wanted(either, RequiredForm(_NOTHING, wanted.param, (wanted.param,), begins))


_NOTHING = StructuredOutput("structural_tag", "")


def _wanted(form: _Format, wanted: RequiredForm) -> RequiredForm | None:
    try:
        text = json.dumps({"type": "structural_tag", "format": form}, ensure_ascii=False, allow_nan=False)
        size = len(text.encode())
    except ValueError:  # a number or half a character that JSON has no form for
        return None
    output = StructuredOutput("structural_tag", text)
    return RequiredForm(output, wanted.param, wanted.spare, wanted.begins) if size <= _MOST_BYTES else None


def _tags(
    grammar: CallGrammar, tools: Sequence[Mapping[str, Any]], names: Sequence[str]
) -> list[_Format] | None:
    """Return the tags of calls of tools; None if one of them has none."""
    tags = []
    for function in (tool["function"] for tool in tools):
        schema = function.get("parameters", _NO_PARAMETERS)
        if function["name"] not in names:
            continue
        tag = None if is_deep(schema) else _tag(grammar, function, schema)
        if tag is None:
            return None
        tags.append(tag)
    return tags or None


def _tag(grammar: CallGrammar, function: Mapping[str, Any], schema: Any) -> Mapping[str, Any] | None:
    try:
        plain = plain_schema(schema)
        return grammar.tag(function["name"], plain) if isinstance(plain, Mapping) else None
    except (TypeError, ValueError):  # a name that JSON has no form for
        return None


def _calls(grammar: CallGrammar, tags: Sequence[_Format], *, several: bool) -> _Format:
    calls = {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": grammar.separator,
        "at_least_one": True,
        "stop_after_first": not several,
    }
    if not grammar.opening:
        return calls
    opening, closing = (
        {"type": "const_string", "value": each} for each in (grammar.opening, grammar.closing)
    )
    return {"type": "sequence", "elements": [opening, calls, closing]}


SamplingPolicy = Literal["run", "refuse", "agent"]
"""The treatment of an agent's own sampling parameters: ignored, refused, or heeded.

A run trains the distribution that it samples from, which is one for all replies; only if nothing is trained may an
agent choose.
"""


@dataclass(frozen=True, slots=True)
class PolicyService:
    """The policy and its settings, shared by all sessions.

    Attributes:
        client: The inference client.
        renderer: Makes prompts of conversations.
        sampling: Sampling parameters of replies.
        max_length: Longest row in tokens.
        model: The name that the policy has in the API.
        tool_format: The policy family's format of tool calls.
        wishes: How the agent's own sampling parameters are handled.
        seed: The run's seed.
        purpose: Name of the family of random streams, such as "train".
        reads_seeds: Whether the inference engine draws equal replies for equal seeds.
        unstructured: Why an agent cannot say what its replies must look like; empty if it can.
    """

    client: InferenceClient
    renderer: SplicingRenderer
    sampling: SamplingParams
    max_length: int
    model: str
    tool_format: str
    wishes: SamplingPolicy
    seed: int
    purpose: str
    reads_seeds: bool = True
    unstructured: str = ""

    def __post_init__(self) -> None:
        # Hermes' marks are the ones that it writes for templates that know no tools.
        if self.tool_format == HERMES.name:
            self.renderer.renderer.template.write_tools()

    def settled(self, call: AgentCall) -> tuple[AgentCall, tuple[str, ...]]:
        """Return a request with the constraint on its reply, and those of its fields that are ignored.

        Raises:
            ApiError: If they must not be.
        """
        wanted, unheld = held_reply(call, self.tool_format)
        if wanted is not None and wanted.spare and (self.unstructured or self.wishes == "refuse"):
            unheld, wanted = wanted.spare, None
        self._require_structured(wanted)
        settled = replace(call, wishes=replace(call.wishes, structured=wanted))
        return settled, self._ignored(call, unheld)

    def _ignored(self, call: AgentCall, unheld: tuple[str, ...]) -> tuple[str, ...]:
        heeded = self.wishes == "agent"
        unheeded = _unheeded(call.wishes, self.sampling, heeded=heeded)
        if unheeded and heeded:
            raise unsupported(f"{', '.join(unheeded)}: not supported here", unheeded[0])
        if unheeded and self.wishes == "refuse":
            raise _is_the_runs(*unheeded)
        unread = ("seed",) if heeded and call.wishes.seed is not None and not self.reads_seeds else ()
        return (*unheeded, *unread, *unheld, *call.not_enforced)

    def _require_structured(self, wanted: RequiredForm | None) -> None:
        if wanted is None:
            return
        if self.unstructured:
            raise unsupported(f"{wanted.param}: {self.unstructured}", wanted.param)
        if self.wishes == "refuse":
            raise _is_the_runs(wanted.param)

    def seed_for(self, wishes: RequestedSampling, choice: int, *names: str | int) -> int:
        """Return the seed of a reply's random stream: the agent's own, if its parameters are heeded and include one.

        Args:
            wishes: The agent's sampling parameters.
            choice: Index of the reply among those to one request.
            names: Place of the reply among those of the run.
        """
        if self.wishes == "agent" and wishes.seed is not None:
            return derive_seed(self.seed, "agent", wishes.seed, choice)
        return derive_seed(self.seed, *names)

    def sampling_for(self, wishes: RequestedSampling, prompt: int) -> SamplingParams:
        """Return how a reply is drawn, with the length that it may have.

        Args:
            wishes: The agent's sampling parameters.
            prompt: Tokens of the prompt.

        Raises:
            ApiError: If the prompt leaves no room for the reply.
        """
        return replace(
            self._distribution(wishes),
            max_new_tokens=self._longest(wishes.max_tokens, prompt),
            structured=None if wishes.structured is None else wishes.structured.output,
        )

    def _distribution(self, wishes: RequestedSampling) -> SamplingParams:
        own = self.sampling
        if self.wishes != "agent":
            return own
        return replace(
            own,
            # As OpenAI has it, a mass of nothing leaves the most likely token.
            temperature=0.0 if wishes.top_p == 0 else _either(wishes.temperature, own.temperature),
            top_p=1.0 if wishes.top_p == 0 else _either(wishes.top_p, own.top_p),
            top_k=own.top_k if wishes.top_k is None else max(0, wishes.top_k),
        )

    def _longest(self, wanted: int | None, prompt: int) -> int:
        own = self.sampling.max_new_tokens
        longest = own if wanted is None else min(wanted, own)
        room = self.max_length - prompt
        if self.wishes == "agent" and wanted is None:
            longest = min(longest, room)
        if longest < 1 or longest > room:
            raise ApiError(
                400,
                f"the prompt has {prompt} tokens; with a reply of up to {max(1, longest)} it passes the longest row of "
                f"{self.max_length} (model.max_length)",
                "context_length_exceeded",
                "messages",
            )
        return longest


def _is_the_runs(*names: str) -> ApiError:
    return ApiError(
        400,
        f"{', '.join(names)}: how replies are sampled is the run's own, since that distribution is trained "
        "(agents.sampling is 'refuse'; 'run' passes over such fields, and serves structured outputs)",
        "sampling_is_the_runs",
        names[0],
    )


def _either(wish: float | None, own: float) -> float:
    return own if wish is None else wish


def _unheeded(wishes: RequestedSampling, sampling: SamplingParams, *, heeded: bool) -> tuple[str, ...]:
    """Name the wishes that are not what is done anyway; `heeded` is whether those that can be are."""
    if heeded:
        return wishes.others
    asked = {
        "temperature": (wishes.temperature, sampling.temperature),
        "top_p": (wishes.top_p, sampling.top_p),
        "top_k": (None if wishes.top_k is None else max(0, wishes.top_k), sampling.top_k),
    }
    unlike = [name for name, (wish, done) in asked.items() if wish is not None and wish != done]
    seeded = () if wishes.seed is None else ("seed",)
    return (*unlike, *wishes.others, *seeded)
