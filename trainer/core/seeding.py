"""Named random streams: every random number of a run descends from the run's one seed.

A stream is named by words and numbers (`"task", 17`), so that adding a stream never shifts another one, and two
processes that name the same stream draw the same numbers. Python's `hash` is salted per process and is not used.
"""

import hashlib

import numpy as np

MAX_WIRE_SEED = 2**53
"""Seeds cross the wire as JSON integers; above this bound not every JSON reader keeps them exact."""


def derive_seed(seed: int, *names: str | int) -> int:
    """Return a seed in [0, 2**53) for the stream called `names` below `seed`.

    Args:
        seed: The seed of the run (or of a parent stream).
        names: Name of the stream's purpose, for example `"task", 17`.
    """
    path = "\x1f".join(f"{type(name).__name__}:{name}" for name in (seed, *names))
    digest = hashlib.blake2b(path.encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") % MAX_WIRE_SEED


def generator(seed: int, *names: str | int) -> np.random.Generator:
    """Return a private generator for the stream called `names` below `seed`."""
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence(derive_seed(seed, *names))))
