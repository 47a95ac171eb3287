"""What runs in an actor, and the engines that are such processes: here they share the test's event loop."""

import asyncio
import itertools
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from functools import partial
from pathlib import Path

import pytest
import torch

from rollgym.env_server.cli import server_parser
from rollgym.trainer.backends.transport import pack, unpack
from rollgym.trainer.cluster.engine_server import EngineServer
from rollgym.trainer.cluster.placement import place_roles
from rollgym.trainer.cluster.process import ActorRanks, KeptProcess
from rollgym.trainer.cluster.remote_engine import RemoteEngines, answer_of
from rollgym.trainer.cluster.role_host import RoleHost
from rollgym.trainer.cluster.roles import RayRoles
from rollgym.trainer.cluster.supervision import RoleRestarts
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.core.errors import ConfigError, RoleDiedError, RoleLostError
from rollgym.trainer.inference.base import GenerationRequest, SamplingParams
from rollgym.trainer.inference.engine.torch_engine import TorchEngine
from rollgym.trainer.learn.weights.publisher import ModelWeights
from tests.support.tiny_models import sharp_model

PATIENCE_S = 60
NO_LOG = "/proc/no/log"
"""Where nothing can be written: the host then leaves this process's output alone."""


class Server:
    """Notes in which order it is called."""

    def __init__(self):
        self.called = []

    def note(self, what):
        self.called.append(what)
        return list(self.called)

    def fail(self, error):
        raise error

    async def hold(self):
        await asyncio.Event().wait()


class Here:
    """A `RoleProcess` whose host is in this event loop."""

    pid = 0
    node = ""

    def __init__(self, server):
        self._loop = asyncio.get_running_loop()
        self._host = RoleHost({}, [], NO_LOG)
        self._host._server = server
        self._numbers = itertools.count()
        self._asked = []
        self.dead = None
        self.tell = []

    def call(self, data: bytes) -> "Future[bytes]":
        if self.dead is not None:
            answer = Future()
            answer.set_exception(self.dead)
            return answer
        call = self._host.call(next(self._numbers), data)
        answer = asyncio.run_coroutine_threadsafe(call, self._loop)
        self._asked.append(answer)
        return answer

    def die(self, **how) -> None:
        """Be gone: calls under way fail, and those that come later, and whoever listens is told."""
        self.dead = RoleDiedError("actor_inference", "process 0 of actor_inference is gone", **how)
        for answer in self._asked:
            with suppress(InvalidStateError):
                answer.set_exception(self.dead)
        for tell in self.tell:
            tell(self.dead)
        # The process's threads would end with it; one that waits for weights would keep this one from its end.
        self._loop.create_task(self._host._server.leave_off_weights())

    def on_death(self, tell):
        self.tell.append(tell)

    def end(self):
        pass


async def test_calls_are_answered_in_the_order_of_their_numbers_however_they_come():
    host = RoleHost({}, [], NO_LOG)
    host._server = Server()
    calls = {
        number: asyncio.ensure_future(host.call(number, pack(("note", (number,))))) for number in (3, 1, 2)
    }
    await asyncio.sleep(0)
    calls[0] = asyncio.ensure_future(host.call(0, pack(("note", (0,)))))
    async with asyncio.timeout(PATIENCE_S):
        answers = {number: unpack(await call) for number, call in calls.items()}
    assert answers == {number: (True, list(range(number + 1))) for number in range(4)}


async def test_a_call_that_nobody_understands_holds_no_other_one_up():
    host = RoleHost({}, [], NO_LOG)
    host._server = Server()
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(AttributeError):
            await host.call(0, pack(("nothing", ())))
        assert unpack(await host.call(1, pack(("note", ("on",))))) == (True, ["on"])


async def test_a_death_fails_every_call_of_every_rank():
    started = [Here(Ready()), Here(Ready())]
    ranks = ActorRanks("critic", lambda number, world_size: started[number])
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.to_thread(ranks.start, 2)
        waiting = [ranks.call(rank, "hold") for rank in (0, 1)]
        started[1].tell[0](RoleDiedError("critic", "process 1 of critic is gone"))
        for call in [*waiting, ranks.call(0, "note", 1)]:
            with pytest.raises(RoleDiedError, match="process 1 of critic is gone") as died:
                await asyncio.wrap_future(call)
            assert (died.value.role, died.value.rank) == ("critic", 1)
    ranks.close()


