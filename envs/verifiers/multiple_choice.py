"""MultipleChoice-v0: which option a response chooses."""

import re
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Annotated, Any

from numpy.random import Generator
from pydantic import Field

from rollgym.envs.core.kwargs import RenderMode
from rollgym.envs.core.splits import TaskSplit
from rollgym.envs.verifiers.base import GeneratingVerifier, Verdict
from rollgym.envs.verifiers.comparison import QuestionContext, compare
from rollgym.envs.verifiers.extraction import marked_answer, without_thoughts
from rollgym.envs.verifiers.latex import canonical, in_one_form, unwrapped

LETTERS = "ABCDEFGHIJ"
_SHOWN = 80

# A letter that opens what was said, with what sets it off from a word: "B", "(B)", "B) Paris", "Option B: Paris".
_LEADING = re.compile(
    r"(?:the\s++)?(?:correct\s++)?(?:option|choice|answer)?\s*+(?:[(\[]\s*+)?(?P<letter>[A-Ja-j])(?P<mark>\s*[)\].:,;]+|\s+[-–—]|)(?P<rest>.*)",
    re.DOTALL | re.IGNORECASE,
)
_MORE = re.compile(r"[\s,;/&]*+(?:\b(?:or|and)\b\s*+)?[(\[]?(?P<letter>[A-J])[)\]]?(?![\w'’])")
# Letters that stand by themselves in prose: in brackets, in bold, or alone in a line.
_STANDALONE = re.compile(
    r"\((?P<round>[A-J])\)|\*\*\(?(?P<bold>[A-J])\)?[.:)]?\*\*|^[^\S\n]*+\(?(?P<line>[A-J])\)?[.:]?[^\S\n]*+$",
    re.MULTILINE,
)
# A sentence that ends a reply, or is all of it: "Option B", "I choose B.", "So B.", "The correct option is B".
_CONCLUSION = re.compile(
    r"(?:(?:so|thus|therefore|hence|finally)\b[\s,:]*+)?"
    r"(?:i\s++(?:choose|pick|select|say|go\s++with)|i(?:'d|\s++would)\s++(?:choose|pick|say|go\s++with)|it(?:'s|\s++(?:is|must\s++be|has\s++to\s++be))"
    r"|i(?:'m\s++(?:sure|certain)|\s++(?:think|believe))(?:\s++that)?(?:\s++it(?:'s|\s++is))?"
    r"|(?:正确)?(?:答案|选项)(?:是|为)?|故?选择?"
    r"|(?:(?:the|my)\s++)?(?:correct\s++|right\s++|best\s++|final\s++)?(?:option|choice|answer|letter)"
    r"(?:\s++(?:is|(?:must|should|would|will)\s++be|(?:seems|appears)\s++to\s++be)(?:\s++(?:clearly|definitely|probably|likely))?)?)?"
    r"[\s:,–—-]*+(?:\b(?:option|choice|answer)\s++)?[(\[*]*+(?P<letter>(?-i:[A-J]))[)\]*]*+"
    r"(?:\s++(?:is|must\s++be)(?:\s++the)?\s++(?:correct|right|best|true)(?:\s++(?:answer|option|choice|one))?)?[.!]?",
    re.IGNORECASE,
)
# What comes before the text of an option in a sentence, and before its line in a list or in a citation.
_BEFORE_TEXT = re.compile(
    r"(?:(?:so|thus|therefore|hence)\b[\s,:]*+)?"
    r"(?:it(?:'s|\s++is|\s++must\s++be)|i\s++(?:think|believe)(?:\s++(?:that\s++)?it(?:'s|\s++is))?)\s++",
    re.IGNORECASE,
)
_BEFORE_LINE = re.compile(
    r"[\s>\"'“*+•-]*+(?:(?:the\s++)?(?:correct|right|best|final)\s++(?:option|choice|answer)\s*+(?:is\b)?\s*+:?\s*+)?",
    re.IGNORECASE,
)
# "B, because it is the capital."
_REASONED = re.compile(r"[(\[*]{0,3}(?P<letter>[A-J])[)\]*]{0,3}[.,:;]?\s+(?:because|since)\b")
# Where a reason may begin behind an option's line: "B) Paris. It is ..." and "B) Paris, because ...".
_REASON_BEGINS = re.compile(r"[.;](?=[*_\s])|,?\s++(?:because|since)\b")
# "Paris (B)", and what is said of a line that is right.
_LETTER_BEHIND = re.compile(r"(?P<text>[^\n]{1,200}?)(?<!\s)\s*+[(\[](?P<letter>[A-J])[)\]][.!*\s]*")
_IS_RIGHT = re.compile(
    r"(?<!\s)\s++(?:is|must\s++be)\s++(?:the\s++)?(?:correct|right)(?:\s++(?:answer|option|choice|one))?[.!]?\s*+\Z",
    re.IGNORECASE,
)
_DENIED_AT_ONCE = re.compile(
    r"\W{0,4}(?:is\s+)?(?:no|not\s+(?:it|right|correct)|wait|wrong|incorrect|actually|scratch|sorry|oops)\b",
    re.IGNORECASE,
)
_LONGEST_SENTENCE = 200
_LONGEST_REASON = 10_000
_MOST_BEGINNINGS = 8
"""So many places of a line are looked at for the beginning of a reason."""
_TAKEN_BACK = re.compile(
    r"\b(?:wait|wrong|incorrect|mistake|actually|instead|scratch)\b|\bno[,.!]|\bnot\s++(?:it|right|correct)\b",
    re.IGNORECASE,
)
_ANY_LETTER = re.compile(r"\b(?<!['’])([A-J])\b(?!['’])")
_MOST_LINES = 64
"""Lines at the end of a reply in which options are looked for as the question lists them."""
_ALTERNATIVE = re.compile(
    r"\s*+(?:(?:,|/|or|and|&)\s*+(?:(?:maybe|perhaps|possibly|also)\s*+)?)?", re.IGNORECASE
)
_CONCLUDING = re.compile(
    r"[,;.]\s*+(?=(?:so|thus|therefore|hence)\b)|,\s*+(?=option\s++[A-J]\W*+$)", re.IGNORECASE
)
_MATH_MARKS = re.compile(r"\\[()\[\]]")
_LONE_LETTER = re.compile(r"[-+•>\s_*`$.,:;!?\"'()\[\]{}]*+([A-J])[\s_*`$.,:;!?\"'()\[\]{}]*+")
# Signs that change what is said, as in formulas and names of languages, are kept.
_PUNCTUATION = re.compile(r"[^\w\s.%/+<>=≤≥≠^&|#@~§°−-]|[.](?=\s|$)")
_PROSE = re.compile(r"(?<![^\W\d_])(?<!\\)[^\W\d_]{2,}")
_DIGIT = re.compile(r"\d")
_LONGEST_FORMULA = 64
"""Characters of a formula that is compared with options, and by its value, where no powers are in it."""
_NEITHER = QuestionContext(percent=False, scale=False)
# Before a word alone: the letter of "A) London" is not an article.
_ARTICLES = re.compile(r"\b(?:a|an|the)\s+(?=\w)")
_LETTER_BEFORE_NAME = re.compile(r"A\s+(?=[A-Z\d])")


