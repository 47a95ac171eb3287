"""The customer: a script that matches words, answers questions, and ends the conversation."""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from rollgym.envs.tools.retail.requests import Request

STOP = "###STOP###"
"""The end of the customer's last message."""

MOST_HEARD = 4_000
"""Characters of a message that the customer listens to."""

_PATIENCE = 4
_IDENTITY = re.compile(r"e-?mail|\bname\b|zip|identif|verif|who (?:am i|are you)|authenticat", re.IGNORECASE)
_CONFIRMATION = re.compile(
    r"\bconfirm|yes ?/ ?no|\(yes|shall i|should i|may i|(?:do|would) you (?:want|like) me to|go ahead|proceed"
    r"|(?:is|are) (?:that|this|these) (?:correct|right|ok|okay)|do you agree",
    re.IGNORECASE,
)
_ANYTHING_ELSE = re.compile(r"anything else|something else|any other|further help", re.IGNORECASE)
_REPORT = re.compile(
    r"\b(?:has|have|is|are|was|were) (?:now |been |successfully )*"
    r"(?:done|cancell?ed|returned|exchanged|updated|changed|requested|redirected)\b"
    r"|\btotal (?:is|was|of)|\bcosts?\b|cannot|can't|can not|unable|not possible|not able",
    re.IGNORECASE,
)
_ASKED = {
    "order": re.compile(
        r"which order|order (?:number|id)|what order|number of (?:the|your) order", re.IGNORECASE
    ),
    "reason": re.compile(r"reason|\bwhy\b", re.IGNORECASE),
    "item": re.compile(r"(?:which|what) (?:items?|products?|articles?)", re.IGNORECASE),
    "variant": re.compile(r"variant|option|colou?r|size|which one", re.IGNORECASE),
    "address": re.compile(r"address|street|where (?:to|should)", re.IGNORECASE),
    "payment": re.compile(r"payment|refund|gift card|\bcard\b|pay\b|method", re.IGNORECASE),
}


@dataclass(frozen=True, slots=True)
class Identity:
    """How a customer says who it is: by address, or by name and zip code."""

    text: str


class Customer:
    """One customer in one conversation.

    Args:
        identity: The reply to a question about its identity.
        requests: Its requests, one after another.
    """

    def __init__(self, identity: Identity, requests: Sequence[Request]) -> None:
        self._identity = identity
        self._requests = tuple(requests)
        self._patience = _PATIENCE
        self.position = 0
        self.identified = False
        self.agreed = False
        self.told: set[str] = set()
        self.gone = False

    @property
    def request(self) -> Request | None:
        """Return the present request; None once everything was reported on."""
        return self._requests[self.position] if self.position < len(self._requests) else None

    def opening(self) -> str:
        """Return the customer's first message."""
        return f"Hello. {self._requests[0].opening}"

    def answer(self, message: str) -> str:
        """Return what it says to a message of the agent's."""
        request = self.request
        assert request is not None
        message = message[:MOST_HEARD]
        if not self.identified and _IDENTITY.search(message):
            self.identified = True
            return self._identity.text
        if _CONFIRMATION.search(message) and not _ANYTHING_ELSE.search(message):
            self.agreed = True
            return "Yes, please go ahead."
        # A question other than an offer of more help is not a report.
        asks = "?" in message
        if _ANYTHING_ELSE.search(message) or (not asks and _REPORT.search(message)):
            return self._next()
        asked = [name for name, words in _ASKED.items() if name in request.details and words.search(message)]
        if asked:
            self.told.update(asked)
            return " ".join(request.details[name] for name in asked)
        if _IDENTITY.search(message):
            return self._identity.text
        self._patience -= 1
        if self._patience <= 0:
            self.gone = True
            return f"This leads nowhere. {STOP}"
        return request.opening

    def _next(self) -> str:
        self.position += 1
        self.agreed = False
        self.told = set()
        request = self.request
        if request is None:
            self.gone = True
            return f"That is all, thank you. {STOP}"
        return f"Thank you. {request.opening}"
