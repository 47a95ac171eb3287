"""The portable episode: all that is needed to rebuild a session elsewhere, and the proof that it is the same."""

from __future__ import annotations

from hashlib import blake2b
from typing import Any, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field

EPISODE_FORMAT = 1
"""The version of the portable episode's format that this package writes."""


class PortableEpisode(BaseModel):
    """An episode so far, without the environment: seed and actions, with a digest of each step.

    Observations are not kept: replaying the actions gives them again, and the digests prove it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    format: Literal[1] = 1
    env_id: str
    env_version: str
    kwargs: dict[str, Any] = Field(default_factory=dict)
    episode: int = Field(default=0, ge=0, description="Index of this episode in its session.")
    seed: int | None = Field(default=None, ge=0, lt=2**53, description="None: the session was never reset.")
    options: dict[str, Any] | None = None
    reset_digest: str | None = Field(default=None, description="Digest of the reset's observation.")
    actions: list[Any] = Field(
        default_factory=list, description="As they are on the wire, in JSON's encoding."
    )
    digests: list[str] = Field(default_factory=list, description="One for each action.")
    reseeds: list[tuple[int, int]] = Field(
        default_factory=list,
        description="Of a fork: after this many steps, the generator was seeded anew with this.",
    )


def step_digest(observation: Any, reward: float, terminated: bool, truncated: bool) -> str:
    """Digest what a step returned: 16 hexadecimal characters.

    Args:
        observation: The observation in JSON's encoding, `encode_value(space, observation, binary=False)`; that form
            is the same whatever encoding a frame has. A reset's digest has reward 0 and both flags False.
        reward: The reward.
        terminated: Whether the task ended.
        truncated: Whether a limit cut the episode.
    """
    content = orjson.dumps(
        (observation, float(reward), bool(terminated), bool(truncated)), option=orjson.OPT_SORT_KEYS
    )
    return blake2b(content, digest_size=8).hexdigest()