class MultipleChoiceEnv(GeneratingVerifier):
    """Questions with options.

    A response is read outside its thoughts: the last box, else the last answer tag, else what follows "the answer is",
    else the last letter that stands by itself, in brackets, in bold or in a line of its own. The text of an option
    counts as its letter. A response that names several options names none.

    Raises:
        ValueError: If an argument makes no sense.
    """

    metadata: dict[str, Any] = GeneratingVerifier.metadata | {
        "description": "Questions with options: which letter, or which option's text, a response chooses.",
        "observation": "A question with lettered options.",
        "actions": "A response that names one option.",
        "reward": "1 where it is the right one, else 0.",
        "example_reply": "\\boxed{{{answer}}}",
        "baselines": {"random": 0.09, "constant action": 0.21, "blind": 0.3},
    }

    def __init__(
        self,
        *,
        options: Annotated[
            int, Field(ge=2, le=len(LETTERS), description="Options of a generated question.")
        ] = 4,
        split: TaskSplit = None,
        render_mode: RenderMode = None,
    ) -> None:
        super().__init__(split=split, render_mode=render_mode)
        self._options = options

    def generate_task(self) -> dict[str, Any]:
        """Draw a question with one right option."""
        question, options, index = _draw(self.np_random, self._options)
        return {"question": question, "options": options, "answer": LETTERS[index]}

    def content(self, task: Mapping[str, Any]) -> str:
        """Return the question and the options."""
        return f"{task['question']} {task['options']}"

    def checked_task(self, fields: Mapping[str, Any]) -> dict[str, Any]:
        """Return a task: `question`, `options` (a list, or texts by letter) and `answer` (letter, index or text)."""
        if not isinstance(fields.get("question"), str):
            raise ValueError("a task needs the field 'question', as text")
        return {**fields, "answer": _gold(fields, _options(fields))}

    def prompt(self, task: Mapping[str, Any]) -> str:
        """Return the question and its options."""
        shown = [f"{letter}) {text}" for letter, text in _options(task).items() if text]
        return "\n".join([task["question"], *shown])

    def instruction(self) -> str:
        """Return how to answer."""
        return "Choose the right option. Put its letter, and nothing else, in a box: \\boxed{letter}."

    def score(self, response: str, task: Mapping[str, Any]) -> Verdict:
        """See which option a response chooses; the detail begins with the reason in a word."""
        try:
            options = _options(task)
            gold = _gold(task, options)
        except ValueError as error:
            return Verdict(0.0, "error", f"bad_task: {error}")
        chosen, where = read_choice(response, options)
        if not chosen:
            return Verdict(0.0, "unparsable", "no_choice: the response names no option")
        if len(chosen) > 1:
            return Verdict(0.0, "wrong", f"ambiguous: the response names {', '.join(sorted(chosen))}")
        (letter,) = chosen
        if letter == gold:
            return Verdict(1.0, "correct", f"{where}: {letter}")
        return Verdict(0.0, "wrong", f"{where}: {letter}, expected {gold}")


