"""What a response says: all of it but the thinking."""

import re

_THINKING = re.compile(r"<think>.*?(?:</think>|\Z)", re.DOTALL | re.IGNORECASE)
_CLOSED = re.compile(r"\A.*</think>", re.DOTALL | re.IGNORECASE)


def spoken(response: str) -> str:
    """Return a response without what stands in think tags.

    A `</think>` that was never opened ends thinking, too: chat templates put the opening tag into the prompt.
    """
    if "think>" not in response.lower():
        return response
    return _CLOSED.sub("", _THINKING.sub("", response))
