"""Whether a response follows its instructions: read from a data set's row, strictly and loosely.

RLVR-IFEval names one function a row, with `N`, `quantifier`, `keyword_list` and the like (allenai/RLVR-IFeval and the
functions of open-instruct and ROLL that go with it). Several decide otherwise than IFEval's instruction of that kind
(so many times means exactly that, words are split at spaces, dividers are `* * *`) and are functions of their own;
those that decide the same are IFEval's.
"""

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from rollgym.clients.replies.formats.literals import ExpressionParser, literal_of
from rollgym.clients.replies.json_values import CallFault
from rollgym.envs.verifiers.arguments import Quantifier, count, quantifier, read_arguments, text, texts
from rollgym.envs.verifiers.instructions import table
from rollgym.envs.verifiers.instructions.table import INSTRUCTIONS, Instruction
from rollgym.envs.verifiers.instructions.text import Text, TextTools

_DIVIDER = "* * *"
_TOLERANCE = 0.1
_WORD = re.compile(r"\w+")


def _about(number: int, how: Quantifier, bound: int, tolerance: int) -> bool:
    if how == "at least":
        return number >= bound
    if how == "at most":
        return number <= bound
    return abs(number - bound) <= tolerance


def _tenth(bound: int) -> int:
    return max(round(bound * _TOLERANCE), 1)


def _keywords(text: Text, keyword_list: Sequence[str]) -> bool:
    return all(each.lower() in text.raw.lower() for each in keyword_list)


def _keyword_frequency(text: Text, word: str, N: int) -> bool:  # noqa: N803 - as the data set calls it
    return _WORD.findall(text.raw.lower()).count(word.lower()) == N


def _forbidden(text: Text, forbidden_words: Sequence[str]) -> bool:
    return not any(each.lower() in text.raw.lower() for each in forbidden_words)


def _letter_frequency(text: Text, letter: str, N: int) -> bool:  # noqa: N803
    return text.raw.count(letter) == N


def _paragraphs(text: Text, N: int) -> bool:  # noqa: N803
    parts = text.stripped.split(_DIVIDER)
    return len(parts) == N and all(part.strip() for part in parts)


def _words(text: Text, N: int, quantifier: Quantifier) -> bool:  # noqa: N803
    return _about(len(text.pieces), quantifier, N, _tenth(N))


def _sentences(text: Text, N: int, quantifier: Quantifier) -> bool:  # noqa: N803
    return _about(len(text.sentences), quantifier, N, 1)


def _first_word(text: Text, N: int, first_word: str, i: int) -> bool:  # noqa: N803
    parts = text.raw.split("\n\n")
    return len(parts) == N and 1 <= i <= N and parts[i - 1].strip().startswith(first_word)


def _postscript(text: Text, postscript_marker: str) -> bool:
    _, marker, after = text.raw.partition(postscript_marker)
    return bool(marker and after.strip())


def _placeholders(text: Text, N: int) -> bool:  # noqa: N803
    return table.placeholders(text, N)


def _bullets(text: Text, N: int) -> bool:  # noqa: N803
    return sum(line.strip().startswith(("*", "-")) for line in text.raw.split("\n")) == N


def _choice(text: Text, options: Sequence[str]) -> bool:
    return any(option in text.raw for option in options)


def _highlights(text: Text, N: int) -> bool:  # noqa: N803
    return len(re.findall(r"\*(.*?)\*", text.raw)) >= N


def _sections(text: Text, N: int, section_splitter: str) -> bool:  # noqa: N803
    return len(re.findall(rf"{re.escape(section_splitter)}\s?\d+", text.raw, re.IGNORECASE)) >= N


def _json(text: Text) -> bool:
    try:
        json.loads(text.raw)
    except (ValueError, RecursionError):
        return False
    return True


def _repeats(text: Text, original_prompt: str) -> bool:
    return text.raw.startswith(original_prompt)


def _two(text: Text) -> bool:
    return text.raw.count("******") == 1 and table.two_responses(text)


def _uppercase(text: Text) -> bool:
    return text.raw == text.raw.upper()


def _lowercase(text: Text) -> bool:
    return text.raw == text.raw.lower()


def _capital_words(text: Text, N: int, quantifier: Quantifier) -> bool:  # noqa: N803
    return _about(len(re.findall(r"\b[A-Z]+\b", text.raw)), quantifier, N, _tenth(N))


def _ends(text: Text, end_phrase: str) -> bool:
    return text.raw.endswith(end_phrase)


_NUMBER = {"N": count}
_QUANTITY = {"N": count, "quantifier": quantifier}

FUNCTIONS: Mapping[str, Instruction] = MappingProxyType(
    {
        "verify_keywords": Instruction(_keywords, {"keyword_list": texts}),
        "verify_keyword_frequency": Instruction(_keyword_frequency, {"word": text, "N": count}),
        "validate_forbidden_words": Instruction(_forbidden, {"forbidden_words": texts}),
        "verify_letter_frequency": Instruction(_letter_frequency, {"letter": text, "N": count}),
        "validate_response_language": Instruction(table.language, {"language": text}),
        "verify_paragraph_count": Instruction(_paragraphs, _NUMBER),
        "validate_word_constraint": Instruction(_words, _QUANTITY),
        "verify_sentence_constraint": Instruction(_sentences, _QUANTITY),
        "validate_paragraphs": Instruction(_first_word, {"N": count, "first_word": text, "i": count}),
        "verify_postscript": Instruction(_postscript, {"postscript_marker": text}),
        "validate_placeholders": Instruction(_placeholders, _NUMBER),
        "verify_bullet_points": Instruction(_bullets, _NUMBER),
        "validate_title": Instruction(table.title),
        "validate_choice": Instruction(_choice, {"options": texts}),
        "validate_highlighted_sections": Instruction(_highlights, _NUMBER),
        "validate_sections": Instruction(_sections, {"N": count, "section_splitter": text}),
        "validate_json_format": Instruction(_json),
        "validate_repeat_prompt": Instruction(_repeats, {"original_prompt": text}),
        "validate_two_responses": Instruction(_two),
        "validate_uppercase": Instruction(_uppercase),
        "validate_lowercase": Instruction(_lowercase),
        "validate_frequency_capital_words": Instruction(_capital_words, _QUANTITY),
        "validate_end": Instruction(_ends, {"end_phrase": text}),
        "validate_quotation": Instruction(table.quoted),
        "validate_no_commas": Instruction(table.no_comma),
    }
)
"""The 25 functions by their names."""

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
