"""Rewards that combine several verifiers: each is called over the wire once the response is complete."""

import asyncio
from collections.abc import Mapping
from typing import Any

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.clients.protocol.messages import Verdict
from rollgym.trainer.core.errors import InvalidNumberError
from rollgym.trainer.core.numbers import finite_number
from rollgym.trainer.records.timeline import Phase
from rollgym.trainer.records.trajectory import Trajectory
from rollgym.trainer.rollout.agent import FAULTS, note_failure
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.tasks.task import RewardMixture, RewardPart, Task


async def mix_reward(pool: EnvironmentPool, trajectory: Trajectory) -> None:
    """Give the last turn of an episode the weighted sum of all scores, with each part by its name.

    If a verifier cannot decide, such as a judge that is down, the episode fails and is played again; its score is never
    0. A response that does not pass a gate earns nothing, and the verifiers behind the gate are not called.

    Args:
        pool: The environments, which include the verifiers.
        trajectory: The episode; unchanged if its task has no mixture, or its outcome is not a result.

    Raises:
        ProblemError: If a server refuses the request (unknown verifier, fields that it does not understand).
    """
    mixture = trajectory.task.mixture
    if mixture is None or not trajectory.outcome.is_result or not trajectory.turns:
        return
    try:
        with trajectory.timeline.during(Phase.VERIFY):
            verdicts = await _verdicts(pool, mixture, trajectory)
        _pay(trajectory, mixture, verdicts)
    except (ProblemError, DecodeError, InvalidNumberError) as error:
        note_failure(trajectory, error)


async def _verdicts(
    pool: EnvironmentPool, mixture: RewardMixture, trajectory: Trajectory
) -> dict[str, Verdict]:
    """Call the gates in sequence, then all other verifiers concurrently; stop at the first gate that fails."""
    found: dict[str, Verdict] = {}
    for part in mixture.parts:
        if part.gate is None:
            continue
        verdict = found[part.name] = await _ask(pool, part, trajectory)
        if verdict.outcome in FAULTS or verdict.score < part.gate - 1e-9:
            return found
    others = [part for part in mixture.parts if part.gate is None]
    asked = await asyncio.gather(*(_ask(pool, part, trajectory) for part in others))
    return found | {part.name: verdict for part, verdict in zip(others, asked, strict=True)}


async def _ask(pool: EnvironmentPool, part: RewardPart, trajectory: Trajectory) -> Verdict:
    client = await pool.client(part.url)
    item = item_of(part, trajectory.task, trajectory.steps[-1].reply)
    (verdict,) = await client.verify(part.verifier, [item])
    return verdict


def item_of(part: RewardPart, task: Task, response: str) -> Mapping[str, Any]:
    """Return a verifier's input: the task's fields, renamed as it needs them, and the response."""
    fields = dict(task.options or {})
    renamed = {name: fields[source] for name, source in part.fields.items() if source in fields}
    return {**fields, **renamed, **part.task, "response": response}


def _pay(trajectory: Trajectory, mixture: RewardMixture, verdicts: Mapping[str, Verdict]) -> None:
    turn, own = trajectory.steps[-1], trajectory.task.env_id
    for name, verdict in verdicts.items():
        if verdict.outcome in FAULTS:
            trajectory.outcome = FAULTS[verdict.outcome]
            trajectory.detail = f"the verifier {name} could not tell: {verdict.detail}"
            return
    shares = {own: mixture.own * turn.reward}
    for part in mixture.parts:
        if part.name in verdicts:
            score = finite_number(verdicts[part.name].score, f"a score of {part.verifier}")
            shares[part.name] = shares.get(part.name, 0.0) + part.weight * score
    if len(verdicts) < len(mixture.parts) or any(
        part.gate is not None and verdicts[part.name].score < part.gate - 1e-9 for part in mixture.parts
    ):
        shares = {own: 0.0} | {part.name: 0.0 for part in mixture.parts}
    # A weight may be any number, and a finite score times it none.
    turn.reward = finite_number(sum(shares.values()), "the weighted sum of an episode's scores")
    turn.reward_parts = shares
    for name, share in shares.items():
        trajectory.metrics[f"reward/{name}"] = share
