"""`roll-train --dry-run --probe`: contacts environments, data sets, model and inference servers."""

import asyncio
import sys
import threading
from collections.abc import Awaitable, Callable, Sequence
from contextlib import AsyncExitStack
from functools import partial
from typing import TypeVar

from rollgym.clients.protocol.arrays import DecodeError
from rollgym.clients.protocol.errors import ProblemError
from rollgym.trainer.backends.base import TrainRow
from rollgym.trainer.config.data import ExamplesSettings
from rollgym.trainer.config.run import RunSettings
from rollgym.trainer.config.supervised import DistillSettings, DpoSettings, SftSettings
from rollgym.trainer.core.console import RunConsole
from rollgym.trainer.core.device import torch_device
from rollgym.trainer.core.errors import ConfigError, TrainerError
from rollgym.trainer.evaluation.evaluation_sets import build_evaluation_set, overlap_warnings
from rollgym.trainer.learn.pipelines.example_rows import ExampleRows, examples_of
from rollgym.trainer.learn.pipelines.preferences import PreferenceRows
from rollgym.trainer.models.load import load_config, load_tokenizer, model_folder
from rollgym.trainer.models.tiny import build_tiny_tokenizer
from rollgym.trainer.rollout.data_check import check_streams
from rollgym.trainer.rollout.environments import EnvironmentPool
from rollgym.trainer.run.environments import open_environments, task_source
from rollgym.trainer.run.inference import check_inference, look_at_servers
from rollgym.trainer.run.judges import apart_from_judges
from rollgym.trainer.run.policy import chat_renderer
from rollgym.trainer.tasks.dataset import load_streams
from rollgym.trainer.tasks.task import Task, TaskSource

_PATIENCE_S = 6.0
"""How long an answer may take, beside the seconds that it takes to import torch, and to start a server of our own."""
_CONNECT_S = 3.0
_TASKS = 64
"""Number of a user's own tasks that are checked for their environments."""

Result = TypeVar("Result")


async def probe(settings: RunSettings) -> int:
    """Contact everything at once, and report for each whether it is available.

    Returns:
        The exit code: 2 if something is missing.
    """
    console = RunConsole(settings.steps, live=False)
    if judges := settings.cluster.roles.judges:
        console.say(f"probe: judges: {', '.join(judges)} would be started by the run, and are not asked")
        settings = apart_from_judges(settings)
    questions = [_answer("model", _in_time(_model(settings)))]
    if settings.plays or settings.tasks:
        questions.append(_answer("environments", _environments(settings, console)))
    if settings.plays and not settings.inference.embedded:
        questions.append(_answer("inference", _in_time(_inference(settings))))
    if not settings.plays:
        questions.append(_answer("examples", _in_background(partial(_examples, settings, console))))
    answers = await asyncio.gather(*questions)
    for name, answer, fault in answers:
        console.say(f"probe: {name}: {answer}") if fault is None else _complain(f"probe: {name}: {fault}")
    return 2 if any(fault is not None for _, _, fault in answers) else 0


async def _answer(name: str, question: Awaitable[str]) -> tuple[str, str, str | None]:
    try:
        return name, await question, None
    except TimeoutError:
        return name, "", f"no answer within {_PATIENCE_S:g} s"
    except (TrainerError, ConnectionError, ProblemError, DecodeError) as error:
        return name, "", str(error)


async def _in_time(question: Awaitable[str]) -> str:
    async with asyncio.timeout(_PATIENCE_S):
        return await question


def _complain(text: str) -> None:
    sys.stderr.write(f"roll-train: {text}\n")


async def _model(settings: RunSettings) -> str:
    if settings.model.path is None:
        return "the tiny policy, which is built here"
    return await _in_background(partial(_look_at_model, settings, settings.model.path))


def _look_at_model(settings: RunSettings, path: str) -> str:
    torch_device(settings.model.device)
    folder = model_folder(path, fetch=False)
    if not folder.is_dir():
        return f"{path} is on the hub; the run fetches it"
    config = load_config(folder)
    if not any(folder.glob("*.safetensors")):
        raise ConfigError(f"{folder} holds no weights: there is no .safetensors file")
    renderer = chat_renderer(settings, load_tokenizer(folder))
    if settings.prompt.tools == "template":
        renderer.require_tools()
    return f"{config.model_type} in {folder}"


