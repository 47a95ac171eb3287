"""Checks a run's data before its first step: the verifiers are served, and understand the rows."""

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.errors import ProblemError
from rollgym.suggestions import did_you_mean
from rollgym.trainer.core.errors import CheckpointError, ConfigError
from rollgym.trainer.core.run_files import write_errors, write_whole
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.rollout.episodes import item_of
from rollgym.trainer.tasks.dataset import RowStream

DATA_FILE = "data.json"
"""File in a run's directory with a digest of each domain of its data."""


async def check_streams(streams: Sequence[RowStream], pool: EnvironmentPool) -> None:
    """Look every verifier up on its server, and show it the first row that it gets.

    Raises:
        ConfigError: If a server does not have a verifier, or a verifier does not understand the row.
    """
    for stream in streams:
        client = await pool.client(stream.settings.url)
        await _look_up(client, stream.settings.name, stream.env_id)
        session = await client.make(stream.env_id, dict(stream.settings.kwargs))
        task = stream.item(0, 0, 0)
        try:
            await session.reset(seed=0, options=task.options)
        except ProblemError as problem:
            raise ConfigError(
                f"data set {stream.settings.name}: {stream.env_id} does not take a row (tried: {task.row}): "
                f"{problem.detail}; 'columns' says which task field comes from which column"
            ) from problem
        finally:
            await client.close_sessions([session])
        await _check_mixture(stream, pool)


async def _check_mixture(stream: RowStream, pool: EnvironmentPool) -> None:
    """Look the other verifiers of a mixture up, and show them the first row with an empty response."""
    task = stream.item(0, 0, 0)
    for part in task.mixture_parts:
        client = await pool.client(part.url)
        await _look_up(client, stream.settings.name, part.verifier)
        try:
            (verdict,) = await client.verify(part.verifier, [item_of(part, task, "")])
            fault = verdict.detail if verdict.outcome == "error" else None
        except ProblemError as problem:
            fault = problem.detail
        if fault is not None:
            raise ConfigError(
                f"data set {stream.settings.name}: {part.verifier} of rewards does not take a row (tried: "
                f"{task.row}): {fault}; its 'fields' and 'task' say which field comes from where"
            )


async def _look_up(client: EnvClient, dataset: str, env_id: str) -> None:
    served = [each.env_id for each in await client.envs()]
    if env_id in served:
        return
    hint = did_you_mean(env_id, served, 3) or f"it has {', '.join(served)}"
    raise ConfigError(f"data set {dataset}: the server has no environment {env_id!r}; {hint}")


def keep_digests(streams: Sequence[RowStream], directory: Path, *, resuming: bool) -> None:
    """Write digests of the data beside the run, or check that a resumed run has the same data.

    Raises:
        CheckpointError: If the data have changed, so that the run would continue with different tasks.
    """
    keep_data(
        {f"{number} {stream.domain}": stream.digest for number, stream in enumerate(streams)},
        directory,
        resuming=resuming,
    )


def keep_data(found: Mapping[str, str], directory: Path, *, resuming: bool) -> None:
    """Write digests of what is learnt from beside the run, or check that a resumed run has the same.

    Args:
        found: Digests, by a number and a name, such as "0 held_out".
        directory: The run's.
        resuming: Whether the run resumes from a checkpoint.

    Raises:
        CheckpointError: If the data have changed, or the earlier digests are missing.
        WriteError: If they cannot be written.
    """
    path = directory / DATA_FILE
    if resuming and path.exists():
        before = _kept(path)
        changed = sorted(name for name in {*before, *found} if before.get(name) != found.get(name))
        if changed:
            names = ", ".join(name.partition(" ")[2] for name in changed)
            raise CheckpointError(
                f"cannot resume: the rows of {names} are not those that the run in {directory} began with; restore the "
                "files, or use another output_dir. If the files are as they were, and a newer release reads their rows "
                f"otherwise, delete {path} to go on with them"
            )
    if found:
        with write_errors(path):
            write_whole(path, json.dumps(found, indent=1) + "\n")


def _kept(path: Path) -> dict[str, str]:
    """Return the digests that a run wrote when it began.

    Raises:
        CheckpointError: If they cannot be read.
    """
    try:
        digests = json.loads(path.read_bytes())
    except OSError as error:
        raise CheckpointError(f"cannot resume: {path} cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError):
        digests = None
    if not isinstance(digests, dict):
        raise CheckpointError(
            f"cannot resume: {path} is damaged, which says what the run's data were; bring it back, or delete it if "
            "the data are what they were"
        )
    return digests
