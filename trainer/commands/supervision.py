"""Supervises training: one process per directory, restarts after a role's death, and an end that says how to resume."""

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

from rollgym.clients.protocol.errors import ProblemError
from rollgym.trainer.assembly.standing import StandingRoles
from rollgym.trainer.backends.transport import RankFailedError
from rollgym.trainer.cluster.supervision import RoleRestarts, death_in
from rollgym.trainer.commands.internal_errors import is_short_of_memory, memory_does_not_suffice
from rollgym.trainer.commands.resume import has_trained
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.ending import Ending
from rollgym.trainer.core.errors import PluginError, RoleDiedError, RunError, TrainerError
from rollgym.trainer.core.run_files import WriteError
from rollgym.trainer.core.run_lock import run_lock
from rollgym.trainer.records.checkpoint_store import CheckpointStore
from rollgym.trainer.records.run_metrics import RUN_METRICS

_ENDS = (ConnectionError, TimeoutError, WriteError, RunError)
"""Errors that end a run for a reason that a user can fix."""

Attempt = Callable[[RunSettings, CheckpointStore, RunConsole, Ending, AsyncExitStack], Awaitable[None]]
"""One attempt at a run, from its present state to its end."""


class RunStoppedError(TrainerError):
    """A run ended before its last step; the message says why, what is saved, and how to resume."""

    def __init__(self, message: str, exit_code: int = 2) -> None:
        super().__init__(message)
        self.exit_code = exit_code


async def run_supervised(
    settings: RunSettings, ending: Ending, attempt: Attempt, roles: StandingRoles | None = None
) -> int:
    """Run a command's training to its end, in a directory that this process locks meanwhile.

    If a rank of its models dies, the rank is restarted, and the run resumes from its last checkpoint.

    Args:
        settings: The run's settings, already checked.
        ending: Requests an early, orderly end.
        attempt: Runs the training, from the start or from the newest checkpoint.
        roles: The roles that survive from one attempt to the next; they are closed at the end.

    Raises:
        RunStoppedError: If it was interrupted, lost its environments or its disk, lost roles too often, or cannot
            continue, once what was learnt is saved.
    """
    directory = Path(settings.output_dir)
    kept = settings.checkpoint
    store = CheckpointStore(directory / "checkpoints", kept.keep, kept.keep_best, kept.best_is)
    with run_lock(directory):
        try:
            try:
                await _supervised(settings, store, ending, attempt, roles)
            finally:
                if roles is not None:
                    await roles.close()
        except asyncio.CancelledError:
            if ending.reason is None:
                raise
            raise _stopped(ending.reason, store, directory) from None
        except (PluginError, ProblemError) as error:
            if has_trained(directory):  # what the user's code, or a server's refusal, did not break is saved
                error.add_note(_how_to_go_on(store, directory))
            raise
        except (*_ENDS, RuntimeError, MemoryError) as error:
            if _lacks_memory(error):
                raise _stopped(_needs_less(settings, error), store, directory) from error
            if not isinstance(error, _ENDS):
                raise
            raise _stopped(ending.reason or error, store, directory) from error
    return 0


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


async def _supervised(
    settings: RunSettings,
    store: CheckpointStore,
    ending: Ending,
    attempt: Attempt,
    roles: StandingRoles | None,
) -> None:
    """Train to the end, however often roles die on the way, within the bounds that the settings name."""
    cluster = settings.cluster
    restarts = RoleRestarts(cluster.restarts, cluster.restart_after_s, store.highest_step)
    if roles is not None:
        roles.restarts = restarts
    while True:
        try:
            async with AsyncExitStack() as stack:
                console = RunConsole(settings.steps, live=settings.tracking.console, metrics=RUN_METRICS)
                stack.callback(console.close)
                ending.say = console.say
                await attempt(settings, store, console, ending, stack)
            return
        except (Exception, asyncio.CancelledError) as error:
            died = death_in(ending.reason or error)
            if died is None or not await ending.take_back():
                raise
            wait_s = restarts.wait_s(died)
            ending.say = RunConsole(settings.steps, live=False).explain
            ending.say(f"{died}")
            ending.say(_goes_on(store, died, restarts, wait_s))
        if roles is not None:
            await roles.keep_after(died)
        await asyncio.sleep(wait_s)
        resumed = settings.checkpoint.model_copy(update={"resume": "auto"})
        settings = settings.model_copy(update={"checkpoint": resumed})


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
