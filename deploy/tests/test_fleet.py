"""The fleet of compose.yaml on a real Docker Engine; `.ci/compose` starts it and runs this."""

import socket
from pathlib import Path

import httpx
import pytest

from deploy.tests.fleet import Fleet, eventually
from rollgym import RemoteEnv
from rollgym.envs.registry import builtin_environments
from tests.support.processes import read_lines, start_training, train

TRAINING = str(Path(__file__).with_name("training.yaml"))
SERVICES = ("gateway", "environments", "sandbox", "guess", "guess-registration", "prometheus")
OURS = tuple(builtin_environments())


def test_the_gateway_offers_what_nodes_and_third_parties_have(fleet: Fleet) -> None:
    expected = {**dict.fromkeys(OURS, 2), "Guess": 1}
    assert eventually(lambda: fleet.replicas() == expected), fleet.replicas()


def test_an_environment_in_another_language_is_played(fleet: Fleet) -> None:
    env = RemoteEnv(fleet.url, "Guess", token=fleet.token)
    for seed in range(10):
        observation, info = env.reset(seed=seed)
        assert observation == "Guess a number from 0 to 9."
        observation, reward, terminated, _, info = env.step(str(seed))
        assert (observation, reward, terminated, info["success"]) == ("Right.", 1.0, True, True)
    env.close()


def test_a_node_that_is_told_to_stop_leaves_first(fleet: Fleet) -> None:
    leaving, staying = fleet.containers("environments")
    fleet.signal(leaving, "TERM")
    # Without a word the gateway would miss its heartbeats after a minute.
    assert eventually(lambda: fleet.replicas()["FrozenLake-v0"] == 1, 20)
    assert eventually(lambda: fleet.containers("environments") == [staying], 20)
    assert fleet.inspect(leaving)["State"]["ExitCode"] == 0
    fleet.scale(2)
    assert eventually(lambda: fleet.replicas()["FrozenLake-v0"] == 2)


def test_a_node_that_crashes_is_started_again(fleet: Fleet) -> None:
    crashing = fleet.containers("environments")[0]
    # From within and all but the first process: what `docker kill` ended, Docker leaves alone.
    fleet.inside(crashing, "sh", "-c", "kill -9 -1; true")
    assert eventually(lambda: fleet.inspect(crashing)["RestartCount"] == 1)
    assert eventually(lambda: fleet.inspect(crashing)["State"].get("Health", {}).get("Status") == "healthy")


def test_a_gateway_that_is_started_anew_goes_on_with_its_sessions(fleet: Fleet) -> None:
    env = RemoteEnv(fleet.url, "FrozenLake-v0", {"size": 4}, token=fleet.token)
    env.reset(seed=5)
    env.step("Right")
    fleet.compose("restart", "gateway")
    assert env.step("Right")[4]["state"] is not None
    assert env.session.step_index == 2
    env.close()
    assert eventually(lambda: fleet.replicas().get("FrozenLake-v0") == 2)
    # The third party is registered again: what registers it ends without its registration, and is started again.
    assert eventually(lambda: fleet.replicas().get("Guess") == 1)


def test_nodes_are_replaced_while_an_episode_goes_on(fleet: Fleet) -> None:
    env = RemoteEnv(fleet.url, "FrozenLake-v0", {"size": 4}, token=fleet.token)
    env.reset(seed=5)
    env.step("Left")
    old = fleet.containers("environments")
    fleet.scale(2 * len(old))
    assert eventually(lambda: fleet.replicas()["FrozenLake-v0"] == 2 * len(old))
    fleet.remove(*old)
    env.step("Left")
    assert env.session.step_index == 2
    env.close()
    assert not set(old) & set(fleet.containers("environments"))
    assert eventually(lambda: fleet.replicas()["FrozenLake-v0"] == len(old))


