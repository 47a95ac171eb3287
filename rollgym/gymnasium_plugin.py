"""Our environments in Gymnasium's registry."""

from __future__ import annotations

from gymnasium.envs.registration import register, registry

from envs.registry import builtin_environments

NAMESPACE = "rollgym"


def register_environments() -> None:
    """Register `rollgym/Remote-v0` and the built-in environments, as names only: nothing of them is imported.

    `import rollgym` calls this; `gymnasium.make("rollgym:rollgym/Remote-v0", ...)` imports by itself. Calling it again
    does nothing.
    """
    remote = f"{NAMESPACE}/Remote-v0"
    if remote in registry:
        return
    register(
        id=remote,
        entry_point="clients.client.env:RemoteEnv",
        vector_entry_point="clients.client.vector:RemoteVectorEnv",
    )
    for name, spec in builtin_environments().items():
        # The environments count their steps themselves (`truncated`), so Gymnasium need not.
        register(id=f"{NAMESPACE}/{name}", entry_point=spec.entry_point)
