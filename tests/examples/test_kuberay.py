"""The manifest for Kubernetes is one that the KubeRay operator takes, and what it runs is a run.

The fields are those of `RayJob` and `RayCluster` of ray.io/v1, and the rules those that the operator holds them to
before it starts anything (KubeRay's `raycluster_types.go`, `rayjob_types.go` and `validation.go`), written down by
hand: no Python package that was found brings the schema, and no Kubernetes server has looked at it. Of pods there is
what the manifest uses. Anything else is refused, as the schema of the custom resources has a server refuse it.
"""

import re
from pathlib import Path
from typing import Annotated, Any, Literal, Self

import pytest
import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from rollgym.trainer.cluster.placement import place_roles
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.config.run import RunSettings

LONGEST_NAME = 47
"""Of a RayJob: names that are made of it have room for what is added."""

MANIFEST = Path(__file__).parents[2] / "examples" / "kuberay" / "frozen_lake.yaml"


class Strict(BaseModel):
    """Unknown fields are refused."""

    model_config = ConfigDict(extra="forbid", strict=True)


Quantity = Annotated[str, Field(pattern=r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$")]
"""What Kubernetes counts memory, processors and devices in."""


class Metadata(Strict):
    name: str = Field(pattern=r"^[a-z]([-a-z0-9]{0,61}[a-z0-9])?$")
    labels: dict[str, str] = {}
    annotations: dict[str, str] = {}


class Mount(Strict):
    name: str
    mountPath: str = Field(pattern="^/")  # noqa: N815 - Kubernetes' own name


class Resources(Strict):
    requests: dict[str, Quantity] = {}
    limits: dict[str, Quantity] = {}

    @model_validator(mode="after")
    def _devices_are_not_overcommitted(self) -> Self:
        for name in {*self.requests, *self.limits}:
            if "/" in name and self.requests.get(name, self.limits.get(name)) != self.limits.get(name):
                raise ValueError(f"{name}: requests and limits of a device must be equal")
        return self


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
    submissionMode: Literal["K8sJobMode", "HTTPMode", "InteractiveMode", "SidecarMode"] = "K8sJobMode"  # noqa: N815
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

    @model_validator(mode="after")
    def _the_operator_starts_it(self) -> Self:
        spec, cluster = self.spec, self.spec.rayClusterSpec
        broken = {
            f"the name has more than {LONGEST_NAME} characters": len(self.metadata.name) > LONGEST_NAME,
            "suspend needs shutdownAfterJobFinishes": spec.suspend and not spec.shutdownAfterJobFinishes,
            "ttlSecondsAfterFinished needs shutdownAfterJobFinishes": spec.ttlSecondsAfterFinished > 0
            and not spec.shutdownAfterJobFinishes,
            "backoffLimit and InteractiveMode exclude each other": spec.submissionMode == "InteractiveMode"
            and spec.backoffLimit > 0,
            "two groups have one name": len({each.groupName for each in cluster.workerGroupSpecs})
            < len(cluster.workerGroupSpecs),
            "replicas lie outside of minReplicas and maxReplicas": any(
                not each.minReplicas <= each.replicas <= each.maxReplicas for each in cluster.workerGroupSpecs
            ),
            "rayStartParams name labels": any(
                "labels" in each.rayStartParams for each in (cluster.headGroupSpec, *cluster.workerGroupSpecs)
            ),
        }
        for said, found in broken.items():
            if found:
                raise ValueError(said)
        return self


class ConfigMap(Strict):
    apiVersion: Literal["v1"]  # noqa: N815
    kind: Literal["ConfigMap"]
    metadata: Metadata
    data: dict[str, str]


class Storage(Strict):
    requests: dict[Literal["storage"], Quantity]


class ClaimSpec(Strict):
    accessModes: list[  # noqa: N815
        Literal["ReadWriteOnce", "ReadOnlyMany", "ReadWriteMany", "ReadWriteOncePod"]
    ] = Field(min_length=1)
    resources: Storage
    storageClassName: str | None = None  # noqa: N815


class Claim(Strict):
    apiVersion: Literal["v1"]  # noqa: N815
    kind: Literal["PersistentVolumeClaim"]
    metadata: Metadata
    spec: ClaimSpec


KINDS = {"RayJob": RayJob, "ConfigMap": ConfigMap, "PersistentVolumeClaim": Claim}


WORKER = "spec.rayClusterSpec.workerGroupSpecs.0.template.spec.containers.0"


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


def test_every_document_is_of_a_kind_that_is_known(documents):
    assert set(documents) == set(KINDS)
    for kind, document in documents.items():
        KINDS[kind].model_validate(document)
    assert documents["PersistentVolumeClaim"]["spec"]["accessModes"] == ["ReadWriteMany"], (
        "several nodes mount it"
    )


@pytest.mark.parametrize(
    ("kind", "path", "value", "said"),
    [
        ("RayJob", "metadata.name", "1st", "should match pattern"),
        ("RayJob", "metadata.name", "x" * 48, "more than 47 characters"),
        ("RayJob", "spec.shutdownAfterJobFinishes", False, "ttlSecondsAfterFinished needs"),
        ("RayJob", "spec.submissionMode", "Interactive", "Input should be 'K8sJobMode'"),
        ("RayJob", "spec.submissionMode", "InteractiveMode", "exclude each other"),
        ("RayJob", "spec.rayClusterSpec.workerGroupSpecs.0.replicas", 3, "outside of minReplicas"),
        ("RayJob", "spec.rayClusterSpec.headGroupSpec.rayStartParams.num-gpus", 0, "valid string"),
        ("RayJob", "spec.rayClusterSpec.headGroupSpec.rayStartParams.labels", "a=b", "name labels"),
        ("RayJob", WORKER + ".resources.limits.memory", "128 GB", "should match pattern"),
        ("RayJob", WORKER + ".resources.limits.nvidia.com/gpu", "4", "must be equal"),
        ("RayJob", WORKER + ".command", ["x"], "Extra inputs"),
        ("ConfigMap", "data.run.yaml", {"steps": 2}, "valid string"),
        ("PersistentVolumeClaim", "spec.accessModes", ["ReadWriteAll"], "Input should be"),
        ("PersistentVolumeClaim", "spec.resources.requests.storage", "many", "should match pattern"),
    ],
)
def test_what_the_schema_or_the_operator_does_not_take_is_refused(documents, kind, path, value, said):
    node: Any = documents[kind]
    *parents, last = re.split(r"\.(?!com/|yaml$)", path)
    for name in parents:
        node = node[int(name)] if isinstance(node, list) else node[name]
    node[last] = value
    with pytest.raises(ValidationError, match=said):
        KINDS[kind].model_validate(documents[kind])


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
