"""The manifests of the fleet fit each other and the package; `.ci/kubernetes` checks them against schemas."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.make_tokens import make_tokens
from rollgym.env_server.cli import server_parser
from rollgym.env_server.common.settings_loading import load_settings

ROOT = Path(__file__).parents[2]
BASE = ROOT / "deploy" / "kubernetes" / "base"
OVERLAY = ROOT / "deploy" / "kubernetes" / "overlays" / "example"
KUSTOMIZATION = yaml.safe_load((BASE / "kustomization.yaml").read_text())
EXAMPLE = yaml.safe_load((OVERLAY / "kustomization.yaml").read_text())
OBJECTS: list[dict[str, Any]] = [
    each for name in KUSTOMIZATION["resources"] for each in yaml.safe_load_all((BASE / name).read_text())
]
SERVERS = ("gateway", "node", "sandbox")


def of_kind(*kinds: str) -> dict[str, dict[str, Any]]:
    """Objects of some kinds by their names."""
    return {each["metadata"]["name"]: each for each in OBJECTS if each["kind"] in kinds}


WORKLOADS = of_kind("Deployment", "StatefulSet")
PODS = {
    each["metadata"]["labels"]["app.kubernetes.io/name"]: each
    for each in (workload["spec"]["template"] for workload in WORKLOADS.values())
}


def container(name: str) -> dict[str, Any]:
    (found,) = PODS[name]["spec"]["containers"]
    return found


def generated(kustomization: dict[str, Any], kind: str) -> dict[str, list[str]]:
    """What a generator makes: its files by its name."""
    return {each["name"]: each["files"] for each in kustomization[kind]}


def mounted(name: str) -> Iterator[str]:
    """The paths of the files that a server's container sees."""
    config, tokens = generated(KUSTOMIZATION, "configMapGenerator"), generated(EXAMPLE, "secretGenerator")
    volumes = {each["name"]: each for each in PODS[name]["spec"]["volumes"]}
    for mount in container(name)["volumeMounts"]:
        volume = volumes[mount["name"]]
        files = config.get(volume.get("configMap", {}).get("name"), []) + tokens.get(
            volume.get("secret", {}).get("secretName"), []
        )
        yield from (f"{mount['mountPath']}/{Path(file).name}" for file in files)


def matches(selector: dict[str, Any], labels: dict[str, str]) -> bool:
    expected = selector.get("matchLabels", {}).items()
    chosen = all(
        each["operator"] == "In" and labels.get(each["key"]) in each["values"]
        for each in selector.get("matchExpressions", ())
    )
    return chosen and all(labels.get(key) == value for key, value in expected)


def test_the_base_lists_every_manifest_and_every_file_that_it_lists_is_there():
    others = {"kustomization.yaml"}
    assert set(KUSTOMIZATION["resources"]) == {path.name for path in BASE.glob("*.yaml")} - others
    for files in generated(KUSTOMIZATION, "configMapGenerator").values():
        assert all((BASE / file).is_file() for file in files)
    assert {path.relative_to(BASE).as_posix() for path in (BASE / "config").iterdir()} == {
        file for files in generated(KUSTOMIZATION, "configMapGenerator").values() for file in files
    }
    assert all((OVERLAY / name).exists() for name in EXAMPLE["resources"])
    assert all((OVERLAY / patch["path"]).is_file() for patch in EXAMPLE["patches"])


def test_names_are_unique_and_a_patch_names_what_is_there():
    names = [(each["kind"], each["metadata"]["name"]) for each in OBJECTS]
    assert len(set(names)) == len(names)
    for patch in EXAMPLE["patches"]:
        changed = yaml.safe_load((OVERLAY / patch["path"]).read_text())
        assert (changed["kind"], changed["metadata"]["name"]) in names


def test_the_example_names_every_image():
    images = {each["name"] for each in EXAMPLE["images"]}
    assert images == {container(name)["image"] for name in PODS}


@pytest.mark.parametrize("name", SERVERS)
def test_a_command_is_one_that_the_server_understands_and_its_files_are_mounted(name):
    program, *words = container(name)["command"]
    assert program == "roll-serve"
    flags = vars(server_parser().parse_args(words))
    config = flags.pop("config")
    files = set(mounted(name))
    assert str(config) in files
    settings = load_settings(flags, BASE / "config" / Path(config).name)
    assert (settings.host, settings.port) == ("0.0.0.0", container(name)["ports"][0]["containerPort"])
    read = [settings.token_file, settings.register_token_file, settings.node_token_file]
    assert {str(path) for path in read if path is not None} <= files
    if "token_file=" in str(settings.sandbox):
        assert settings.sandbox.partition("token_file=")[2] in files
    grace_s = PODS[name]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > settings.drain_grace_s + 10


