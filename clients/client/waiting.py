"""Waiting for several answers at once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterable
from typing import TypeVar

Answer = TypeVar("Answer")


async def wait_for_all(works: Iterable[Awaitable[Answer]]) -> list[Answer]:
    """Wait for all awaitables, even if one fails, so that none still runs when this returns.

    Returns:
        Their results, in the same order.

    Raises:
        BaseException: The first error among them, once all have ended.
    """
    answers: list[Answer] = []
    for ended in await asyncio.gather(*works, return_exceptions=True):
        if isinstance(ended, BaseException):
            raise ended
        answers.append(ended)
    return answers
