"""The page's section on a run's health: counts of events that never happen in most runs."""

from collections.abc import Sequence

from rollgym.trainer.evaluation.reporting.charts import short
from rollgym.trainer.evaluation.reporting.run_folder import Row, number


def findings(rows: Sequence[Row]) -> list[tuple[str, str]]:
    """Return what is to be said of the steps of a run: (what, how much)."""
    found: list[tuple[str, str]] = []
    updates = [value for row in rows if (value := number(row, "policy/optimizer_steps")) is not None]
    played = [row for row in rows if number(row, "rollout/groups_kept") is not None]
    if played:
        idle = sum(not number(row, "policy/optimizer_steps") for row in played)
        found.append(("steps without an optimizer step", f"{idle:,} of {len(played):,}"))
    if updates:
        left_out = sum(
            number(row, f"{model}/skipped_steps") or 0.0 for row in rows for model in ("policy", "critic")
        )
        found.append(("optimizer steps left out, not finite", f"{left_out:,.0f}"))
    longest = [value for row in rows if (value := number(row, "health/steps_without_learning")) is not None]
    if longest:
        found.append(("most steps in a row without learning", f"{max(longest):,.0f}"))
        found.append(("of these, up to the last step", f"{longest[-1]:,.0f}"))
    entropies = [value for row in rows if (value := number(row, "policy/entropy")) is not None]
    if entropies:
        found.append(
            ("entropy at first and at last (nats)", f"{short(entropies[0])}, {short(entropies[-1])}")
        )
    return found