async def _inference(settings: RunSettings) -> str:
    """Look at servers that run already, without steering them: another run may be training by them."""
    if settings.inference.launch is not None:
        check_inference(settings)
        return f"{settings.inference.kind} would be started by the run"
    seen = await look_at_servers(settings, _CONNECT_S)
    return "; ".join(f"{url} is {each.server} with '{each.model}'" for url, each in seen.items())


def _examples(settings: RunSettings, console: RunConsole) -> str:
    """Read all examples, and render them as the run will."""
    how = settings.pipeline
    assert how is not None
    path = settings.model.path
    tokenizer = build_tiny_tokenizer() if path is None else load_tokenizer(model_folder(path))
    rows = ExampleRows(chat_renderer(settings, tokenizer), how, settings.model.max_length, console.say)
    read: Callable[[Sequence[ExamplesSettings]], list[TrainRow] | PreferenceRows] = rows.pairs
    if isinstance(how, SftSettings | DistillSettings):
        read = rows.conversations
    elif isinstance(how, DpoSettings) and not how.loss.paired:
        read = rows.judged
    learnt, held_out = read(how.data), read(how.held_out)
    rows.tell_overlap(learnt, held_out)
    return f"{len(examples_of(learnt))} to learn from, {len(examples_of(held_out))} held out"


async def _environments(settings: RunSettings, console: RunConsole) -> str:
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(open_environments(settings, console, connect_s=_CONNECT_S))
        return await _in_time(_ask(settings, pool, console))


async def _ask(settings: RunSettings, pool: EnvironmentPool, console: RunConsole) -> str:
    source = await _in_background(partial(task_source, settings))
    tasks = _kinds(source, settings)
    for task in tasks:
        await _play_nothing(task, pool, settings)
    streams = [stream for each in settings.datasets for stream in load_streams(each)]
    await check_streams(streams, pool)
    sets = settings.evaluation.sets.items()
    of_rows = [
        await build_evaluation_set(name, each, pool) for name, each in sets if each.dataset is not None
    ]
    for warning in overlap_warnings(streams, of_rows):
        console.say(f"probe: {warning}")
    rows = sum(len(stream.rows) for stream in streams)
    data = f"{_counted(len(settings.datasets), 'data set')} with {_counted(rows, 'row')}" if streams else ""
    made = f"{', '.join(sorted({task.env_id for task in tasks}))} made and reset" if tasks else ""
    return "; ".join(part for part in (made, data) if part)


def _counted(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def _kinds(source: TaskSource, settings: RunSettings) -> Sequence[Task]:
    """One task of every kind: what the run trains on, and what its evaluation sets ask for."""
    wanted = [Task(0, each.env_id, 0, each.kwargs, each.options, url=each.url) for each in settings.tasks]
    if settings.rollout.task_source is not None:
        wanted += [source.task(index) for index in range(_TASKS)]
    for each in settings.evaluation.sets.values():
        if each.dataset is None:
            wanted.append(Task(0, each.env_id, 0, each.kwargs, each.options, url=each.url))
    return list({task.session_key: task for task in reversed(wanted)}.values())


async def _play_nothing(task: Task, pool: EnvironmentPool, settings: RunSettings) -> None:
    trained = any(task.env_id == each.env_id for each in settings.tasks)
    expert = {"expert": True} if settings.warm_start is not None and trained else {}
    try:
        async with pool.session(task) as session:
            options = {**(task.options or {}), **expert}
            _, info = await session.reset(seed=task.seed, options=options or None)
    except ProblemError as problem:
        notes = "".join(f"; {note}" for note in getattr(problem, "__notes__", ()))
        raise ConfigError(f"{task.env_id}: {problem.code}: {problem.detail}{notes}") from problem
    if expert and info.get("expert_action") is None:
        raise ConfigError(f"{task.env_id} names no expert action, which the warm start needs")


async def _in_background(work: Callable[[], Result]) -> Result:
    """Run a blocking call in a daemon thread: a hanging network does not keep the command from exiting."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, error: Exception | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        try:
            result = work()
        except Exception as error:  # noqa: BLE001 - passed to the waiting task
            loop.call_soon_threadsafe(settle, None, error)
        else:
            loop.call_soon_threadsafe(settle, result, None)

    threading.Thread(target=run, daemon=True, name="probe").start()
    return await done