class Ready(Server):
    """A server of a rank."""

    def ready(self):
        """Answer."""


# -- engines -----------------------------------------------------------------------------------------------------


def request(name, *, seed=0, tokens=6, key=""):
    return GenerationRequest(name, [1, 2, 3], SamplingParams(tokens), seed=seed, session_key=key)


class Kept:
    """Engines that are kept, and what was done to keep them."""

    def __init__(self, seeds, limit=3):
        self.said, self.lost, self.started = [], [], []
        restarts = RoleRestarts(limit, 0.001, lambda: 0)
        self.engines = [
            KeptProcess(
                "actor_inference", partial(self._start, seed), restarts, self.lost.append, self.said.append
            )
            for seed in seeds
        ]

    async def _start(self, seed):
        process = Here(EngineServer(lambda: sharp_model(seed), 8, 64, 1))
        self.started.append(process)
        return process


async def kept_engines(*seeds, limit=3):
    kept = Kept(seeds, limit)
    for engine in kept.engines:
        await engine.open()
    return kept, RemoteEngines(kept.engines)


async def engines(*seeds):
    return (await kept_engines(*seeds))[1]


async def test_an_engine_elsewhere_says_what_one_here_says_and_takes_new_weights():
    remote, here = await engines(0), TorchEngine(sharp_model(1), max_rows=8, max_length=64)
    async with asyncio.timeout(PATIENCE_S), here:
        first = await remote.generate(request("a"))
        await remote.sync(ModelWeights(sharp_model(1)), 5)
        second, own = await remote.generate(request("a")), await here.generate(request("a"))
        assert second.token_ids == own.token_ids
        assert second.logprobs == pytest.approx(own.logprobs, abs=1e-5)
        assert first.logprobs != pytest.approx(own.logprobs, abs=1e-3)
        assert set(second.policy_versions) == {5}
        assert remote.version == 5
        together = await remote.generate_together([request("b", seed=1), request("c", seed=2)])
        assert [len(reply.token_ids) for reply in together] == [6, 6]
        assert (remote.counters.requests, remote.counters.tokens_generated) == (4, 24)


async def test_weights_come_in_parts_and_those_of_another_model_are_refused(monkeypatch):
    monkeypatch.setattr("rollgym.trainer.cluster.remote_engine._PART_BYTES", 1)
    remote = await engines(0, 0)

    class Lacking(ModelWeights):
        def parameters(self):
            yield from itertools.islice(super().parameters(), 2)

    async with asyncio.timeout(PATIENCE_S):
        await remote.sync(ModelWeights(sharp_model(1)), 1)
        replies = [await remote.generate(request(name, key=name)) for name in ("a", "b")]
        assert replies[0].token_ids == replies[1].token_ids
        with pytest.raises(ValueError, match="do not fit the model"):
            await remote.sync(Lacking(sharp_model(1)), 2)
    assert remote.version == 1


async def test_episodes_stay_with_their_engine_and_new_ones_go_where_there_is_room():
    remote = await engines(0, 0)
    async with asyncio.timeout(PATIENCE_S):
        await asyncio.gather(*(remote.generate(request(key, key=key)) for key in ("a", "b", "c")))
        await remote.generate(request("again", key="b"))
    assert remote._homes == {"a": 0, "b": 1, "c": 0}
    assert [counters.requests for counters in remote._counters] == [2, 2]


async def test_a_reply_that_nobody_waits_for_is_dropped():
    remote = await engines(0)
    (process,) = remote._engines
    async with asyncio.timeout(PATIENCE_S):
        await remote.pause("keep")
        asked = asyncio.ensure_future(remote.generate(request("a")))
        server = (await process.living())._host._server
        while "a" not in server._replies:
            await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        while server._replies:
            await asyncio.sleep(0)
        await remote.resume()
        assert (await remote.generate(request("b"))).finish_reason == "length"
    assert remote.counters.running == 0


async def test_what_an_engine_refuses_arrives_as_it_was_raised():
    remote = await engines(0)
    async with asyncio.timeout(PATIENCE_S):
        with pytest.raises(ValueError, match="pass the longest row of 64"):
            await remote.generate(request("a", tokens=62))


async def test_an_answer_is_what_the_call_came_to():
    process = Here(Server())
    async with asyncio.timeout(PATIENCE_S):
        assert await answer_of(process.call(pack(("note", (torch.ones(2),))))) is not None


