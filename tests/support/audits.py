"""Audits of many environments with one pair of servers, which saves the start of two for each."""

import asyncio
import inspect
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import ExitStack, asynccontextmanager
from functools import partial
from types import ModuleType
from typing import Any, Self

from rollgym.clients.audit.card import Card, CardEntry, CardVerdict
from rollgym.clients.audit.runner import run_audit
from rollgym.clients.audit.subject import AuditSettings, Budget, Subject, discover
from rollgym.clients.client.client import EnvClient
from rollgym.clients.measuring.metrics import queued_seconds, resident_of_tree
from rollgym.clients.process.local_server import LocalServer


class Auditor:
    """Audits environments; each class once, since a second audit would not meet processes that are fresh to it.

    Args:
        arguments: Of the servers.
    """

    def __init__(self, *arguments: str) -> None:
        self._arguments = ["--workers", "1", "--allow-expert", "--log-level", "error", *arguments]
        self._stack = ExitStack()

    @classmethod
    def of(cls, module: ModuleType) -> Self:
        """Audits the environments that are defined in a module."""
        names = [
            name
            for name, each in vars(module).items()
            if inspect.isclass(each) and each.__module__ == module.__name__
        ]
        served = [part for name in names for part in ("--env", f"{name}={module.__name__}:{name}")]
        # Only the operator can have an environment of others run inline.
        inline = [name for name in names if getattr(vars(module)[name], "served_inline", False)]
        return cls(*served, *(part for name in inline for part in ("--isolation", f"{name}=inline")))

    def __enter__(self) -> Self:
        self._here = self._stack.enter_context(LocalServer(self._arguments, {"PYTHONHASHSEED": "1"}))
        self._elsewhere = self._stack.enter_context(LocalServer(self._arguments, {"PYTHONHASHSEED": "4711"}))
        return self

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)

    def part(
        self, env_id: str, audit: Callable[[Subject], Awaitable[list[CardEntry]]]
    ) -> dict[str, CardEntry]:
        """Return what one part of an audit says, such as `audit_costs`."""
        return {entry.check: entry for entry in asyncio.run(self._part(env_id, audit))}

    async def _part(
        self, env_id: str, audit: Callable[[Subject], Awaitable[list[CardEntry]]]
    ) -> list[CardEntry]:
        async with EnvClient(self._here.url) as client:
            known = await discover(client, env_id, {})
            subject = Subject(
                env=await client.env(env_id),
                kwargs={},
                client=client,
                settings=AuditSettings(episodes=8),
                budget=Budget(60.0),
                action_space=known.action_space,
                first_info=known.info,
                wording=known.wording,
                resident_bytes=lambda: None,
                elsewhere=None,
                queued_seconds=partial(queued_seconds, self._here.process.pid),
            )
            return await audit(subject)

    def audit(self, env_id: str, kwargs: Mapping[str, Any] | None = None, **settings: Any) -> Card:
        return asyncio.run(self._audit(env_id, kwargs or {}, AuditSettings(**({"episodes": 20} | settings))))

    async def _audit(self, env_id: str, kwargs: Mapping[str, Any], settings: AuditSettings) -> Card:
        async with EnvClient(self._here.url) as client:
            return await run_audit(
                client,
                env_id,
                kwargs,
                settings,
                subject_name=env_id,
                resident_bytes=partial(resident_of_tree, self._here.process.pid),
                queued_seconds=partial(queued_seconds, self._here.process.pid),
                elsewhere=self._fresh,
                progress=lambda part, budget: None,
            )

    @asynccontextmanager
    async def _fresh(self) -> AsyncIterator[EnvClient]:
        async with EnvClient(self._elsewhere.url) as client:
            yield client


def faults(card: Card) -> dict[str, str]:
    """The entries that are neither well nor skipped, with their verdicts."""
    return {
        f"{entry.section}: {entry.check}": entry.verdict.value
        for entry in card.entries
        if entry.verdict in (CardVerdict.WARNING, CardVerdict.FAILED)
    }


def entry_of(card: Card, check: str) -> Mapping[str, Any]:
    """The entry of a check, as plain data."""
    return next(entry.as_dict() for entry in card.entries if entry.check == check)
