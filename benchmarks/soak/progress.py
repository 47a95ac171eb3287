"""What has happened in a soak of gateways, which is kept in a file."""

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self


@dataclass
class Progress:
    """What has happened so far.

    Attributes:
        seed: Of everything that is random.
        seconds: How long it has run.
        kills: What was killed, and how often.
        played: The digest of each episode, by its player and number.
        steps: Steps that were answered.
        asked_again: Requests that were answered with something retryable, or not at all.
        lost: Answers that did not follow from the last one, and other ends of sessions.
        mended_by_client: Sessions that our client restored.
        slowest_step_s: The longest time from a step to its answer, all tries together.
        left_at_nodes: Sessions at the nodes when all were closed and had their idle time-out.
    """

    seed: int
    seconds: float = 0.0
    kills: dict[str, int] = field(default_factory=dict)
    played: dict[str, str] = field(default_factory=dict)
    steps: int = 0
    asked_again: int = 0
    lost: list[str] = field(default_factory=list)
    mended_by_client: int = 0
    slowest_step_s: float = 0.0
    left_at_nodes: int = 0

    @classmethod
    def load(cls, path: Path | None, seed: int) -> Self:
        if path is None or not path.exists():
            return cls(seed)
        found = cls(**json.loads(path.read_text())["progress"])
        if found.seed != seed:
            raise SystemExit(f"{path} is of a run with seed {found.seed}")
        return found

    def save(self, path: Path | None, about: dict[str, Any]) -> None:
        if path is not None:
            fresh = path.with_suffix(".new")
            fresh.write_text(json.dumps({**about, "progress": asdict(self)}, indent=1) + "\n")
            fresh.replace(path)
