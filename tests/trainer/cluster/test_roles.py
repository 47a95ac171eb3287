"""Servers and judges as actors on the nodes of a cluster: where they answer, and what becomes of those that die."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path

import httpx
import pytest

from rollgym.clients.client.client import EnvClient
from rollgym.trainer.cluster.cluster import open_cluster
from rollgym.trainer.cluster.placement import place_roles
from rollgym.trainer.cluster.server_host import InferenceProgram
from rollgym.trainer.cluster.supervision import RoleRestarts
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.core.embedded_server import embedded_server
from rollgym.trainer.core.errors import ConfigError, RoleDiedError
from rollgym.trainer.inference.servers.dialect import ServedModel
from rollgym.trainer.run.judges import open_judges
from tests.support.processes import ROOT
from tests.support.tiny_models import sharp_model

pytestmark = pytest.mark.slow

pytest.importorskip("ray")

PATIENCE_S = 240
RAY = ["cluster.kind=ray", "backend.kind=fsdp2", "tasks=[{env_id: FrozenLake-v0}]", "model.device=cpu"]
JUDGE = [sys.executable, "-m", "tests.support.judge_program", "{host}", "{port}"]
_PROCESS = re.compile(r"^process (\d+) on ", re.MULTILINE)


def judge_of(name, device, *gate):
    return (
        f"cluster.roles.judges.{name}={{devices: {device}, model: m, command: {[*JUDGE, *map(str, gate)]}}}"
    )


class Opened:
    """A cluster that is open, and what was said and lost."""

    def __init__(self, words):
        self.settings = load_settings(None, [*RAY, *words])
        self.said, self.lost = [], []

    @asynccontextmanager
    async def cluster(self):
        restarts = RoleRestarts(3, 0.01, lambda: 0)
        placement = place_roles(self.settings)
        async with asyncio.timeout(PATIENCE_S):
            async with open_cluster(
                self.settings, placement, self.lost.append, self.said.append, restarts
            ) as cluster:
                yield cluster


def process_of(run: Path, name: str) -> int:
    return int(_PROCESS.findall((run / "ranks" / f"{name}.log").read_text())[-1])


def lives(process: int) -> bool:
    return Path(f"/proc/{process}").exists()


def node_of(url: str) -> str:
    return url.removeprefix("http://").partition(":")[0]


async def comes_back(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False) as client:
        while True:
            try:
                if (await client.get(f"{url}/health")).status_code == 200:
                    return
            except httpx.HTTPError:
                await asyncio.sleep(0.05)


async def test_servers_and_judges_answer_on_their_nodes_and_come_back_where_they_were(ray_cluster, tmp_path):
    run, model = tmp_path / "run", tmp_path / "model"
    sharp_model().save_pretrained(model)
    busy, idle = tmp_path / "busy", tmp_path / "idle"
    idle.touch()
    program = [sys.executable, "-m", "tests.support.vllm_program"]
    opened = Opened(
        [
            f"cluster.address={ray_cluster.address}",
            f"output_dir={run}",
            "cluster.nodes=2",
            "cluster.devices_per_node=4",
            "tasks=[{env_id: Busy}, {env_id: Idle}]",
            "inference={kind: vllm, launch: {count: 1, tensor_parallel: 2}}",
            "cluster.roles.actor_inference.devices=4-5",
            judge_of("Busy", 2, busy),
            judge_of("Idle", 6, idle),
        ]
    )
    launch = opened.settings.inference.launch.model_copy(update={"command": program})
    async with AsyncExitStack() as stack:
        cluster = await stack.enter_async_context(opened.cluster())
        serve = lambda served, words: partial(embedded_server, words=words)(served)  # noqa: E731
        brought, urls = await asyncio.gather(
            open_judges(opened.settings, cluster, serve, stack, opened.said.append),
            cluster.servers(InferenceProgram(opened.settings.inference, launch, ServedModel(model, 64))),
        )
        (url,) = urls
        judges = [text.split(" answers on ")[1] for text in opened.said if text.startswith("judge ")]
        assert {node_of(each) for each in (url, *judges)} == {"127.0.0.2", "127.0.0.3"}, (
            "not where the driver is"
        )
        assert node_of(url) == node_of(judges[1]) != node_of(judges[0])
        assert await cluster.servers(None) == urls, "asked again, it gives those that there are"

        # More than one server has threads for: all of them wait for the judge that is busy.
        task = {"question": "What is the capital of Peru?", "reference": "Lima", "response": "Lima"}
        clients = [await stack.enter_async_context(EnvClient(each.url)) for each in brought.tasks]
        waiting = asyncio.ensure_future(clients[0].verify("Busy", [task] * 40))
        while not busy.with_name("busy.asked").exists():
            await asyncio.sleep(0.01)
        assert [verdict.score for verdict in await clients[1].verify("Idle", [task])] == [1.0]
        assert not waiting.done()
        busy.touch()
        assert {verdict.score for verdict in await waiting} == {1.0}

        before = {name: process_of(run, name) for name in ("actor_inference_0", "Idle_0")}
        for process in before.values():
            os.kill(process, signal.SIGKILL)
        while sum(" is back" in text for text in opened.said) < len(before):
            await asyncio.sleep(0.01)
        await asyncio.gather(comes_back(url), comes_back(judges[1]))
        assert [verdict.score for verdict in await clients[1].verify("Idle", [task])] == [1.0]
        assert all(process_of(run, name) != process for name, process in before.items())
        assert not opened.lost


def test_a_cluster_whose_head_does_not_answer_is_left_as_it_is(tmp_path, monkeypatch):
    from rollgym.trainer.cluster import ray_runtime
    from rollgym.trainer.cluster.supervision import Disconnection

    answers = threading.Event()
    monkeypatch.setattr(ray_runtime.ray, "shutdown", answers.wait)
    monkeypatch.setattr(ray_runtime, "_LEAVE_TIMEOUT_S", 0.0)
    cluster = ray_runtime.RayCluster(None, 1.0, None, tmp_path)
    with socket.create_server(("127.0.0.1", 0)) as head:
        cluster._reached_at = f"127.0.0.1:{head.getsockname()[1]}"
        assert cluster.disconnect() is Disconnection.UNANSWERED, "it stands still"
        answers.set()
        monkeypatch.setattr(ray_runtime, "_LEAVE_TIMEOUT_S", 60.0)
        assert cluster.disconnect() is Disconnection.IN_ORDER
    monkeypatch.setattr(ray_runtime.ray, "shutdown", lambda: pytest.fail("nobody is there to be asked"))
    assert cluster.disconnect() is Disconnection.UNANSWERED, "it is gone"


async def test_devices_that_no_node_has_are_named_with_what_the_cluster_has(ray_cluster, tmp_path):
    words = [
        f"cluster.address={ray_cluster.address}",
        f"output_dir={tmp_path}",
        "cluster.devices_per_node=32",
    ]
    opened = Opened([*words, "cluster.start_timeout_s=0.5"])
    with pytest.raises(
        ConfigError, match=r"1 node with 32 CPU each was not to be had .*4 CPU on 127\.0\.0\.2"
    ):
        async with opened.cluster():
            pass
    await asyncio.sleep(0)
    assert any(
        "the roles need 1 node with 32 CPU each, and the cluster has 0 so large" in text
        for text in opened.said
    )


async def test_a_node_that_is_lost_is_told_of_and_nothing_is_started_there_again(ray_cluster, tmp_path):
    node = ray_cluster.add_node(num_cpus=8, node_ip_address="127.0.0.4")
    words = [f"cluster.address={ray_cluster.address}", f"output_dir={tmp_path}", "cluster.devices_per_node=8"]
    opened = Opened([*words, "tasks=[{env_id: Rubric}]", judge_of("Rubric", 1)])
    async with opened.cluster() as cluster:
        assert node_of(await cluster.judge("Rubric")) == "127.0.0.4"
        ray_cluster.remove_node(node, allow_graceful=False)
        while not opened.lost:
            await asyncio.sleep(0.01)
    (lost,) = opened.lost
    assert isinstance(lost, RoleDiedError)
    assert (lost.role, lost.node, lost.with_its_node) == ("Rubric", "127.0.0.4", True)


DRIVER = """
import asyncio, sys
from rollgym.trainer.cluster.cluster import open_cluster
from rollgym.trainer.cluster.placement import place_roles
from rollgym.trainer.config.load import load_settings