def read_choice(response: str, options: Mapping[str, str]) -> tuple[frozenset[str], str]:
    """Return the letters that a response names as its answer, and their positions.

    Args:
        response: What was said.
        options: Texts by letter; an unknown text may be empty.
    """
    text = in_one_form(without_thoughts(response))
    found = marked_answer(text, short=False)
    if found is not None:
        return _said(found.text, options), found.place
    whole = text.strip()
    chosen = _by_text(whole, options)
    if chosen:
        return chosen, "text"
    if len(unwrapped(whole).strip()) <= 3 and (letters := _said(whole, options)):
        return letters, "letter"
    lines = whole.splitlines()[-_MOST_LINES:]
    if lines and _letter_behind(lines[-1], options):
        return frozenset().union(*(_letter_behind(line, options) for line in lines)), "letter"
    if lines and (letter := _concluded(lines[-1].strip(), options)):
        return frozenset({letter, *_lone_letters(lines)}), "letter"
    own = {letter for line in lines if (letter := _own_line(line, options))}
    if lines and len(own) == 1 and _own_line(lines[-1], options):
        return frozenset(own), "letter"  # A reply that lists several options has repeated the question.
    if (first := _first_line(whole, options)) or (first := _text_in_sentence(whole, options)):
        return first, "text"
    letters, end = frozenset[str](), -1
    for match in _STANDALONE.finditer(text):
        letter = match["round"] or match["bold"] or match["line"]
        if letter not in options:
            continue
        together = end >= 0 and _is_one_list(text[end : match.start()], options)
        letters, end = (letters | {letter} if together else frozenset({letter})), match.end()
    return letters, "letter"


def _is_one_list(between: str, options: Mapping[str, str]) -> bool:
    """Whether two letters belong to one list, as in "B or C" and "London (B), Paris (C)"."""
    separator = _ALTERNATIVE.match(between)
    rest = between if separator is None else between[separator.end() :]
    return not rest or (len(rest) <= _LONGEST_SENTENCE and bool(_with_text(rest.strip(" \t\n,;-*"), options)))


def _lone_letters(lines: Sequence[str]) -> Iterator[str]:
    """Yield the letters that stand alone in lines at the end: several of them, one below the other, are a list."""
    for line in reversed(lines):
        match = _LONE_LETTER.fullmatch(line)
        if match is not None:
            yield match[1]
        elif line.strip():
            return


def _first_line(whole: str, options: Mapping[str, str]) -> frozenset[str]:
    """Return the letter of an option's own line that opens a reply, where what follows names no other: its reason."""
    line, _, rest = whole.partition("\n")
    letter = _own_line(line, options) if len(rest) <= _LONGEST_REASON else ""
    if not letter and len(whole) <= _LONGEST_REASON:
        letter, rest = _reasoned(whole, line, options)
    if not letter or _TAKEN_BACK.search(rest) or any(each != letter for each in _ANY_LETTER.findall(rest)):
        return frozenset()
    said = f" {_normal(rest)} "
    others = (_known_normal(text) for each, text in options.items() if each != letter and text)
    return frozenset() if any(other and f" {other} " in said for other in others) else frozenset({letter})


