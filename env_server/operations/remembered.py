"""Answers to requests that may come again."""

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Callable, Coroutine
from typing import Any

_Key = tuple[str, str, str]


class RememberedAnswers:
    """The last answers to make, fork and restore, by caller, operation and request id.

    A request id that is being answered is joined, one that was answered gets the same answer. A request that failed
    is forgotten: it made nothing, and may be tried again.

    Args:
        limit: How many sessions the answers that are kept for one caller tell of, at least for the newest answer; one
            caller's requests make nobody else's forgotten.
    """

    def __init__(self, limit: int) -> None:
        self._limit = limit
        self._answers: dict[str, OrderedDict[_Key, asyncio.Task[Any]]] = {}
        self._weights: Counter[str] = Counter()
        self._recalls: dict[_Key, Callable[[], Coroutine[Any, Any, Any]]] = {}

    async def once(
        self, caller: str, op: str, request_id: str | None, make: Callable[[], Coroutine[Any, Any, Any]]
    ) -> Any:
        """The answer to a request: the one that is known, or the one that `make` gives."""
        if request_id is None:
            return await make()
        key = (caller, op, request_id)
        answers = self._answers.setdefault(caller, OrderedDict())
        task = answers.get(key)
        if task is None:
            give = self._recalls.pop(key, make)
            task = asyncio.get_running_loop().create_task(give())
            answers[key] = task
            task.add_done_callback(lambda done: self._settle(key, done))
        return await asyncio.shield(task)

    def forget(self, caller: str, belongs: Callable[[Any], bool]) -> None:
        """Forget the answers of a caller that a predicate says so of."""
        answers = self._answers.get(caller, OrderedDict())
        for key, task in list(answers.items()):
            if task.done() and belongs(task.result()):
                self._weights[caller] -= len(answers.pop(key).result())

    def recall(
        self, caller: str, op: str, request_id: str, give: Callable[[], Coroutine[Any, Any, Any]]
    ) -> None:
        """Note how the answer that a process before this one gave is given again."""
        self._recalls[caller, op, request_id] = give

    def _settle(self, key: _Key, task: asyncio.Task[Any]) -> None:
        caller = key[0]
        answers = self._answers[caller]
        if task.cancelled() or task.exception() is not None:
            answers.pop(key, None)
            if not answers:
                del self._answers[caller]
            return
        self._weights[caller] += len(task.result())
        while self._weights[caller] > self._limit and len(answers) > 1:
            oldest = next(iter(answers))
            if not answers[oldest].done():
                break
            self._weights[caller] -= len(answers.pop(oldest).result())
