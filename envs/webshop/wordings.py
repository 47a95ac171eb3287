"""How each framework shows the shop, reads replies to it and pays for purchases."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Literal

from rollgym.envs.core.profiles import PROFILES, Profile


@dataclass(frozen=True, slots=True)
class Wording:
    """How one framework talks with the shop.

    Attributes:
        reading: The action's place in a reply.
        template: The observation, with `{page}`, `{task}`, `{actions}` and `{left}` (steps that are left).
        penalty: Added to the reward of a turn whose action cannot be read or is not possible.
        pays: The shop's reward as it is, or something only for a perfect purchase.
        perfect: The reward of a perfect purchase in the second case.
        search_anywhere: Whether a search is possible on pages without a search bar, as the shop itself allows.
        hides_lonely_next: Whether `next >` is left out if only it and `back to search` can be clicked.
        quoted: Whether the parts of a text page stand in quotation marks, without the instruction.
        lower_case: Whether replies are read in lower case.
        refuses_chinese: Whether a reply with Chinese characters is not valid.
    """

    reading: Profile
    template: str = "{page}"
    penalty: float = 0.0
    pays: Literal["score", "perfect"] = "score"
    perfect: float = 1.0
    search_anywhere: bool = True
    hides_lonely_next: bool = False
    quoted: bool = False
    lower_case: bool = False
    refuses_chinese: bool = False


WORDINGS: Mapping[str, Wording] = MappingProxyType(
    {
        "native": Wording(PROFILES["native"]),
        "compact": Wording(replace(PROFILES["native"], name="compact"), search_anywhere=False),
        "ragen": Wording(
            PROFILES["ragen"],
            template="{page}\nCompare products and check their options before you buy. You have {left} actions left. "
            "You must choose from these actions: {actions}.",
            penalty=-0.1,
            pays="perfect",
            search_anywhere=False,
            hides_lonely_next=True,
        ),
        "roll": Wording(
            PROFILES["roll"],
            template="{page}\nAvailable actions: {actions}.\nActions left: {left}.",
            penalty=-0.05,
            search_anywhere=False,
        ),
        "verl-agent": Wording(
            PROFILES["verl-agent"],
            template="Your task is to: {task}.\nCurrent observation: {page}\nAdmissible actions: {actions}.",
            penalty=-0.1,
            pays="perfect",
            perfect=10.0,
            search_anywhere=False,
            quoted=True,
            lower_case=True,
            refuses_chinese=True,
        ),
        "gem": Wording(
            PROFILES["gem"],
            template="{page}\nAnswer with \\boxed{{ACTION}}. Available actions: {actions}.",
            penalty=-0.1,
        ),
    }
)


def wording_named(name: str) -> Wording:
    """Return a wording.

    Raises:
        ValueError: The name is unknown.
    """
    if name not in WORDINGS:
        raise ValueError(f"profile must be one of {', '.join(WORDINGS)}, not {name!r}")
    return WORDINGS[name]