async def main():
    settings = load_settings(None, sys.argv[1:])
    opening = open_cluster(settings, place_roles(settings), print, print)
    async with opening as cluster:
        print("judge on", await cluster.judge("Rubric"), flush=True)
        await asyncio.sleep(3600)

asyncio.run(main())
"""


async def test_no_actor_survives_a_driver_that_is_killed(ray_cluster, tmp_path):
    words = [*RAY, "tasks=[{env_id: Rubric}]", judge_of("Rubric", 1)]
    words += [f"cluster.address={ray_cluster.address}", f"output_dir={tmp_path}"]
    driver = await asyncio.create_subprocess_exec(
        sys.executable, "-c", DRIVER, *words, stdout=subprocess.PIPE, cwd=ROOT
    )
    try:
        async with asyncio.timeout(PATIENCE_S):
            async for line in driver.stdout:
                if line.startswith(b"judge on"):
                    break
            url = line.decode().split()[-1]
            actor = process_of(tmp_path, "Rubric_0")
            driver.kill()
            await driver.wait()
            while lives(actor):
                await asyncio.sleep(0.02)
            async with httpx.AsyncClient(trust_env=False) as client:
                while True:
                    try:
                        await client.get(f"{url}/health")
                    except httpx.HTTPError:
                        break
                    await asyncio.sleep(0.02)
    finally:
        if driver.returncode is None:
            driver.kill()
            await driver.wait()