def test_nodes_register_with_every_gateway_by_a_name_that_the_cluster_gives_it():
    node = load_settings({}, BASE / "config" / "node.yaml")
    gateway = WORKLOADS["gateway"]["spec"]
    service = of_kind("Service")[gateway["serviceName"]]["spec"]
    assert list(map(str, node.register_with)) == [
        f"http://gateway-{index}.{gateway['serviceName']}:8000" for index in range(gateway["replicas"])
    ]
    assert service["clusterIP"] == "None"
    assert service["publishNotReadyAddresses"], "a gateway is not ready before it has nodes"


def test_addresses_in_the_settings_are_services():
    services = of_kind("Service")
    gateway = load_settings({}, BASE / "config" / "gateway.yaml")
    assert gateway.journal_url is not None
    assert (
        gateway.journal_url.get_secret_value()
        == f"redis://journal:{services['journal']['spec']['ports'][0]['port']}/0"
    )
    node = load_settings({}, BASE / "config" / "node.yaml")
    assert node.sandbox.startswith(
        f"remote:http://sandbox:{services['sandbox']['spec']['ports'][0]['port']}?"
    )


def test_every_selector_finds_pods():
    labels = [pod["metadata"]["labels"] for pod in PODS.values()]
    for service in of_kind("Service").values():
        assert any(matches({"matchLabels": service["spec"]["selector"]}, each) for each in labels)
        ports = {port["targetPort"] for port in service["spec"]["ports"]}
        assert all(
            ports <= {port["name"] for port in container(each["app.kubernetes.io/name"])["ports"]}
            for each in labels
            if matches({"matchLabels": service["spec"]["selector"]}, each)
        )
    for name, workload in WORKLOADS.items():
        assert matches(workload["spec"]["selector"], workload["spec"]["template"]["metadata"]["labels"]), name
    for budget in of_kind("PodDisruptionBudget").values():
        assert any(matches(budget["spec"]["selector"], each) for each in labels)


def test_the_autoscaler_decides_how_many_nodes_there_are():
    (scaler,) = of_kind("HorizontalPodAutoscaler").values()
    target = WORKLOADS[scaler["spec"]["scaleTargetRef"]["name"]]
    assert target["kind"] == scaler["spec"]["scaleTargetRef"]["kind"]
    assert "replicas" not in target["spec"], "each deployment would take back what the autoscaler did"
    assert "cpu" in target["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"]
    assert scaler["spec"]["behavior"]["scaleDown"]["stabilizationWindowSeconds"] >= 300


def allowed(source: str, target: str) -> bool:
    """Whether the policies let pods of one kind open connections to those of another."""
    common = {"app.kubernetes.io/part-of": "rollgym"}
    labels = {name: pod["metadata"]["labels"] | common for name, pod in PODS.items()}
    policies = [policy["spec"] for policy in of_kind("NetworkPolicy").values()]
    ways = []
    for place, peer, direction, word in (
        (source, target, "egress", "to"),
        (target, source, "ingress", "from"),
    ):
        rules = [
            rule
            for policy in policies
            if matches(policy["podSelector"], labels[place])
            for rule in policy.get(direction, ())
        ]
        ways.append(
            any(
                "podSelector" in each and matches(each["podSelector"], labels[peer])
                for rule in rules
                for each in rule[word]
            )
        )
    return all(ways)


def test_each_pod_reaches_those_that_it_needs_and_no_other():
    reached = {(source, target) for source in PODS for target in PODS if allowed(source, target)}
    assert reached == {
        ("gateway", "node"),
        ("gateway", "journal"),
        ("node", "gateway"),
        ("node", "sandbox"),
    }
    nothing = of_kind("NetworkPolicy")["nothing"]["spec"]
    assert nothing["policyTypes"] == ["Ingress", "Egress"]
    assert {"ingress", "egress"}.isdisjoint(nothing)


@pytest.mark.parametrize("name", ["gateway", "node", "sandbox", "journal"])
def test_pods_have_no_rights(name):
    pod, server = PODS[name]["spec"], container(name)
    assert pod["securityContext"]["runAsNonRoot"]
    assert pod["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    assert pod["automountServiceAccountToken"] is False
    assert server["securityContext"] == {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }
    assert {"cpu", "memory"} == set(server["resources"]["limits"]) == set(server["resources"]["requests"])
    assert "readinessProbe" in server
    assert "livenessProbe" in server


def test_the_tokens_that_the_example_takes_are_those_that_are_made(tmp_path):
    command = [sys.executable, str(ROOT / "deploy" / "make_tokens.py"), str(tmp_path / "tokens")]
    said = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True)
    assert said.stdout == "tokens were made\n"
    for files in generated(EXAMPLE, "secretGenerator").values():
        for file in files:
            assert (tmp_path / file.rpartition("=")[2]).is_file(), file
    assert not make_tokens(tmp_path / "tokens"), "they are made once"
    ignored = (OVERLAY.parent / ".gitignore").read_text().splitlines()
    assert "tokens/" in ignored