def _reasoned(whole: str, line: str, options: Mapping[str, str]) -> tuple[str, str]:
    """Return the letter that a first line names before a reason in the same line, and the reason."""
    if (match := _REASONED.match(whole)) is not None:
        return match["letter"] if match["letter"] in options else "", whole[match.end() :]
    for match in islice(_REASON_BEGINS.finditer(line), _MOST_BEGINNINGS):
        if letter := _own_line(line[: match.start()], options):
            return letter, whole[match.start() :]
    return "", ""


def _letter_behind(line: str, options: Mapping[str, str]) -> frozenset[str]:
    """Return the letters of "London (B)": two, where the text is another option's."""
    match = _LETTER_BEHIND.fullmatch(line.strip("*_` "))
    if match is None or match["letter"] not in options:
        return frozenset()
    named = _with_text(match["text"].strip("*_` "), options)
    return named | {match["letter"]} if named else frozenset()


def _text_in_sentence(whole: str, options: Mapping[str, str]) -> frozenset[str]:
    """Return the letters of the option of "It is London."; nothing of what is more than such a sentence."""
    if len(whole) > _LONGEST_SENTENCE or (match := _BEFORE_TEXT.match(whole)) is None:
        return frozenset()
    return _by_text(whole[match.end() :], options)


def _own_line(line: str, options: Mapping[str, str]) -> str:
    """Return the letter of an option whose very line is said: "B) London"; empty for all else."""
    plain = _IS_RIGHT.sub("", unwrapped(line).replace("**", "")).strip()
    plain = plain[_BEFORE_LINE.match(plain).end() :]  # type: ignore[union-attr]  # it matches nothing, too
    match = _LEADING.fullmatch(plain.strip("*_`\"'”").strip())
    if match is None or not match["mark"] or not match["rest"].strip():
        return ""
    letter = match["letter"].upper()
    return letter if _with_text(match["rest"], options) == {letter} else ""


def _concluded(line: str, options: Mapping[str, str]) -> str:
    """Return the letter that a concluding sentence names; empty for all else."""
    said = _CONCLUDING.split(line.strip("*_` "))[-1]
    match = _CONCLUSION.fullmatch(_MATH_MARKS.sub("", said).strip('*_`$"“” '))
    return match["letter"] if match is not None and match["letter"] in options else ""


def _said(text: str, options: Mapping[str, str]) -> frozenset[str]:
    """Return the letters that a text names which stands where an answer is given."""
    plain = unwrapped(text).strip().strip("*_`\"'“”{}。").strip()
    chosen = _by_text(plain, options)
    if chosen:
        return chosen | _letter_before_name(plain, options, chosen)
    match = _LEADING.fullmatch(plain)
    if match is None or match["letter"].upper() not in options:
        return frozenset()
    letter, rest = match["letter"].upper(), match["rest"].strip()
    if not rest:
        return frozenset({letter})
    if (denied := _DENIED_AT_ONCE.match(rest)) is not None and not _with_text(rest, options):
        # "B, no, C" and "B (wrong)": what was said is taken back, and what is said then is not looked for in it.
        return frozenset({letter, *_ANY_LETTER.findall(rest[denied.end() :])} & options.keys() - {letter})
    same = _with_text(rest, options) if match["mark"] else _by_text(rest, options)
    if same:
        # "B) Paris" where Paris is C names both.
        return same | {letter}
    if not match["mark"] and (not match["rest"][0].isspace() or match["letter"] in "AIai"):
        # "Apples", "a dog": a word and no letter.
        return frozenset()
    if match["letter"].islower() and not match["mark"]:
        return frozenset()
    others = {letter}
    position = 0
    joined = match["mark"].strip() in ("", ",", ")", "]", ";", "),")
    while joined and (more := _MORE.match(rest, position)) is not None and more["letter"] in options:
        others.add(more["letter"])
        position = more.end()
    return frozenset(others)


def _letter_before_name(said: str, options: Mapping[str, str], chosen: frozenset[str]) -> frozenset[str]:
    """Return the A of "A London", which is not an article: names and numbers have none, unless the option says it."""
    if "A" not in options or _LETTER_BEFORE_NAME.match(said) is None:
        return frozenset()
    spelt = any(
        _LETTER_BEFORE_NAME.match(options[letter][:1].upper() + options[letter][1:]) for letter in chosen
    )
    return frozenset() if spelt else frozenset({"A"})


