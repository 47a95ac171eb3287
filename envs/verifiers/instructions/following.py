"""Whether a response follows its instructions: read from a data set's row, strictly and loosely."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rollgym.clients.replies.formats.literals import ExpressionParser, literal_of
from rollgym.clients.replies.json_values import CallFault
from rollgym.envs.verifiers.arguments import read_arguments
from rollgym.envs.verifiers.instructions.rlvr import FUNCTIONS
from rollgym.envs.verifiers.instructions.table import INSTRUCTIONS, Instruction
from rollgym.envs.verifiers.instructions.text import Text, TextTools

_MOST = 64
_LONGEST_TRUTH = 100_000


@dataclass(frozen=True, slots=True)
class Constraint:
    """One instruction with its arguments.

    Attributes:
        name: As the data set calls it.
        arguments: What it says beside that.
    """

    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Followed:
    """Whether one instruction was followed.

    Attributes:
        name: As the data set calls it.
        strict: By the response as it is.
        loose: By it or one of its loose variants.
    """

    name: str
    strict: bool
    loose: bool


def read_constraints(fields: Mapping[str, Any]) -> list[Constraint]:
    """Return the instructions of a task, whichever of the known forms its row has.

    - IFEval: `instruction_id_list` and `kwargs`, one mapping for each.
    - RLVR-IFEval: `func_name`, with its arguments beside it.
    - Either in `ground_truth`, as a mapping or as its text; open-instruct's IFEvalG writes a list of one mapping with
      `instruction_id` and `kwargs`.

    Raises:
        ValueError: There are none, one is not known, or its arguments make no sense.
    """
    if "instruction_id_list" in fields:
        found = _listed(fields["instruction_id_list"], fields.get("kwargs"))
    elif "func_name" in fields:
        found = [_function(fields)]
    elif "ground_truth" in fields:
        found = _truth(fields["ground_truth"])
    else:
        raise ValueError("a task needs 'instruction_id_list' with 'kwargs', 'func_name', or 'ground_truth'")
    if not 1 <= len(found) <= _MOST:
        raise ValueError(f"a task needs 1 to {_MOST} instructions, not {len(found)}")
    return found


def _listed(names: Any, arguments: Any) -> list[Constraint]:
    if not isinstance(names, Sequence) or isinstance(names, str):
        raise ValueError("instruction_id_list must be a list of names")
    given = [None] * len(names) if arguments is None else arguments
    if not isinstance(given, Sequence) or isinstance(given, str) or len(given) != len(names):
        raise ValueError("kwargs must be a list with one mapping for each instruction")
    return [_constraint(name, each, INSTRUCTIONS) for name, each in zip(names, given, strict=True)]


def _constraint(name: Any, given: Any, known: Mapping[str, Instruction]) -> Constraint:
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"there is no instruction {str(name)[:80]!r}")
    if given is not None and not isinstance(given, Mapping):
        raise ValueError(f"the kwargs of {name} must be a mapping, not {type(given).__name__}")
    instruction = known[name]
    return Constraint(name, read_arguments(name, given or {}, instruction.arguments, instruction.optional))


def _function(fields: Mapping[str, Any]) -> Constraint:
    name = fields["func_name"]
    known = FUNCTIONS.get(name) if isinstance(name, str) else None
    # Tables have a column for every argument of every function, and rows have fields of their own.
    given = {} if known is None else {key: fields[key] for key in known.arguments if key in fields}
    return _constraint(name, given, FUNCTIONS)


def _truth(value: Any) -> list[Constraint]:
    if isinstance(value, str):
        value = _read(value)
    if isinstance(value, Sequence) and not isinstance(value, str) and len(value) == 1:
        value = value[0]
    if isinstance(value, str):
        value = _read(value)
    if not isinstance(value, Mapping):
        raise ValueError("ground_truth must be a mapping, or a list of one")
    if "func_name" in value:
        return [_function(value)]
    names = value.get("instruction_id", value.get("instruction_id_list"))
    return _listed([names] if isinstance(names, str) else names, value.get("kwargs"))


def _read(text: str) -> Any:
    """Read JSON, or a literal of Python, which some data sets hold."""
    if len(text) > _LONGEST_TRUTH:
        raise ValueError(f"ground_truth has at most {_LONGEST_TRUTH} characters")
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        pass
    try:
        return literal_of(ExpressionParser().parse(text), text_keys=False)
    except CallFault as error:
        raise ValueError("ground_truth is neither JSON nor a literal") from error


def loose_variants(response: str) -> list[str]:
    """Return a response as IFEval looks at it loosely.

    As it is; without its first line, its last, and both (an introduction, a farewell); and these without asterisks.
    """
    lines = response.split("\n")
    cut = ["\n".join(part).strip() for part in (lines[1:], lines[:-1], lines[1:-1])]
    plain = [response, *cut]
    return list(dict.fromkeys([*plain, *(variant.replace("*", "") for variant in plain)]))


def follow(response: str, constraints: Sequence[Constraint], tools: TextTools) -> list[Followed]:
    """Return which instructions a response follows; a blank one follows none.

    Raises:
        TooMuchWorkError: A keyword is a regular expression that takes too long.
    """
    variants = [Text(each, tools) for each in loose_variants(response) if each.strip()]
    results = []
    for constraint in constraints:
        instruction = INSTRUCTIONS.get(constraint.name) or FUNCTIONS[constraint.name]
        strict = bool(response.strip()) and instruction.follows(variants[0], **constraint.arguments)
        loose = strict or any(
            instruction.follows(variant, **constraint.arguments) for variant in variants[1:]
        )
        results.append(Followed(constraint.name, strict, loose))
    return results
