"""What our readers make of a reply whose reading by a published parser is recorded, in the record's words."""

import json
from typing import Any

from rollgym.clients.replies.formats.calls import Schemas
from rollgym.clients.replies.formats.table import FORMATS
from rollgym.clients.replies.thinking import split_thinking
from rollgym.trainer.rollout.agents.replies import read_reply

Answer = dict[str, Any]


def our_reading(family: str, text: str, schemas: Schemas) -> Answer:
    """Return what agents are given; of calls in Python, which no endpoint has, what is read as leniently.

    Args:
        family: Of the record.
        text: The reply.
        schemas: Of the tools.
    """
    if family == "thinking":
        thought, said = split_thinking(text, begun=True)
        return {"thought": (thought or "").strip(), "content": said.strip()}
    if family == "python":
        reading = FORMATS["python"].read(text, schemas, strict=False)
        calls = [[each.name, _plain(dict(each.arguments))] for each in reading.calls]
        return {"calls": calls, "content": (reading.remaining if calls else text).strip()}
    reply = read_reply(text, "mistral" if family == "mistral-named" else family, schemas=schemas)  # type: ignore[arg-type]
    calls = [[each.name, _plain(json.loads(each.arguments))] for each in reply.calls]
    return {"calls": calls, "content": reply.content.strip()}


def their_reading(recorded: Answer) -> Answer:
    """Return what a published parser read, in the same form: arguments as JSON, no blanks around texts."""
    if "thought" in recorded:
        return {name: recorded[name].strip() for name in ("thought", "content")}
    calls = [[name, _loaded(arguments)] for name, arguments in recorded["calls"]]
    return {"calls": calls, "content": recorded["content"].strip()}


def _loaded(arguments: str) -> str:
    try:
        return _plain(json.loads(arguments))
    except ValueError:
        return f"no JSON: {arguments}"


def _plain(arguments: Any) -> str:
    return json.dumps(arguments)