def _by_text(text: str, options: Mapping[str, str]) -> frozenset[str]:
    """Return the letters of the options whose text this is; nothing of a letter.

    A letter is asked for, and it is one, whatever other option may have it for its text.
    """
    lone = _LONE_LETTER.fullmatch(text)
    return frozenset() if lone is not None and lone[1] in options else _with_text(text, options)


def _with_text(text: str, options: Mapping[str, str]) -> frozenset[str]:
    """Return the letters of the options whose text this is: as it stands, or else in a form that is like it."""
    said = text.strip().strip("*_`").strip()
    for is_same in (_same_as_it_stands, _same_in_form):
        found = frozenset(letter for letter, option in options.items() if option and is_same(option, said))
        if found:
            return found
    return frozenset()


def _same_as_it_stands(option: str, said: str) -> bool:
    return " ".join(unwrapped(option).split()) == " ".join(unwrapped(said).split())


def _same_in_form(option: str, said: str) -> bool:
    if _is_prose(option):
        return bool(_normal(said)) and _known_normal(option) == _normal(said)
    # In numbers and formulas each sign counts, and equal ones are the same.
    if len(said) > _LONGEST_FORMULA or _is_prose(said):
        return False
    if _known_canonical(option) == canonical(said):
        return True
    is_plain = "^" not in said and "!" not in said and "**" not in said
    return (
        is_plain and _DIGIT.search(option) is not None and compare(option, said, asked=_NEITHER).equal is True
    )


def _is_prose(text: str) -> bool:
    return _PROSE.search(unwrapped(text)) is not None


def _normal(text: str) -> str:
    bare = in_one_form(unwrapped(text)).casefold()
    return " ".join(_PUNCTUATION.sub(" ", _ARTICLES.sub(" ", bare)).split())


# Options are compared with each line that may be one of them, and with the replies of a whole group.
_known_normal, _known_canonical = lru_cache(maxsize=1024)(_normal), lru_cache(maxsize=1024)(canonical)


def _options(task: Mapping[str, Any]) -> dict[str, str]:
    """Return the options by letter.

    Raises:
        ValueError: They are no such thing.
    """
    given = task.get("options", task.get("choices"))
    if given is None:
        return dict.fromkeys(LETTERS, "")
    if isinstance(given, Mapping):
        named = {str(letter).strip("() .").upper(): str(text) for letter, text in given.items()}
        if len(named) == len(given) and set(named) <= set(LETTERS) and len(named) > 1:
            return named
    elif isinstance(given, Sequence) and not isinstance(given, str) and 2 <= len(given) <= len(LETTERS):
        return {letter: str(text) for letter, text in zip(LETTERS, given, strict=False)}
    raise ValueError(
        f"'options' must be 2 to {len(LETTERS)} texts: a list, or texts by letter (A to {LETTERS[-1]})"
    )


def _gold(task: Mapping[str, Any], options: Mapping[str, str]) -> str:
    """Return the letter of the right option.

    Raises:
        ValueError: The answer is none of the options.
    """
    answer = task.get("answer")
    letters = list(options)
    if type(answer) is int and 0 <= answer < len(letters):
        return letters[answer]
    if isinstance(answer, str):
        letter = answer.strip().strip("()[]. ").upper()
        if letter in options:
            return letter
        same = _by_text(answer, options)
        if len(same) == 1:
            return next(iter(same))
    raise ValueError(
        f"'answer' must be a letter of the options, an index or the text of one option, not {str(answer)[:_SHOWN]!r}"
    )


def _draw(generator: Generator, count: int) -> tuple[str, list[str], int]:
    kind = int(generator.integers(3))
    if kind == 0:
        numbers = (100 + generator.choice(900, count, replace=False)).tolist()
        largest = bool(generator.integers(2))
        right = max(numbers) if largest else min(numbers)
        question = f"Which of these numbers is the {'largest' if largest else 'smallest'}?"
    else:
        divisor = int(generator.integers(3, 13))
        shift = 0 if kind == 1 else int(generator.integers(1, divisor))
        right = divisor * int(generator.integers(2, 60)) + shift
        wrong: list[int] = []
        while len(wrong) < count - 1:
            number = int(generator.integers(2 * divisor, 60 * divisor))
            if number % divisor != shift and number not in wrong:
                wrong.append(number)
        numbers = [right, *wrong]
        generator.shuffle(numbers)
        question = (
            f"Which of these numbers is a multiple of {divisor}?"
            if kind == 1
            else f"Which of these numbers leaves the remainder {shift} when divided by {divisor}?"
        )
    return question, [str(number) for number in numbers], numbers.index(right)
