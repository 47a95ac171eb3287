"""Instructions to say something again, or to answer twice."""

from rollgym.envs.verifiers.instructions.text import Text

_SEPARATOR = "******"


def _same(left: str, right: str) -> bool:
    return left.strip().lower() == right.strip().lower()


def two_responses(text: Text) -> bool:
    """There are two different responses with six asterisks between them."""
    parts = text.raw.split(_SEPARATOR)
    if any(not part.strip() for part in parts[1:-1]):
        return False
    filled = [part.strip() for part in parts if part.strip()]
    return len(filled) == 2 and filled[0] != filled[1]


def repeats_prompt(text: Text, prompt_to_repeat: str) -> bool:
    """It begins with the prompt."""
    return text.stripped.lower().startswith(prompt_to_repeat.strip().lower())


def copies(text: Text, prompt_to_repeat: str) -> bool:
    """It is the prompt, and nothing else."""
    return _same(text.raw, prompt_to_repeat)


def copies_several_times(text: Text, prompt_to_repeat: str, N: int) -> bool:  # noqa: N803 - as data sets call it
    """It is the prompt several times, with six asterisks between."""
    parts = text.raw.split(_SEPARATOR)
    return len(parts) == N and all(_same(part, prompt_to_repeat) for part in parts)


def copies_span(text: Text, prompt_to_repeat: str, n_start: int, n_end: int) -> bool:
    """It is what lies between two places of the prompt.

    The instruction includes the last character and the checker of IFEvalG leaves it out; either is right here.
    """
    return any(_same(text.raw, prompt_to_repeat[n_start:end]) for end in (n_end, n_end + 1))


def varies_phrase(text: Text, phrase: str, small_n: int) -> bool:
    """A phrase is said so many times, each time with one word in its middle replaced."""
    wanted = phrase.split()
    found = _begun_and_ended(text.pieces, wanted)
    return len(found) == small_n and all(
        len(each) == len(wanted) and sum(said != asked for said, asked in zip(each, wanted, strict=True)) == 1
        for each in found
    )


def _begun_and_ended(pieces: list[str], phrase: list[str]) -> list[list[str]]:
    """Return what begins with the first word of a phrase and ends with the next one that begins with its last."""
    found, index = [], 0
    while index < len(pieces):
        if pieces[index].endswith(phrase[0]):
            rest = range(index + 1, len(pieces))
            end = next((each for each in rest if pieces[each].startswith(phrase[-1])), None)
            if end is None:
                break
            found.append([phrase[0], *pieces[index + 1 : end], phrase[-1]])
            index = end
        index += 1
    return found
