"""Dressings of an answer: what a model writes around it, which changes nothing of what it answers."""

from collections.abc import Callable, Mapping

Dressing = Callable[[str, str], str]
"""Dresses an answer; the second text is another answer, which is thought of or discarded."""

THOUGHTS: Mapping[str, Dressing] = {
    "thinking before it": lambda said, other: (
        f"<think>Is it {other}? The answer is {other}.</think>\n\n{said}"
    ),
    "thinking that the prompt opened": lambda said, other: (
        f"Maybe \\boxed{{{other}}}? Hm.\n</think>\n\n{said}"
    ),
    "empty thinking": lambda said, other: f"<think>\n\n</think>\n\n{said}",
    "thinking in capitals": lambda said, other: f"<THINK>{other}</THINK>{said}",
}
"""Dressings of whole replies."""

_PLACES: Mapping[str, Dressing] = {
    "box": lambda said, other: rf"\boxed{{{said}}}",
    "box with blanks": lambda said, other: rf"\boxed{{ {said} }}",
    "box in dollars": lambda said, other: rf"$\boxed{{{said}}}$",
    "box in a display": lambda said, other: f"\\[\n\\boxed{{{said}}}\n\\]",
    "box in bold": lambda said, other: rf"**\boxed{{{said}}}**",
    "box in a sentence": lambda said, other: rf"Therefore, the answer is $\boxed{{{said}}}$.",
    "box behind steps": lambda said, other: f"1. We try {other}.\n2. It fails.\n\nSo \\boxed{{{said}}}.",
    "box behind another": lambda said, other: (
        f"At first, \\boxed{{{other}}}. No: that is wrong.\n\n\\boxed{{{said}}}"
    ),
    "box and a farewell": lambda said, other: f"\\boxed{{{said}}}\n\nLet me know if you need more.",
    "framed box": lambda said, other: rf"\fbox{{{said}}}",
    "tags": lambda said, other: f"<answer>{said}</answer>",
    "tags on lines": lambda said, other: f"<answer>\n{said}\n</answer>",
    "tags behind a sentence": lambda said, other: f"It is not {other}.\n<answer>{said}</answer>",
    "tags behind others": lambda said, other: f"<answer>{other}</answer> No, wait: <answer>{said}</answer>",
    "phrase": lambda said, other: f"The answer is {said}",
    "phrase with a colon": lambda said, other: f"Final answer: {said}",
    "phrase behind steps": lambda said, other: f"First I thought of {other}.\nThe correct answer is: {said}",
    "phrase of GSM8K": lambda said, other: f"We add them up.\n#### {said}",
}

MARKED: Mapping[str, Dressing] = _PLACES
"""Dressings that say where the answer is: in boxes, in tags, or behind "the answer is"."""

_PLAINEST = frozenset({"box", "tags", "phrase", "nothing", "fence"})

BARE: Mapping[str, Dressing] = {
    "nothing": lambda said, other: said,
    "blanks": lambda said, other: f"\n {said} \n",
    "bold": lambda said, other: f"**{said}**",
}
"""Dressings of a reply that is nothing but the answer."""

IN_WORDS: Mapping[str, Dressing] = {
    "box of words": lambda said, other: rf"\boxed{{\text{{The answer is }} {said}}}",
    "last formula": lambda said, other: f"At first it looks like ${other}$. In the end we get ${said}$.",
    "last formula in round brackets": lambda said, other: rf"Not \({other}\). So it is \({said}\).",
    "confirmed": lambda said, other: f"Perhaps {other}. The final answer is ${said}$. I hope it is correct.",
}
"""Dressings in which formulas, but not words, are answers."""

LETTERS: Mapping[str, Dressing] = {
    "bracket": lambda said, other: f"({said})",
    "bold letter": lambda said, other: f"**{said}**",
    "letter and point": lambda said, other: f"{said}.",
    "option": lambda said, other: f"Option {said}",
    "choice": lambda said, other: f"I choose {said}.",
    "conclusion": lambda said, other: f"({other}) is too small.\nTherefore, the answer is ({said}).",
    "last line": lambda said, other: f"{other} cannot be.\n{said}",
    "correct option": lambda said, other: f"The correct option is {said}.",
    "not the other": lambda said, other: f"The answer is {said}, not {other}.",
    "box of text": lambda said, other: rf"\boxed{{\text{{{said}}}}}",
    "box with brackets": lambda said, other: rf"\boxed{{({said})}}",
}
"""Dressings of the letter of an option, beside those that are marked."""

FENCES: Mapping[str, Dressing] = {
    "fence": lambda said, other: f"```python\n{said}\n```",
    "fence with a short name": lambda said, other: f"```py\n{said}\n```",
    "fence without a name": lambda said, other: f"```\n{said}\n```",
    "tildes": lambda said, other: f"~~~python\n{said}\n~~~",
    "long fence": lambda said, other: f"````python\n{said}\n````",
    "fence in prose": lambda said, other: f"Here it is:\n\n```python\n{said}\n```\n\nIt takes linear time.",
    "fence behind another": lambda said, other: (
        f"First:\n```python\n{other}\n```\nBetter:\n```python\n{said}\n```"
    ),
    "fence beside a shell's": lambda said, other: (
        f"```python\n{said}\n```\nRun it:\n```bash\npython x.py\n```"
    ),
    "fence that is not closed": lambda said, other: f"Sure.\n```python\n{said}\n",
    "no fence": lambda said, other: said,
}
"""Dressings of a program."""


def thought(dressings: Mapping[str, Dressing]) -> dict[str, Dressing]:
    """Return dressings, and those that are the plainest of them behind each kind of thinking, too."""

    def behind(think: Dressing, put: Dressing) -> Dressing:
        return lambda said, other: think(put(said, other), other)

    plainest = {name: each for name, each in dressings.items() if name in _PLAINEST}
    return dict(dressings) | {
        f"{before}, {name}": behind(think, put)
        for before, think in THOUGHTS.items()
        for name, put in plainest.items()
    }
