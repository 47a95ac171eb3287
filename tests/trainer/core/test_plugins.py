"""Code of the user's that fails or breaks its contract is named, with the setting, the file and the line."""

import asyncio
import signal
import sys
import threading

import numpy as np
import pytest
import torch

from rollgym.trainer.algorithms.batch import TrajectoryBatch
from rollgym.trainer.algorithms.filter_settings import CustomEpisodes
from rollgym.trainer.algorithms.group_filters import CustomFilter
from rollgym.trainer.algorithms.selection import choose_episodes, filter_groups
from rollgym.trainer.cli import main
from rollgym.trainer.config.rollout import PromptSettings
from rollgym.trainer.core.errors import PluginError
from rollgym.trainer.core.plugins import load_plugin
from rollgym.trainer.core.seeding import MAX_WIRE_SEED
from rollgym.trainer.rollout.context import context_policy
from rollgym.trainer.tasks.task import OwnTaskSource, Task

_calls = [0]


def failing_later(trajectory):
    _calls[0] += 1
    return [0.0 for _ in trajectory.turns] if _calls[0] <= 2 else None


def test_code_that_fails_in_the_middle_of_a_run_is_told_with_how_to_go_on(tmp_path, capfd):
    words = [
        f"output_dir={tmp_path}",
        "steps=2",
        "checkpoint.every=1",
        "tasks=[{env_id: FrozenLake-v0, kwargs: {size: 3, max_episode_steps: 1}}]",
        "model={hidden_size: 16, layers: 1, heads: 2, max_length: 512}",
        "rollout={groups_per_step: 1, group_size: 2, max_turns: 1, max_new_tokens: 1}",
        "evaluation.every=0",
        "tracking.tensorboard=false",
        f"rollout.reward={__name__}:failing_later",
    ]
    assert main(words) == 2
    message = capfd.readouterr().err.strip().splitlines()[-1]
    assert "must return one reward for each turn, not NoneType" in message
    newest = tmp_path / "checkpoints" / "step_000001"
    assert message.endswith(f"; go on from {newest} by the same command with checkpoint.resume=auto")


def flags(groups, returns):
    return [True, False]


def strangers(groups, returns):
    return [7]


def words(groups, returns):
    return "01"


def failing(*_):
    return list(_)[99]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("flags", "must return the numbers of the groups to keep"),
        ("words", "must return the numbers of the groups to keep"),
        ("strangers", r"keeps unknown groups \[7\]"),
        ("failing", "raised IndexError: list index out of range"),
    ],
)
def test_a_filter(function, message):
    settings = CustomFilter(kind="custom", function=f"{__name__}:{function}")
    with pytest.raises(
        PluginError, match=rf"algorithm.filter.function '{__name__}:{function}' {message}.*line \d+"
    ):
        filter_groups(settings, [0, 0, 1], [0.0, 1.0, 2.0])


def nothing(history, observation):
    return []


def texts(history, observation):
    return ["hello"]


@pytest.mark.parametrize("function", ["nothing", "texts", "failing"])
def test_a_context_policy(function):
    policy = context_policy(PromptSettings(custom_context=f"{__name__}:{function}"))
    with pytest.raises(PluginError, match=f"prompt.custom_context '{__name__}:{function}' "):
        policy([], [{"role": "user", "content": "x"}])


class Source:
    """A task source that gives what it is told."""

    def __init__(self, given):
        self._given = given

    def task(self, index):
        return self._given


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (None, "gave NoneType for task 3, which is no Task"),
        (Task(3, "Any-v0", seed=1.0), "seed 1.0, which is no integer"),
        (Task(3, "Any-v0", seed=True), "seed True, which is no integer"),
        (Task(3, "Any-v0", seed=MAX_WIRE_SEED), "seeds are from 0"),
        (Task(3, "Any-v0", seed=-1), "seeds are from 0"),
        (Task(4, "Any-v0", seed=1), "gave task 4 for index 3"),
        (Task(3, "Any-v0", seed=1, kwargs={"size": np.int64(3)}), "are not all JSON: .*int64"),
        (Task(3, "Any-v0", seed=1, options={"board": np.zeros(2)}), "are not all JSON: .*ndarray"),
        (Task(3, "Any-v0", seed=1, kwargs=None), "are not all JSON"),
    ],
)
def test_a_task_source(given, message):
    plugin = load_plugin(f"{__name__}:Source", "rollout.task_source")
    with pytest.raises(PluginError, match=message):
        OwnTaskSource(plugin, Source(given)).task(3)


def test_a_task_source_without_tasks():
    plugin = load_plugin(f"{__name__}:Source", "rollout.task_source")
    with pytest.raises(PluginError, match=r"must return an object with a method task\(index\), not int"):
        OwnTaskSource(plugin, 5)


def asking(trajectory):
    raise ConnectionError("my own service is down")


def test_a_connection_of_the_plugins_own_is_not_ours():
    with pytest.raises(PluginError, match="raised ConnectionError: my own service is down"):
        load_plugin(f"{__name__}:asking", "rollout.reward")(None)


def long(trajectory):
    raise ValueError("word\n" * 10_000)


def test_what_it_says_is_one_line_of_bounded_length():
    with pytest.raises(PluginError) as raised:
        load_plugin(f"{__name__}:long", "rollout.reward")(None)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 700


class MuteError(Exception):
    """An error that cannot say what it is."""

    def __str__(self):
        raise RuntimeError


class StrangeEnd(BaseException):
    """What no `except Exception` sees."""


def leaving(*_):
    sys.exit(3)


def strange(*_):
    raise StrangeEnd("out")


def stopping(*_):
    raise StopIteration


def mute(*_):
    raise MuteError


