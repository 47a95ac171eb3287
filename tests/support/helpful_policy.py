"""What a policy says that uses whichever tool it is offered, to add 1 and 2, in whatever form it is to say it."""

import json
import random
import re
from collections.abc import Iterator
from typing import Any

from rollgym.trainer.inference.engine.structured import Grammars
from tests.support.agent_policy import ScriptedPolicy

_TOOLS = re.compile(r"<tools>\n(.*?)\n</tools>", re.DOTALL)
_VALUES: dict[str, Any] = {"integer": 3, "number": 3, "boolean": True, "null": None}
# How DSPy's format of text names what it asks for.
_FIELDS = re.compile(r"\[\[ ## (\w+) ## \]\]")


# What texts are that mean something, by their names.
_TEXTS = {
    "code": "final_answer(3)",
    "command": "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT; echo 3",
    "memory": "none",
}


class HelpfulPolicy(ScriptedPolicy):
    """Says what helps, and keeps to what a request wants its reply to look like, as an engine does that masks.

    Args:
        tokenizer: Whose tokens it speaks.
    """

    def __init__(self, tokenizer):
        super().__init__(tokenizer, helpful)
        self._grammars = Grammars(tokenizer, len(tokenizer))

    async def says(self, request):
        said = await super().says(request)
        if request.sampling.structured is None:
            return said
        await self._grammars.compile(request.sampling)  # refuses what an engine would refuse
        fitting = (
            each for each in (said, *_proposed(request.sampling.structured)) if self._fits(request, each)
        )
        return next(fitting, None) or self._drawn(request)

    def _fits(self, request, text: str) -> bool:
        state, ids = (
            self._grammars.state(request.sampling),
            self._tokenizer.encode(text, add_special_tokens=False),
        )
        for token in [*ids, self._end]:
            if not state.allowed(len(self._tokenizer))[token]:
                return False
            state.take(token)
        return True

    def _drawn(self, request) -> str:
        """Any tokens that fit, an end as soon as there may be one."""
        state, choice, ids = self._grammars.state(request.sampling), random.Random(0), []
        while len(ids) < request.sampling.max_new_tokens:
            allowed = state.allowed(len(self._tokenizer))
            if allowed[self._end]:
                break
            ids.append(int(choice.choice(allowed.nonzero()[0])))
            state.take(ids[-1])
        return self._tokenizer.decode(ids)

    async def close(self):
        self._grammars.close()

    @property
    def _end(self) -> int:
        return self._tokenizer.convert_tokens_to_ids("<|im_end|>")


def _proposed(structured) -> Iterator[str]:
    """Texts of the form that is wanted."""
    if structured.kind == "json":
        yield '{"total": 3}'
        yield json.dumps(instance_of(json.loads(structured.text)))
    if structured.kind == "structural_tag":
        yield from _texts_of(json.loads(structured.text)["format"])


def _texts_of(form: dict[str, Any]) -> Iterator[str]:
    if form["type"] == "or":
        for each in reversed(form["elements"]):  # an answer before calls
            yield from _texts_of(each)
    if form["type"] == "tags_with_separator":
        for each in form["tags"]:
            yield each["begin"] + json.dumps(instance_of(each["content"]["json_schema"])) + each["end"]
    if form["type"] == "json_schema":
        yield json.dumps(instance_of(form["json_schema"]))


def instance_of(schema: Any, root: Any = None, name: str = "", depth: int = 0) -> Any:
    """A value that a schema allows, for the schemas that libraries write."""
    root = schema if root is None else root
    if not isinstance(schema, dict):
        return {}
    if "$ref" in schema:
        return instance_of(root["$defs"][schema["$ref"].rpartition("/")[2]], root, name, depth + 1)
    if "const" in schema or schema.get("enum"):
        return schema["const"] if "const" in schema else schema["enum"][0]
    for several in ("anyOf", "oneOf", "allOf"):
        if schema.get(several):
            return instance_of(schema[several][0], root, name, depth + 1)
    kinds = schema.get("type", "object")
    kind = kinds if isinstance(kinds, str) else kinds[0]
    if kind == "object":
        needed = schema.get("properties", {}) if depth < 4 else schema.get("required", [])
        return {each: instance_of(schema["properties"][each], root, each, depth + 1) for each in needed}
    if kind == "array":
        item = schema.get("items", {"type": "string"})
        return [instance_of(item, root, name, depth + 1) for _ in range(schema.get("minItems", 0))]
    if kind == "string":
        return _TEXTS.get(name, "3")
    return _VALUES.get(kind, "3")


def helpful(prompt: str) -> str:
    """A call of a tool that adds, then a call of a tool that takes the answer if there is one, else the answer."""
    last = prompt.rpartition("<|im_start|>assistant")[0].rpartition("<|im_start|>")[2]
    tools = _tools(prompt)
    if "[[ ## " in prompt:
        return _in_fields(last)
    adder = next((name for name in tools if "add" in name.lower()), None)
    # Some agents put words of their own behind the result.
    answered = "<tool_response>" in prompt or "Observation" in last
    if adder is not None and not answered:
        return _call(adder, {"a": 1, "b": 2})
    taker = next((name for name in tools if name != adder), None)
    if prompt.count("<tool_response>") > 1:
        taker = None  # it was told once, and nothing came of it
    if taker is not None:
        return _call(taker, instance_of(tools[taker]))
    if '"total"' in prompt or "JSON" in last:
        return '{"total": 3}'
    return "The sum is 3."


def _tools(prompt: str) -> dict[str, dict[str, Any]]:
    found = _TOOLS.search(prompt)
    read = [json.loads(line) for line in found[1].splitlines()] if found else []
    return {each["function"]["name"]: each["function"].get("parameters") or {} for each in read}


def _call(name: str, arguments: dict[str, Any]) -> str:
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments})}\n</tool_call>"


def _in_fields(last: str) -> str:
    """A reply in DSPy's format: every field that the prompt asks for behind the words `Respond with`."""
    asked = dict.fromkeys(_FIELDS.findall(last.rpartition("Respond with")[2]))
    values = {"next_tool_name": "finish", "next_tool_args": "{}", "completed": ""}
    if "next_tool_name" in asked and "observation_0" not in last:
        values |= {"next_tool_name": "add", "next_tool_args": '{"a": 1, "b": 2}'}
    return "\n\n".join(f"[[ ## {name} ## ]]\n{values.get(name, '3')}" for name in asked)
