"""Rules that rate by degrees: length, repetition, script."""

import math
import re
from collections import Counter

from envs.verifiers.formats.reply import Reply, Unit
from envs.verifiers.languages import script_shares

_WORD = re.compile(r"\w+")


def length_within(reply: Reply, most: int, least: int = 0, unit: Unit = "words") -> float:
    """Whether the length is in a range."""
    return float(least <= reply.length(unit) <= most)


def length_target(reply: Reply, target: int, per_unit: float | None = None, unit: Unit = "words") -> float:
    """1 - per_unit * |length - target|, no less than 0; `per_unit` is 1 / target if it is not said.

    LCPO-Exact of L1 (Aggarwal and Welleck 2025, arXiv:2503.04697), with its alpha = 0.0003 for tokens.
    """
    slope = 1 / max(1, target) if per_unit is None else per_unit
    return max(0.0, 1.0 - slope * abs(reply.length(unit) - target))


def length_cosine(reply: Reply, most: int, floor: float = 0.0, unit: Unit = "words") -> float:
    """floor + (1 - floor) * (1 + cos(pi * min(length, most) / most)) / 2: from 1 at no length to the floor at most.

    The cosine reward for right answers (Yeo et al. 2025, arXiv:2502.03373).
    """
    progress = min(reply.length(unit), most) / max(1, most)
    return floor + (1.0 - floor) * (1.0 + math.cos(math.pi * progress)) / 2.0


def overlong(reply: Reply, most: int, buffer: int, unit: Unit = "words") -> float:
    """1 up to most - buffer, then linearly down to 0 at most.

    1 plus the soft overlong punishment of DAPO (Yu et al. 2025, arXiv:2503.14476, equation 13).
    """
    over = reply.length(unit) - (most - buffer)
    if over <= 0:
        return 1.0
    return max(0.0, 1.0 - over / buffer) if buffer else 0.0


def repetition(reply: Reply, n: int = 3, penalty: float = 1.0, least: float | None = None) -> float:
    """1 - penalty * (1 - distinct n-grams / n-grams) of words in lower case; whether it is `least`, where that is said.

    The repetition penalty of Yeo et al. 2025 (arXiv:2502.03373, appendix) as open-r1 has it.
    """
    words = _WORD.findall(reply.raw.lower())
    grams = Counter(zip(*(words[start:] for start in range(n)), strict=False))
    rating = 1.0 - penalty * (1.0 - len(grams) / grams.total()) if grams else 1.0
    return rating if least is None else float(rating >= least)


def long_block(reply: Reply, most: int = 100) -> float:
    """Whether nothing longer than this stands without a space (ROLL's penalty for long blocks)."""
    return float(all(len(word) <= most for word in reply.words))


def script(reply: Reply, script: str, least: float | None = None) -> float:
    """The share of letters that are of a script; whether it is large enough, where `least` is said.

    Language consistency as a share of the target language (DeepSeek-R1, arXiv:2501.12948, 2.3.2), by letters. A reply
    without letters has a share of 0.
    """
    share = script_shares(reply.raw).get(script, 0.0)
    return share if least is None else float(share >= least)
