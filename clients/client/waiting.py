"""Waiting for several answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

Answer = TypeVar("Answer")


async def wait_for_all(works: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """Wait for all of them, whatever becomes of one, so that nothing goes on behind the caller's back.

    Returns:
        What they gave, in the same order.

    Raises:
        BaseException: The first that one of them ended in, once all have ended.
    """
    answers: list[Answer] = []
    for ended in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended
        answers.append(ended)
    return answers
