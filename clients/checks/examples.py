"""The example replies that an author declares: each is a valid action at the start of an episode."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rollgym.clients.checks.report import Finding, Status, shortened
from rollgym.clients.checks.target import Target

EXAMPLE_REPLIES = "example_replies"
"""The key of an environment's metadata."""

_CHECK = "example replies are valid"
_REMEDY = "metadata['example_replies'] lists whole replies, each of which makes sense after a reset"


def example_replies(metadata: Mapping[str, Any]) -> Sequence[Any]:
    """Return the replies that an environment declares as examples; none if it declares no list."""
    declared = metadata.get(EXAMPLE_REPLIES)
    return declared if isinstance(declared, list | tuple) else ()


def check_examples(target: Target) -> Iterator[Finding]:
    """Play each example reply after a reset of its own."""
    env = target.build()
    try:
        if EXAMPLE_REPLIES not in env.metadata:
            return
        replies = example_replies(env.metadata)
        if not replies:
            given = type(env.metadata[EXAMPLE_REPLIES]).__name__
            yield Finding(_CHECK, Status.FAIL, f"they are an empty list or a {given}", _REMEDY)
            return
        for seed, reply in enumerate(replies):
            if reply not in env.action_space:
                yield Finding(_CHECK, Status.FAIL, f"{shortened(reply)} is not in the action space", _REMEDY)
                return
            env.reset(seed=seed)
            observation, _, _, _, info = env.step(reply)
            if info.get("action_is_valid") is False:
                detail = f"{shortened(reply)} is not valid with seed {seed}: {str(observation)[:200]}"
                yield Finding(_CHECK, Status.FAIL, detail, _REMEDY)
                return
        yield Finding(_CHECK, Status.PASS, f"{len(replies)} of them")
    finally:
        env.close()