# -- engines that die ----------------------------------------------------------------------------------------------


async def test_an_engine_that_dies_is_started_again_with_the_weights_and_what_it_owed_is_drawn_again():
    async with asyncio.timeout(PATIENCE_S):
        kept, remote = await kept_engines(0)
        await remote.sync(ModelWeights(sharp_model(1)), 5)
        expected = await remote.generate(request("a"))
        before = remote.counters
        await remote.pause("keep")
        owed = asyncio.ensure_future(remote.generate(request("a")))
        while not kept.started[0]._host._server._replies:
            await asyncio.sleep(0)
        kept.started[0].die()
        while len(kept.started) < 2 or not kept.engines[0].there:
            await asyncio.sleep(0)
        assert not owed.done(), "the engine that was paused is started again as paused"
        await remote.resume()
        assert await owed == expected
        assert set(expected.policy_versions) == {5}
        assert (remote.counters.requests, remote.counters.resubmitted) == (before.requests + 1, 1)
        assert kept.said[0] == "process 0 of actor_inference is gone"
        assert kept.said[1:] == [
            "actor_inference is started again in 0.001 s (1 of 3)",
            "actor_inference is back",
        ]
        assert not kept.lost


async def test_an_engine_that_dies_while_weights_come_has_them_when_it_is_back(monkeypatch):
    monkeypatch.setattr("rollgym.trainer.cluster.remote_engine._PART_BYTES", 1)
    async with asyncio.timeout(PATIENCE_S):
        kept, remote = await kept_engines(0, 0)

        class Deadly(ModelWeights):
            def parameters(self):
                for place, each in enumerate(super().parameters()):
                    if place == 2:
                        kept.started[1].die()
                    yield each

        await remote.sync(Deadly(sharp_model(1)), 7)
        assert remote.version == 7
        while not kept.engines[1].there:
            await asyncio.sleep(0)
        replies = await asyncio.gather(*(remote.generate(request(name, key=name)) for name in ("a", "b")))
        assert replies[0].token_ids == replies[1].token_ids
        assert {version for reply in replies for version in reply.policy_versions} == {7}
        assert remote._homes == {"a": 0, "b": 1}


async def test_weights_that_were_left_off_are_followed_by_others(monkeypatch):
    monkeypatch.setattr("rollgym.trainer.cluster.remote_engine._PART_BYTES", 1)
    async with asyncio.timeout(PATIENCE_S):
        remote, here = await engines(0), TorchEngine(sharp_model(2), max_rows=8, max_length=64)

        class Torn(ModelWeights):
            def parameters(self):
                yield from itertools.islice(super().parameters(), 2)
                raise RoleDiedError("actor_train", "rank 1 is gone")

        with pytest.raises(RoleDiedError, match="rank 1 is gone"):
            await remote.sync(Torn(sharp_model(1)), 1)
        await remote.start_anew()
        await remote.sync(ModelWeights(sharp_model(2)), 1)
        async with here:
            assert (await remote.generate(request("a"))).token_ids == (
                await here.generate(request("a"))
            ).token_ids


async def test_a_reply_that_is_owed_can_be_ended_while_its_engine_is_away():
    async with asyncio.timeout(PATIENCE_S):
        kept, remote = await kept_engines(0)
        held = asyncio.Event()
        start = kept.engines[0]._start

        async def late():
            await held.wait()
            return await start()

        kept.engines[0]._start = late
        kept.started[0].die()
        await asyncio.sleep(0)
        owed = asyncio.ensure_future(remote.generate(request("a")))
        while "a" not in remote._owed:
            await asyncio.sleep(0)
        assert not (await remote.health()).ready
        assert await remote.abort(["a"]) == 1
        assert (await owed).finish_reason == "abort"
        held.set()
        assert len((await remote.generate(request("b"))).token_ids) == 6


async def test_an_engine_that_keeps_dying_ends_the_run_with_its_role_and_remedy():
    async with asyncio.timeout(PATIENCE_S):
        kept, remote = await kept_engines(0, limit=2)
        owed = asyncio.ensure_future(remote.generate_together([request("a")]))

        async def dying():
            raise RoleDiedError(
                "actor_inference",
                "process 0 of actor_inference on node 10.0.0.7 is gone",
                node="10.0.0.7",
                killed=True,
            )

        kept.engines[0]._start = dying
        kept.started[0].die()
        with pytest.raises(
            RoleLostError, match=r"has died 3 times .*cluster\.restarts 2.*10\.0\.0\.7.*more memory"
        ) as lost:
            await owed
        assert kept.lost == [lost.value]
        assert (lost.value.role, lost.value.node) == ("actor_inference", "10.0.0.7")