async def later(*_):
    return [1.0]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        ("leaving", "raised SystemExit: 3"),
        ("strange", "raised StrangeEnd: out"),
        ("stopping", "raised StopIteration"),
        ("mute", r"raised MuteError: \(its message cannot be read: RuntimeError\)"),
        ("later", "is a coroutine, and must be a plain function: write def in place of async def"),
    ],
)
def test_whatever_it_raises_names_it(function, message):
    with pytest.raises(
        PluginError, match=rf"rollout.reward '{__name__}:{function}' {message} \(.*line \d+\)"
    ):
        load_plugin(f"{__name__}:{function}", "rollout.reward")(None)


async def cancelling(*_):
    inner = asyncio.ensure_future(asyncio.sleep(100))
    inner.cancel()
    await inner


async def test_a_cancellation_of_what_it_waited_for_is_its_error():
    plugin = load_plugin(f"{__name__}:cancelling", "rollout.agent")
    with pytest.raises(PluginError, match=r"raised CancelledError \("), plugin.running():
        await plugin.function()


async def test_a_cancellation_of_the_one_that_waits_for_it_passes():
    plugin = load_plugin(f"{__name__}:cancelling", "rollout.agent")

    async def waiting():
        with plugin.running():
            await asyncio.sleep(100)

    task = asyncio.ensure_future(waiting())
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


def shutdown(*_):
    raise GeneratorExit


async def ending_later(*_):
    await asyncio.sleep(0)
    raise GeneratorExit


@pytest.mark.parametrize("function", ["shutdown", "ending_later"])
async def test_an_end_that_it_raises_itself_is_its_error(function):
    plugin = load_plugin(f"{__name__}:{function}", "rollout.reward")
    with pytest.raises(PluginError, match=r"raised GeneratorExit \("):
        await plugin.answer(None)
    with pytest.raises(PluginError, match=r"raised GeneratorExit \("), plugin.running():
        shutdown()


async def test_the_end_of_a_coroutine_that_is_left_behind_passes():
    plugin = load_plugin(f"{__name__}:waiting_for_ever", "rollout.agent")

    async def playing():
        with plugin.running():
            await plugin.function()

    coroutine = playing()
    task = asyncio.ensure_future(coroutine)
    await asyncio.sleep(0)
    coroutine.close()  # what it would raise in place of GeneratorExit would come out here
    task.cancel()
    await asyncio.wait([task])


async def waiting_for_ever(*_):
    await asyncio.Event().wait()


_gate, _entered = threading.Event(), []


def slow(number):
    _entered.append(number)
    assert _gate.wait(20)
    return [threading.current_thread() is threading.main_thread(), len(_entered)]


async def test_a_plain_function_takes_its_time_beside_the_event_loop_one_call_after_the_other():
    _entered.clear()
    _gate.clear()
    plugin = load_plugin(f"{__name__}:slow", "rollout.reward")
    calls = [asyncio.ensure_future(plugin.answer(number)) for number in range(3)]
    async with asyncio.timeout(20):
        while not _entered:
            await asyncio.sleep(0.001)
        assert _entered == [0]
        _gate.set()
        assert await asyncio.gather(*calls) == [[False, 1], [False, 2], [False, 3]]


async def test_a_plain_function_that_never_returns_holds_up_nobody_who_gave_it_up():
    _entered.clear()
    _gate.clear()
    plugin = load_plugin(f"{__name__}:slow", "rollout.reward")
    given_up = asyncio.ensure_future(plugin.answer(0))
    async with asyncio.timeout(20):
        while not _entered:
            await asyncio.sleep(0.001)
        given_up.cancel()
        next_one = asyncio.ensure_future(plugin.answer(1))
        with pytest.raises(asyncio.CancelledError):
            await given_up
        while _entered == [0]:
            await asyncio.sleep(0.001)
        _gate.set()
        assert await next_one == [False, 2]


def alarming(*_):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)


async def test_what_needs_the_main_thread_is_told_where_it_runs():
    plugin = load_plugin(f"{__name__}:alarming", "rollout.reward")
    with pytest.raises(
        PluginError, match=r"main thread.*; plain functions run in .* write async def .*line \d+\)"
    ):
        await plugin.answer(None)


@pytest.mark.parametrize("given", [None, 1.0, {0: 1.0, 1: 0.0}, {1.0, 0.0}, "10", b"10"])
def test_what_it_returns_is_no_list(given):
    plugin = load_plugin(f"{__name__}:asking", "rollout.reward")
    with pytest.raises(PluginError, match=f"must return one reward a turn, not {type(given).__name__}"):
        plugin.elements(given, "one reward a turn")


def test_what_needs_no_order_may_be_a_set():
    plugin = load_plugin(f"{__name__}:asking", "algorithm.filter.function")
    assert sorted(plugin.elements({2, 0}, "the numbers of the groups to keep", ordered=False)) == [0, 2]
    with pytest.raises(PluginError, match="not dict"):
        plugin.elements({0: True}, "the numbers of the groups to keep", ordered=False)


def flags_of_numpy(batch):
    return np.array(batch.solved)


def flags_of_torch(batch):
    return torch.tensor(batch.solved)


@pytest.mark.parametrize("function", ["flags_of_numpy", "flags_of_torch"])
def test_flags_may_be_those_of_an_array(function):
    batch = TrajectoryBatch(
        groups=[0, 0],
        rewards=[[1.0], [0.0]],
        format_penalties=[[0.0], [0.0]],
        valid=[[True], [True]],
        anchors=[[None], [None]],
        tokens=[[1], [1]],
        solved=[True, False],
    )
    settings = CustomEpisodes(kind="custom", function=f"{__name__}:{function}")
    assert choose_episodes(settings, batch, [1.0, 0.0]).kept == [True, False]
