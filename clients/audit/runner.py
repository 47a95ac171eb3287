"""An audit from the first session to the card."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager
from typing import Any, NamedTuple

from rollgym.clients.audit.baselines import audit_baselines, audit_difficulty, audit_lengths
from rollgym.clients.audit.card import Card, CardEntry, CardVerdict
from rollgym.clients.audit.conformance import audit_conformance, audit_tools
from rollgym.clients.audit.costs import audit_costs
from rollgym.clients.audit.determinism import audit_determinism
from rollgym.clients.audit.leaks import audit_leaks
from rollgym.clients.audit.rewards import audit_rewards
from rollgym.clients.audit.scoring import audit_scoring
from rollgym.clients.audit.subject import AuditSettings, Budget, Subject, discover
from rollgym.clients.client.client import EnvClient


class AuditPart(NamedTuple):
    """A part of an audit.

    Attributes:
        name: For people.
        section: The section of the card.
        audit: Returns its entries.
    """

    name: str
    section: str
    audit: Callable[[Subject], Awaitable[list[CardEntry]]]


# Determinism first, while the server's processes are fresh; the expert before the blind policy, which learns from it;
# rewards and conformance after all episodes that they check.
PARTS: tuple[AuditPart, ...] = (
    AuditPart("determinism", "determinism", audit_determinism),
    AuditPart("expert", "difficulty", audit_difficulty),
    AuditPart("baselines", "baselines", audit_baselines),
    AuditPart("leaks", "leaks", audit_leaks),
    AuditPart("scores", "verifier", audit_scoring),
    AuditPart("conformance", "conformance", audit_conformance),
    AuditPart("tools", "conformance", audit_tools),
    AuditPart("rewards", "rewards", audit_rewards),
    AuditPart("lengths", "difficulty", audit_lengths),
    AuditPart("costs", "costs", audit_costs),
)
"""The parts of an audit, in order."""

_SECTIONS = ("determinism", "conformance", "rewards", "baselines", "leaks", "verifier", "difficulty", "costs")


async def run_audit(
    client: EnvClient,
    env_id: str,
    kwargs: Mapping[str, Any],
    settings: AuditSettings,
    *,
    subject_name: str,
    resident_bytes: Callable[[], int | None],
    elsewhere: Callable[[], AbstractAsyncContextManager[EnvClient]] | None,
    queued_seconds: Callable[[], float | None] = lambda: None,
    progress: Callable[[str, Budget], None],
) -> Card:
    """Audit an environment of a server.

    Args:
        client: The server's client.
        env_id: The environment.
        kwargs: The kwargs that it is made with.
        settings: How thorough to be.
        subject_name: Its name on the card.
        resident_bytes: Returns how much memory the server's processes hold.
        elsewhere: Starts the same server in fresh processes; None if it cannot be started.
        queued_seconds: Returns how long its loop has waited for a processor; None if that cannot be known.
        progress: Called with the part that begins, and the budget.

    Raises:
        ProblemError: The environment does not exist, or it cannot be made.
        ConnectionError: The server cannot be reached.
    """
    budget = Budget(settings.budget_s)
    env = await client.env(env_id)
    known = await discover(client, env_id, kwargs)
    subject = Subject(
        env=env,
        kwargs=kwargs,
        client=client,
        settings=settings,
        budget=budget,
        action_space=known.action_space,
        first_info=known.info,
        wording=known.wording,
        resident_bytes=resident_bytes,
        elsewhere=elsewhere,
        queued_seconds=queued_seconds,
    )
    entries: list[CardEntry] = []
    seconds: dict[str, float] = {}
    for part in PARTS:
        progress(part.name, budget)
        begun = budget.used
        if budget.spent:
            detail = f"the budget of {budget.seconds:g} s was spent before"
            entries.append(
                CardEntry(part.section, part.name, CardVerdict.SKIPPED, detail, "--budget-s gives more time")
            )
        else:
            entries += await part.audit(subject)
        seconds[part.name] = round(budget.used - begun, 3)
    entries.sort(key=lambda entry: _SECTIONS.index(entry.section))
    about = {
        "env_id": env.env_id,
        "version": env.version,
        "kind": env.kind,
        "isolation": env.isolation,
        "origin": env.origin,
        "deterministic": env.deterministic,
        "kwargs": dict(kwargs),
        "episodes": settings.episodes,
        "seed": settings.seed,
        "budget_s": settings.budget_s,
        "seconds": seconds,
    }
    return Card(subject_name, about, entries, budget.used)
