"""Prompts with one to three instructions, drawn from a seed: to learn from without a file of data."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from numpy.random import Generator

_REQUESTS = (
    "Write a short text about {topic}.",
    "Explain {topic} to a child.",
    "Write a letter to a friend about {topic}.",
    "Describe {topic} to somebody who has never seen it.",
    "Write a blog post about {topic}.",
    "Tell a story about {topic}.",
    "Give some advice about {topic}.",
    "Write an advertisement that has to do with {topic}.",
)
_TOPICS = (
    *(
        "a lighthouse",
        "baking bread",
        "learning to swim",
        "an old bicycle",
        "the first snow",
        "a night train",
    ),
    *("growing tomatoes", "a lost umbrella", "the sea in winter", "repairing a clock", "a village market"),
    *(
        "moving to a new town",
        "a school for cats",
        "the sound of rain",
        "walking in the hills",
        "a small library",
    ),
    *("keeping bees", "a broken bridge", "drawing a map", "the smell of coffee", "playing the violin"),
    *("a museum of buttons", "waiting for a bus", "the moon", "a garden at dawn", "writing a diary"),
    *(
        "a neighbour who sings",
        "cooking for twenty",
        "a paper boat",
        "the last day of summer",
        "a talking parrot",
    ),
)
_WORDS = (
    *("window", "silver", "quiet", "garden", "letter", "winter", "basket", "candle", "river", "pocket"),
    *(
        "thunder",
        "copper",
        "ladder",
        "orange",
        "mirror",
        "feather",
        "blanket",
        "harbour",
        "pencil",
        "lantern",
    ),
)
_COMMON = ("very", "good", "because", "people", "time", "many", "always", "never", "thing", "great")
_PHRASES = (
    "That is all there is to say",
    "Nobody knew what came next",
    "And so the day ended",
    "Come and see for yourself",
    "The rest is up to you",
)

Draw = Callable[[Generator], tuple[dict[str, Any], str]]
"""Draws the arguments of an instruction, and says it in words."""


@dataclass(frozen=True, slots=True)
class InstructionKind:
    """A kind of instruction that can be asked for.

    Attributes:
        name: The instruction.
        draw: Draws one.
        aspects: What of a response it is about; two of one prompt share none, so that both can be followed.
        demanding: Whether neither a word or two nor the prompt said back follows it.
    """

    name: str
    draw: Draw
    aspects: frozenset[str]
    demanding: bool = False


def between(draw: Generator, low: int, high: int) -> int:
    """Draw a whole number from one bound to the other, both of which can be drawn."""
    return int(draw.integers(low, high + 1))


def pick(draw: Generator, choices: Sequence[str]) -> str:
    """Draw one of some texts."""
    return choices[int(draw.integers(len(choices)))]


def _some(draw: Generator, choices: Sequence[str], count: int) -> list[str]:
    return [choices[int(index)] for index in draw.choice(len(choices), size=count, replace=False)]


def _listing(words: Sequence[str]) -> str:
    return " and ".join(f"'{word}'" for word in words)


def _existence(draw: Generator) -> tuple[dict[str, Any], str]:
    keywords = _some(draw, _WORDS, between(draw, 1, 3))
    return {"keywords": keywords}, f"Use {_listing(keywords)}."


def _frequency(draw: Generator) -> tuple[dict[str, Any], str]:
    keyword, times = pick(draw, _WORDS), between(draw, 2, 4)
    said = f"Use the word '{keyword}' at least {times} times."
    return {"keyword": keyword, "frequency": times, "relation": "at least"}, said


def _word_once(draw: Generator) -> tuple[dict[str, Any], str]:
    keyword = pick(draw, _WORDS)
    return {"keyword": keyword}, f"Use the word '{keyword}' exactly once."


def _forbidden(draw: Generator) -> tuple[dict[str, Any], str]:
    words = _some(draw, _COMMON, between(draw, 2, 4))
    return {"forbidden_words": words}, f"Do not use the words {_listing(words)}."


def _letter(draw: Generator) -> tuple[dict[str, Any], str]:
    letter, times = pick(draw, "jkqvwxz"), between(draw, 4, 9)
    said = f"Let the letter '{letter}' occur at least {times} times."
    return {"letter": letter, "let_frequency": times, "let_relation": "at least"}, said


def _sentences(draw: Generator) -> tuple[dict[str, Any], str]:
    count = between(draw, 9, 14)
    return {"num_sentences": count, "relation": "at least"}, f"Write at least {count} sentences."


def _words_at_least(draw: Generator) -> tuple[dict[str, Any], str]:
    count = 10 * between(draw, 10, 20)
    return {"num_words": count, "relation": "at least"}, f"Write at least {count} words."


def _words_less_than(draw: Generator) -> tuple[dict[str, Any], str]:
    count = 10 * between(draw, 20, 30)
    return {"num_words": count, "relation": "less than"}, f"Write less than {count} words."


def _paragraphs(draw: Generator) -> tuple[dict[str, Any], str]:
    count = between(draw, 2, 4)
    said = (
        f"Write exactly {count} paragraphs, with a line of three asterisks between each two and nowhere else."
    )
    return {"num_paragraphs": count}, said


def _nth_paragraph(draw: Generator) -> tuple[dict[str, Any], str]:
    count = between(draw, 2, 4)
    nth, word = between(draw, 1, count), pick(draw, _WORDS)
    said = (
        f"Write exactly {count} paragraphs, with an empty line between each two and nowhere else; "
        f"begin paragraph {nth} with the word '{word}'."
    )
    return {"num_paragraphs": count, "nth_paragraph": nth, "first_word": word}, said


def _placeholders(draw: Generator) -> tuple[dict[str, Any], str]:
    count = between(draw, 2, 4)
    said = f"Leave at least {count} placeholders in square brackets, such as [name]."
    return {"num_placeholders": count}, said


def _postscript(draw: Generator) -> tuple[dict[str, Any], str]:
    marker = pick(draw, ("P.S.", "P.P.S"))
    return {"postscript_marker": marker}, f"Add a postscript at the end that begins with {marker}"


def _bullets(draw: Generator) -> tuple[dict[str, Any], str]:
    count = between(draw, 2, 5)
    said = f"Have exactly {count} bullet points, each on a line that begins with an asterisk and a space."
    return {"num_bullets": count}, said


def _highlights(draw: Generator) -> tuple[dict[str, Any], str]:
    count = between(draw, 2, 4)
    return {"num_highlights": count}, f"Highlight at least {count} phrases, each between two asterisks."


def _sections(draw: Generator) -> tuple[dict[str, Any], str]:
    count, splitter = between(draw, 2, 4), pick(draw, ("Section", "Part", "Chapter"))
    said = f"Have {count} sections, and begin each with {splitter} and its number, counted from one."
    return {"section_spliter": splitter, "num_sections": count}, said


def _end(draw: Generator) -> tuple[dict[str, Any], str]:
    phrase = pick(draw, _PHRASES)
    return {"end_phrase": phrase}, f"End with exactly this phrase and nothing after it: {phrase}"


def _capitals(draw: Generator) -> tuple[dict[str, Any], str]:
    count = between(draw, 3, 8)
    said = f"Write at least {count} words in capital letters only."
    return {"capital_frequency": count, "capital_relation": "at least"}, said


def _first_word(draw: Generator) -> tuple[dict[str, Any], str]:
    word = pick(draw, _WORDS)
    return {"first_word": word}, f"Let the first word of your response be '{word}'."


def _plainly(said: str) -> Draw:
    return lambda draw: ({}, said)


def _kind(name: str, draw: Draw, *aspects: str, demanding: bool = False) -> InstructionKind:
    return InstructionKind(name, draw, frozenset(aspects), demanding)


_WHOLE = ("start", "end", "case", "paragraphs", "lines", "json", "asterisks", "comma")

KINDS: Mapping[str, InstructionKind] = {
    kind.name: kind
    for kind in (
        _kind("keywords:existence", _existence, "words"),
        _kind("keywords:frequency", _frequency, "words", demanding=True),
        _kind("keywords:word_once", _word_once, "words"),
        _kind("keywords:forbidden_words", _forbidden, "forbidden"),
        _kind("keywords:letter_frequency", _letter, "letters"),
        _kind("length_constraints:number_sentences", _sentences, "length", "lines", demanding=True),
        _kind("length_constraints:number_words", _words_at_least, "length", demanding=True),
        _kind("length_constraints:number_words, less", _words_less_than, "length"),
        _kind(
            "length_constraints:number_paragraphs",
            _paragraphs,
            "paragraphs",
            "asterisks",
            "json",
            demanding=True,
        ),
        _kind(
            "length_constraints:nth_paragraph_first_word",
            _nth_paragraph,
            *("paragraphs", "lines", "start", "json"),
            demanding=True,
        ),
        _kind("detectable_content:number_placeholders", _placeholders, "brackets", demanding=True),
        _kind("detectable_content:postscript", _postscript, "end", "json"),
        _kind(
            "detectable_format:number_bullet_lists", _bullets, "lines", "asterisks", "json", demanding=True
        ),
        _kind("detectable_format:number_highlighted_sections", _highlights, "asterisks", demanding=True),
        _kind("detectable_format:multiple_sections", _sections, "lines", "case", "start", demanding=True),
        _kind(
            "detectable_format:json_format",
            _plainly("Give all of it as JSON, and nothing outside of it."),
            *_WHOLE,
            demanding=True,
        ),
        _kind(
            "detectable_format:title",
            _plainly("Give it a title in double angular brackets."),
            *("start", "json"),
            demanding=True,
        ),
        _kind("startend:end_checker", _end, "end", "case"),
        _kind(
            "startend:quotation",
            _plainly("Put your whole response in double quotation marks."),
            *("start", "end", "json"),
            demanding=True,
        ),
        _kind("change_case:capital_word_frequency", _capitals, "case", demanding=True),
        _kind(
            "change_case:english_capital", _plainly("Write in English and in capital letters only."), "case"
        ),
        _kind(
            "change_case:english_lowercase",
            _plainly("Write in English and in lower-case letters only."),
            "case",
        ),
        _kind("punctuation:no_comma", _plainly("Do not use any comma."), "comma"),
        _kind("punctuation:punctuation_exclamation", _plainly("Do not use any exclamation mark."), "marks"),
        _kind("first_word:first_word_answer", _first_word, "start", "words"),
    )
}
"""What prompts are made of."""


def draw_prompt(draw: Generator, least: int, most: int) -> dict[str, Any]:
    """Draw a prompt with so many instructions that can be followed together; one of them at least is demanding.

    Args:
        draw: Where chance comes from.
        least: Instructions at least.
        most: Instructions at most.

    Returns:
        `prompt`, `instruction_id_list` and `kwargs`, as IFEval has them.
    """
    request = pick(draw, _REQUESTS).format(topic=pick(draw, _TOPICS))
    wanted = between(draw, least, most)
    names: list[str] = []
    arguments: list[dict[str, Any]] = []
    said: list[str] = []
    taken: frozenset[str] = frozenset()
    while len(names) < wanted:
        fitting = [kind for kind in KINDS.values() if not kind.aspects & taken and (kind.demanding or names)]
        if not fitting:
            break
        kind = fitting[int(draw.integers(len(fitting)))]
        taken |= kind.aspects
        given, words = kind.draw(draw)
        names.append(kind.name.partition(",")[0])
        arguments.append(given)
        said.append(words)
    prompt = "\n".join([request, *said])
    return {"prompt": prompt, "instruction_id_list": names, "kwargs": arguments}
