"""The manifest for Kubernetes is one that the KubeRay operator takes, and what it runs is a run.

The fields are those of `RayJob` and `RayCluster` of ray.io/v1, written down from the operator's types; anything else is
refused, as a server-side check of the custom resources refuses it.
"""

from pathlib import Path
from typing import Any, Literal

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer.cluster.placement import place_roles
from trainer.config.load import load_settings
from trainer.config.run import RunSettings

MANIFEST = Path(__file__).parents[1] / "examples" / "kuberay" / "frozen_lake.yaml"


class Strict(BaseModel):
    """Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Metadata(Strict):
    name: str = Field(pattern=r"^[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?$")
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Mount(Strict):
    name: str
    mountPath: str = Field(pattern="^/")  # noqa: N815 - Kubernetes' own name


class Resources(Strict):
    requests: dict[str, str] = {}
    limits: dict[str, str] = {}


class Container(Strict):
    name: str
    image: str
    resources: Resources
    volumeMounts: list[Mount] = []  # noqa: N815
    env: list[dict[str, Any]] = []


class Volume(Strict):
    name: str
    persistentVolumeClaim: dict[Literal["claimName", "readOnly"], Any] | None = None  # noqa: N815
    configMap: dict[Literal["name", "items"], Any] | None = None  # noqa: N815


class PodSpec(Strict):
    containers: list[Container] = Field(min_length=1)
    volumes: list[Volume] = []


class PodTemplate(Strict):
    metadata: dict[str, Any] = {}
    spec: PodSpec


class HeadGroup(Strict):
    serviceType: str | None = None  # noqa: N815
    enableIngress: bool | None = None  # noqa: N815
    rayStartParams: dict[str, str]  # noqa: N815
    template: PodTemplate


class WorkerGroup(Strict):
    groupName: str  # noqa: N815
    replicas: int = Field(0, ge=0)
    minReplicas: int = Field(ge=0)  # noqa: N815
    maxReplicas: int = Field(ge=0)  # noqa: N815
    numOfHosts: int = Field(1, ge=1)  # noqa: N815
    rayStartParams: dict[str, str]  # noqa: N815
    template: PodTemplate


class RayClusterSpec(Strict):
    headGroupSpec: HeadGroup  # noqa: N815
    workerGroupSpecs: list[WorkerGroup] = []  # noqa: N815
    rayVersion: str  # noqa: N815
    enableInTreeAutoscaling: bool | None = None  # noqa: N815


class RayJobSpec(Strict):
    activeDeadlineSeconds: int | None = Field(None, gt=0)  # noqa: N815
    backoffLimit: int = Field(0, ge=0)  # noqa: N815
    rayClusterSpec: RayClusterSpec  # noqa: N815
    metadata: dict[str, str] = {}
    entrypoint: str = Field(min_length=1)
    runtimeEnvYAML: str = ""  # noqa: N815
    jobId: str = ""  # noqa: N815
    submissionMode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode"] = "K8sJobMode"  # noqa: N815
    entrypointNumCpus: float = 0.0  # noqa: N815
    entrypointNumGpus: float = 0.0  # noqa: N815
    ttlSecondsAfterFinished: int = Field(0, ge=0)  # noqa: N815
    shutdownAfterJobFinishes: bool = False  # noqa: N815
    suspend: bool = False


class RayJob(Strict):
    apiVersion: Literal["ray.io/v1"]  # noqa: N815
    kind: Literal["RayJob"]
    metadata: Metadata
    spec: RayJobSpec


@pytest.fixture
def documents() -> dict[str, dict[str, Any]]:
    return {each["kind"]: each for each in yaml.safe_load_all(MANIFEST.read_text())}


def settings_of(documents: dict[str, dict[str, Any]], tmp_path: Path) -> RunSettings:
    (tmp_path / "run.yaml").write_text(documents["ConfigMap"]["data"]["run.yaml"])
    return load_settings(tmp_path / "run.yaml")


def test_the_job_is_one_that_the_operator_takes(documents):
    job = RayJob.model_validate(documents["RayJob"])
    for group in (job.spec.rayClusterSpec.headGroupSpec, *job.spec.rayClusterSpec.workerGroupSpecs):
        volumes = {volume.name for volume in group.template.spec.volumes}
        for container in group.template.spec.containers:
            assert {mount.name for mount in container.volumeMounts} <= volumes
    head, *workers = (job.spec.rayClusterSpec.headGroupSpec, *job.spec.rayClusterSpec.workerGroupSpecs)
    claims = {
        documents["PersistentVolumeClaim"]["metadata"]["name"],
        documents["ConfigMap"]["metadata"]["name"],
    }
    for group in (head, *workers):
        for volume in group.template.spec.volumes:
            source = volume.persistentVolumeClaim or volume.configMap
            assert set(source.values()) <= claims, "what is mounted is declared beside it"


@pytest.mark.parametrize(
    "path", ["entrypont", "rayClusterSpec.headGroup", "rayClusterSpec.workerGroupSpecs.0.name"]
)
def test_a_field_that_there_is_none_of_is_refused(documents, path):
    node = documents["RayJob"]["spec"]
    *parents, last = path.split(".")
    for name in parents:
        node = node[int(name)] if isinstance(node, list) else node[name]
    node[last] = "x"
    with pytest.raises(ValidationError, match="Extra inputs are not permitted"):
        RayJob.model_validate(documents["RayJob"])


def test_the_run_fits_the_nodes(documents, tmp_path):
    settings = settings_of(documents, tmp_path)
    placement = place_roles(settings)
    (workers,) = RayJob.model_validate(documents["RayJob"]).spec.rayClusterSpec.workerGroupSpecs
    (container,) = workers.template.spec.containers
    assert placement.nodes == workers.replicas
    assert str(placement.devices_per_node) == container.resources.limits["nvidia.com/gpu"]
    assert int(container.resources.limits["cpu"]) >= placement.devices_per_node
    assert settings.cluster.address == "auto"
    assert settings.checkpoint.resume == "auto", "a driver that is submitted again goes on"
    assert any(settings.output_dir.startswith(mount.mountPath) for mount in container.volumeMounts)
    assert "/config/run.yaml" in documents["RayJob"]["spec"]["entrypoint"]
