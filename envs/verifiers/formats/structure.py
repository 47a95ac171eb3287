"""Rules about tags and boxes."""

from collections.abc import Mapping

from envs.core.replies import boxes
from envs.verifiers.formats.reply import Reply


def think_answer(reply: Reply, think: str = "think", answer: str = "answer") -> float:
    """Whether the reply is `<think>...</think>` and then `<answer>...</answer>`, each once, and nothing else.

    The format reward of DeepSeek-R1 (arXiv:2501.12948, 2.2.2). Neither part may be blank.
    """
    tags = (f"<{think}>", f"</{think}>", f"<{answer}>", f"</{answer}>")
    if any(reply.raw.count(tag) != 1 for tag in tags):
        return 0.0
    opened, closed, begun, ended = (reply.raw.index(tag) for tag in tags)
    outside = (
        reply.raw[:opened] + reply.raw[closed + len(tags[1]) : begun] + reply.raw[ended + len(tags[3]) :]
        if opened < closed < begun < ended
        else "x"
    )
    if outside.strip():
        return 0.0
    parts = (reply.raw[opened + len(tags[0]) : closed], reply.raw[begun + len(tags[2]) : ended])
    return float(all(part.strip() for part in parts))


def tag_counts(reply: Reply, tags: Mapping[str, int]) -> float:
    """The share of tags that occur exactly as often as they should (open-r1's tag count reward: 1/4 for each of 4)."""
    return sum(reply.raw.count(tag) == times for tag, times in tags.items()) / len(tags)


def single_boxed(reply: Reply) -> float:
    r"""Whether there is exactly one `\boxed{...}` outside of thinking, with something in it."""
    found, opened = boxes(reply.spoken)
    return float(opened == 1 and len(found) == 1 and bool(found[0].content.strip()))