def test_training_is_the_same_step_by_step_though_a_node_is_killed(fleet: Fleet, tmp_path: Path) -> None:
    train("--config", TRAINING, f"output_dir={tmp_path}/undisturbed")
    expected = read_lines(tmp_path / "undisturbed" / "digests.jsonl")
    assert len({line["weights"] for line in expected}) == len(expected), "every step must change the weights"

    nodes = fleet.containers("environments")
    run = start_training("--config", TRAINING, "--env-url", fleet.url, f"output_dir={tmp_path}/disturbed")
    assert run.stdout is not None
    for line in run.stdout:
        if "step 4:" in line:
            fleet.signal(nodes[0], "KILL")
            assert len(read_lines(tmp_path / "disturbed" / "digests.jsonl")) < len(expected)
    assert run.wait(120) == 0
    assert fleet.containers("environments") == nodes[1:]
    assert read_lines(tmp_path / "disturbed" / "digests.jsonl") == expected


@pytest.mark.parametrize("service", SERVICES)
def test_a_container_may_do_nothing_that_it_does_not_need(fleet: Fleet, service: str) -> None:
    container = fleet.containers(service)[0]
    host = fleet.inspect(container)["HostConfig"]
    assert host["ReadonlyRootfs"]
    assert host["Init"]
    assert 0 < host["Memory"] == host["MemorySwap"]
    assert host["NanoCpus"] > 0
    assert host["PidsLimit"] > 0
    assert host["RestartPolicy"]["Name"] == "unless-stopped"
    assert host["LogConfig"]["Config"]["max-size"] == "10m"
    status = dict(
        line.split(":\t", 1) for line in fleet.inside(container, "cat", "/proc/self/status").splitlines()
    )
    assert "0" not in status["Uid"].split()
    assert int(status["CapBnd"], 16) == int(status["CapEff"], 16) == 0
    assert status["NoNewPrivs"] == "1"
    assert status["Seccomp"] == "2"


def test_only_what_a_person_uses_is_published_and_only_to_this_machine(fleet: Fleet) -> None:
    published = {}
    for service in SERVICES:
        ports = fleet.inspect(fleet.containers(service)[0])["NetworkSettings"]["Ports"]
        published[service] = [entry["HostIp"] for bound in ports.values() for entry in bound or ()]
    assert published == {
        "gateway": ["127.0.0.1"],
        "environments": [],
        "sandbox": [],
        "guess": [],
        "guess-registration": [],
        "prometheus": ["127.0.0.1"],
    }


def test_nodes_and_third_parties_see_the_gateway_and_nothing_else(fleet: Fleet) -> None:
    networks = {service: set(fleet.networks(fleet.containers(service)[0])) for service in SERVICES}
    assert networks == {
        "gateway": {"published", "nodes", "third-parties", "gateways"},
        "environments": {"nodes", "programs"},
        "sandbox": {"programs"},
        "guess": {"third-parties"},
        "guess-registration": {"third-parties"},
        "prometheus": {"nodes", "programs", "monitoring"},
    }
    # The index that the image's packages came from: the gateway's network leads there, the others lead nowhere.
    outside = socket.gethostbyname("pypi.org")
    connect = f"import socket; socket.create_connection(('{outside}', 443), timeout=3)"
    fleet.inside(fleet.containers("gateway")[0], "python", "-c", connect)
    for service in ("environments", "sandbox", "guess-registration"):
        with pytest.raises(AssertionError, match=r"(Network is unreachable|timed out)"):
            fleet.inside(fleet.containers(service)[0], "python", "-c", connect)


def test_each_token_opens_what_it_is_for(fleet: Fleet) -> None:
    assert fleet.get("/v1/envs", None).status_code == 401
    assert fleet.get("/metrics", fleet.token).status_code == 403
    registration = {"env_id": "Mine", "url": "http://guess:9000", "protocol": "http"}
    answer = httpx.post(
        f"{fleet.url}/v1/envs", json=registration, headers={"Authorization": f"Bearer {fleet.token}"}
    )
    assert answer.status_code == 403
    node = fleet.containers("environments")[0]
    known = ["play", "register", "sandbox", "tokens.yaml"]
    assert sorted(fleet.inside(node, "ls", "/run/tokens").split()) == known
    gateway = fleet.containers("gateway")[0]
    assert fleet.inside(gateway, "ls", "/run/tokens").split() == ["tokens.yaml"]
    # A node's token registers environments, and plays nothing.
    register = fleet.inside(node, "cat", "/run/tokens/register").strip()
    assert fleet.get("/v1/envs", register).status_code == 403


def test_tokens_are_made_once(fleet: Fleet) -> None:
    assert "the tokens are there" in fleet.compose("run", "--rm", "-T", "tokens")
