"""Supervises training: one process per directory, restarts after a role's death, and an end that says how to resume."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path

from rollgym.clients.protocol.errors import ProblemError
from rollgym.trainer.backends.transport import RankFailedError
from rollgym.trainer.cluster.supervision import RoleRestarts, death_in
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.errors import PluginError, RoleDiedError, RunError, TrainerError
from rollgym.trainer.core.run_files import WriteError, run_lock
from rollgym.trainer.core.shutdown import GracefulShutdown
from rollgym.trainer.records.checkpoint import CheckpointStore
from rollgym.trainer.records.run_metrics import RUN_METRICS
from rollgym.trainer.run.inference import check_inference
from rollgym.trainer.run.internal_errors import is_short_of_memory, memory_does_not_suffice
from rollgym.trainer.run.models import check_trainable
from rollgym.trainer.run.resume import has_trained
from rollgym.trainer.run.roles import PersistentRoles

_ENDS = (ConnectionError, TimeoutError, WriteError, RunError)
"""Errors that end a run for a reason that a user can fix."""


@dataclass(frozen=True, slots=True)
class RunAttempt:
    """One attempt at a run, from its present state to its end.

    Attributes:
        settings: The run's settings, already checked.
        store: Its checkpoints.
        console: Shows its progress.
        shutdown: Requests an early, orderly end.
        roles: The roles that survive from one attempt to the next.
    """

    settings: RunSettings
    store: CheckpointStore
    console: RunConsole
    shutdown: GracefulShutdown
    roles: PersistentRoles


class RunStoppedError(TrainerError):
    """A run ended before its last step; the message says why, what is saved, and how to resume."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


class Supervision:
    """Makes attempts at a run until one gets to the end, within the bounds that the settings name.

    Args:
        settings: The run's settings, already checked.
        store: Its checkpoints.
        shutdown: Requests an early, orderly end.
        roles: The roles that survive from one attempt to the next.

    Attributes:
        done: Whether an attempt has got to the end.
    """

    def __init__(
        self,
        settings: RunSettings,
        store: CheckpointStore,
        shutdown: GracefulShutdown,
        roles: PersistentRoles,
    ) -> None:
        self.done = False
        self._settings = settings
        self._store = store
        self._shutdown = shutdown
        self._roles = roles
        cluster = settings.cluster
        self._restarts = RoleRestarts(cluster.restarts, cluster.restart_after_s, store.highest_step)
        roles.restarts = self._restarts

    @asynccontextmanager
    async def attempt(self) -> AsyncIterator[RunAttempt]:
        """Give one attempt. If a role dies inside, the role is started again, and the next attempt goes on."""
        shutdown, live = self._shutdown, self._settings.tracking.console
        try:
            with closing(RunConsole(self._settings.steps, live=live, metrics=RUN_METRICS)) as console:
                shutdown.say = console.say
                yield RunAttempt(self._settings, self._store, console, shutdown, self._roles)
            self.done = True
            return
        except (Exception, asyncio.CancelledError) as error:
            died = death_in(shutdown.reason or error)
            if died is None or not await shutdown.cancel_shutdown():
                raise
        waits: dict[str, float] = {}
        while died is not None:
            died = await self._waited_after(died, waits)
        resumed = self._settings.checkpoint.model_copy(update={"resume": "auto"})
        self._settings = self._settings.model_copy(update={"checkpoint": resumed})

    async def _waited_after(self, died: RoleDiedError, waits: dict[str, float]) -> RoleDiedError | None:
        """Wait until a role that has died may be started again; return one that died meanwhile, if one did.

        Args:
            died: The role.
            waits: How long roles that have died since the last attempt are waited for: each death of several processes
                of one role is no further restart.
        """
        shutdown = self._shutdown
        if is_new := died.role not in waits:
            waits[died.role] = self._restarts.wait_s(died)
        shutdown.say = RunConsole(self._settings.steps, live=False).explain
        shutdown.say(f"{died}")
        if is_new:
            shutdown.say(_goes_on(self._store, died, self._restarts, waits[died.role]))
        try:
            await self._roles.keep_after(died)
            await asyncio.sleep(waits[died.role])
        except asyncio.CancelledError:
            # A machine takes several roles with it, and their deaths are told one after the other.
            another = death_in(shutdown.reason)
            if another is None or not await shutdown.cancel_shutdown():
                raise
            return another
        return None


@asynccontextmanager
async def supervised(settings: RunSettings, shutdown: GracefulShutdown) -> AsyncIterator[Supervision]:
    """Supervise a run, in a directory that this process locks while the context is open.

    Args:
        settings: The run's settings, already checked.
        shutdown: Requests an early, orderly end.

    Raises:
        ConfigError: If a program or a package is not there that the run needs.
        RunStoppedError: If it was interrupted, lost its environments or its disk, lost roles too often, or cannot
            continue, once what was learnt is saved.
    """
    if settings.plays:
        check_inference(settings)
    check_trainable(settings)
    directory = Path(settings.output_dir)
    kept = settings.checkpoint
    store = CheckpointStore(directory / "checkpoints", kept.keep, kept.keep_best, kept.best_is)
    roles = PersistentRoles(settings, shutdown)
    with run_lock(directory):
        try:
            try:
                yield Supervision(settings, store, shutdown, roles)
            finally:
                await roles.close()
        except asyncio.CancelledError:
            if shutdown.reason is None:
                raise
            raise _stopped(shutdown.reason, store, directory) from None
        except (PluginError, ProblemError) as error:
            if has_trained(directory):  # what the user's code, or a server's refusal, did not break is saved
                error.add_note(_how_to_go_on(store, directory))
            raise
        except (*_ENDS, RuntimeError, MemoryError) as error:
            if _lacks_memory(error):
                raise _stopped(_needs_less(settings, error), store, directory) from error
            if not isinstance(error, _ENDS):
                raise
            raise _stopped(shutdown.reason or error, store, directory) from error


def _lacks_memory(error: Exception) -> bool:
    """Whether training had too little memory; a server that was started says by itself what takes less."""
    trains = isinstance(error, RankFailedError) or not isinstance(error, TrainerError)
    return trains and is_short_of_memory(error)


def _needs_less(settings: RunSettings, error: Exception) -> RunError:
    """Return an error that says what takes less memory, and what to do with its settings."""
    tokens = settings.optimizer.micro_batch_tokens
    less = [f"lower optimizer.tokens_per_micro_batch (it is {tokens})"]
    if not settings.model.gradient_checkpointing:
        less.append("set model.gradient_checkpointing=true")
    less[-1] += ": both may change when a run goes on"
    return RunError(memory_does_not_suffice(settings, error, less))


def _goes_on(store: CheckpointStore, died: RoleDiedError, restarts: RoleRestarts, wait_s: float) -> str:
    newest = store.latest()
    where = "from its beginning, there being no checkpoint yet" if newest is None else f"from {newest}"
    count = f"{restarts.in_a_row(died.role)} of {restarts.limit}"
    return f"{died.role} is started again in {wait_s:g} s ({count}), and the run goes on {where}"


def _stopped(error: Exception, store: CheckpointStore, directory: Path) -> RunStoppedError:
    return RunStoppedError(f"{error}; {_how_to_go_on(store, directory)}", getattr(error, "exit_code", 2))


def _how_to_go_on(store: CheckpointStore, directory: Path) -> str:
    newest = store.latest()
    if newest is not None:
        return f"go on from {newest} by the same command with checkpoint.resume=auto"
    if has_trained(directory):
        return "no checkpoint was saved, and the same command with checkpoint.resume=auto begins again"
    return "nothing was learnt yet, and the same command begins again"
