"""The portable episode: all that is needed to rebuild a session elsewhere, and the proof that it is the same."""

from __future__ import annotations

from hashlib import blake2b
from typing import Annotated, Any, Literal, Self

import orjson
from pydantic import BaseModel, ConfigDict, Field, Strict, WithJsonSchema, model_validator

from rollgym.clients.protocol.free_form import NO_BOOLEAN, WHOLE, FreeFields, FreeValue

Digest = Annotated[str, Field(pattern=r"^[0-9a-f]{16}$")]
Steps = Annotated[int, Field(ge=0), WHOLE]
EpisodeSeed = Annotated[int, Field(ge=0, lt=2**53), WHOLE]
# JSON has no tuples. Tools that read OpenAPI documents do not know of lists whose items differ.
Reseed = Annotated[
    tuple[Steps, EpisodeSeed],
    Strict(False),
    WithJsonSchema(
        {
            "type": "array",
            "description": "Steps, and a seed.",
            "items": {"type": "integer", "minimum": 0, "exclusiveMaximum": 2**53},
            "minItems": 2,
            "maxItems": 2,
        }
    ),
]


class PortableEpisode(BaseModel):
    """An episode so far, without the environment: seed and actions, with a digest of each step.

    Observations are not kept: replaying the actions gives them again, and the digests prove it.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    format: Annotated[Literal[1], WHOLE, NO_BOOLEAN] = 1
    env_id: str
    env_version: str
    kwargs: FreeFields = Field(default_factory=dict)
    episode: Annotated[int, WHOLE] = Field(
        default=0, ge=0, lt=2**53, description="Index of this episode in its session."
    )
    seed: EpisodeSeed | None = Field(default=None, description="None: the session was never reset.")
    options: FreeFields | None = None
    reset_digest: Digest | None = Field(default=None, description="Digest of the reset's observation.")
    actions: list[FreeValue] = Field(
        default_factory=list, description="As they are on the wire, in JSON's encoding."
    )
    digests: list[Digest] = Field(default_factory=list, fail_fast=True, description="One for each action.")
    reseeds: list[Reseed] = Field(
        default_factory=list,
        fail_fast=True,
        description="Of a fork: after this many steps, the generator was seeded anew with this.",
    )

    @model_validator(mode="after")
    def _fits_together(self) -> Self:
        self.refuse_misfit()
        return self

    def in_json(self) -> dict[str, Any]:
        """Return its fields as JSON has them; the actions, options and kwargs are as they were given."""
        return {**dict(self), "reseeds": [list(each) for each in self.reseeds]}

    def refuse_misfit(self) -> None:
        """Refuse an episode that no session can have produced: a missing part would be dropped silently.

        Raises:
            ValueError: Its parts do not fit together.
        """
        if (self.seed is None) != (self.reset_digest is None):
            raise ValueError("an episode has a seed and a reset_digest, or neither")
        if self.seed is None and (self.actions or self.digests or self.reseeds or self.options):
            raise ValueError(
                "an episode without a seed has not begun: it has no actions, digests, reseeds or options"
            )
        if len(self.digests) != len(self.actions):
            raise ValueError(f"{len(self.digests)} digests came for {len(self.actions)} actions")
        steps = [step for step, _ in self.reseeds]
        if steps != sorted(steps) or (steps and steps[-1] > len(self.actions)):
            raise ValueError(f"reseeds are in the order of steps, and the episode has {len(self.actions)}")


def step_digest(observation: Any, reward: float, terminated: bool, truncated: bool) -> str:
    """Digest a step's return value: 16 hexadecimal characters.

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