async def test_an_engine_whose_machine_is_gone_is_for_the_run_to_place_anew():
    async with asyncio.timeout(PATIENCE_S):
        kept, remote = await kept_engines(0)
        kept.started[0].die(with_its_node=True)
        with pytest.raises(RoleDiedError, match="is gone"):
            await remote.generate(request("a"))
        (lost,) = kept.lost
        assert lost.with_its_node
        assert len(kept.started) == 1


# -- ranks on other machines ---------------------------------------------------------------------------------------


class OtherMachine:
    """A cluster whose node is another machine, which sees nothing of this one's files, or the same."""

    def __init__(self, *, sees):
        self._process = Here(Ready())
        self._process.node, self._process.sees = "10.0.0.7", lambda path: sees and Path(path).exists()

    def start(self, *_):
        return self._process

    def address_of(self, role, device):
        return "10.0.0.7"

    def is_beside(self, device):
        return False


@pytest.mark.parametrize("shared", [True, False])
async def test_a_directory_that_the_ranks_do_not_see_is_refused_before_anything_is_trained(tmp_path, shared):
    (tmp_path / "config.yaml").touch()
    words = [
        "cluster.kind=ray",
        "backend.kind=fsdp2",
        f"output_dir={tmp_path}",
        "tasks=[{env_id: FrozenLake-v0}]",
    ]
    settings = load_settings(None, words)
    restarts = RoleRestarts(3, 1.0, lambda: 0)
    roles = RayRoles(settings, place_roles(settings), OtherMachine(sees=shared), restarts, print, print)
    async with asyncio.timeout(PATIENCE_S):
        ranks = roles.ranks("actor_train")
        if shared:
            await asyncio.to_thread(ranks.start, 1)
            ranks.close()
        else:
            with pytest.raises(
                ConfigError, match=r"is not the same folder on node 10\.0\.0\.7, where a rank of"
            ):
                await asyncio.to_thread(ranks.start, 1)


async def test_environments_in_actors_are_brought_the_modules_that_the_run_brings(tmp_path):
    words = ["cluster.kind=ray", "backend.kind=fsdp2", "tasks=[{env_id: FrozenLake-v0}]"]
    words += ["cluster.roles.environment={actors: 2}", f"cluster.working_dir={tmp_path}"]
    settings, machine = load_settings(None, words), OtherMachine(sees=True)
    machine.address = "10.0.0.1:6379"
    roles = RayRoles(settings, place_roles(settings), machine, RoleRestarts(3, 1.0, lambda: 0), print, print)
    arguments = server_parser().parse_args(roles.server_arguments())
    assert arguments.ray_working_dir == str(tmp_path)


async def test_a_cluster_whose_head_is_gone_ends_the_run_and_is_asked_to_end_nothing(tmp_path, monkeypatch):
    monkeypatch.setattr("rollgym.trainer.cluster.roles._LOOK_AT_HEAD_EVERY_S", 0.0)

    class Headless(OtherMachine):
        address = "10.0.0.1:6379"
        answers = iter([True, False, False, True, False, False, False, False])

        async def head_answers(self):
            return next(self.answers)

    words = [
        "cluster.kind=ray",
        "backend.kind=fsdp2",
        f"output_dir={tmp_path}",
        "tasks=[{env_id: FrozenLake-v0}]",
    ]
    settings, lost = load_settings(None, words), []
    restarts = RoleRestarts(3, 1.0, lambda: 0)
    roles = RayRoles(settings, place_roles(settings), Headless(sees=True), restarts, lost.append, print)
    async with asyncio.timeout(PATIENCE_S):
        ranks = roles.ranks("actor_train")
        await asyncio.to_thread(ranks.start, 1)
        roles._processes[0].end = lambda: pytest.fail("Ray would be asked, and not answer")
        await roles.watch_head()
        ranks.close()
        (error,) = lost
        assert "the head of the Ray cluster at 10.0.0.1:6379 is gone" in str(error)
        assert "ray start --head" in str(error)
        await roles.close()
