"""The RayJob against what KubeRay publishes: its schema's fields and its operator's rules.

The tables name the fields of KubeRay's custom resource (version v1, as of its release 1.5) and of
Kubernetes' pods; a field that they do not name is refused, as an API server with strict validation
refuses it.
"""

from __future__ import annotations

import copy
import os
import re
import shutil
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "contrib" / "kubernetes" / "tune-rayjob.yaml"
CONTAINERFILE = ROOT / "contrib" / "containers" / "Containerfile"

#: Longest name of a RayJob, so that the names derived from it are labels.
NAME_LENGTH = 47
#: The first Ray that KubeRay starts with a token, and the first whose health it asks over HTTP; for
#: older ones its checks run wget in the container.
TOKEN_RAY, HTTP_RAY = Version("2.52"), Version("2.53")

Schema = dict[str, Any]
INTEGER, NUMBER, TEXT, FLAG = (int,), (int, float), (str,), (bool,)
TEXTS = {"*": TEXT}
QUANTITY = (int, str)
CONTAINER: Schema = {
    **dict.fromkeys(("name", "image", "imagePullPolicy", "workingDir"), TEXT),
    "command": [TEXT],
    "args": [TEXT],
    "env": [
        {"name": TEXT, "value": TEXT, "valueFrom": {"secretKeyRef": {"name": TEXT, "key": TEXT}}}
    ],
    "resources": {"limits": {"*": QUANTITY}, "requests": {"*": QUANTITY}},
    "volumeMounts": [{"name": TEXT, "mountPath": TEXT, "readOnly": FLAG}],
    "ports": [{"name": TEXT, "containerPort": INTEGER}],
    "securityContext": {"allowPrivilegeEscalation": FLAG, "runAsUser": INTEGER},
}
POD: Schema = {
    "containers": [CONTAINER],
    "volumes": [
        {
            "name": TEXT,
            "persistentVolumeClaim": {"claimName": TEXT},
            "emptyDir": {"medium": TEXT, "sizeLimit": QUANTITY},
        }
    ],
    "restartPolicy": TEXT,
    "serviceAccountName": TEXT,
    "nodeSelector": TEXTS,
    "terminationGracePeriodSeconds": INTEGER,
    "automountServiceAccountToken": FLAG,
}
TEMPLATE: Schema = {"metadata": {"labels": TEXTS, "annotations": TEXTS}, "spec": POD}
GROUP: Schema = {
    "rayStartParams": TEXTS,
    "template": TEMPLATE,
    "labels": TEXTS,
    "resources": TEXTS,
}
CLUSTER: Schema = {
    "rayVersion": TEXT,
    "authOptions": {"mode": TEXT, "secretName": TEXT, "enableK8sTokenAuth": FLAG},
    "enableInTreeAutoscaling": FLAG,
    "autoscalerOptions": {"idleTimeoutSeconds": INTEGER, "version": TEXT, "upscalingMode": TEXT},
    "headGroupSpec": {**GROUP, "serviceType": TEXT, "enableIngress": FLAG},
    "workerGroupSpecs": [
        {
            **GROUP,
            "groupName": TEXT,
            **dict.fromkeys(
                ("replicas", "minReplicas", "maxReplicas", "numOfHosts", "idleTimeoutSeconds"),
                INTEGER,
            ),
        }
    ],
}
RAY_JOB: Schema = {
    "apiVersion": TEXT,
    "kind": TEXT,
    "metadata": {"name": TEXT, "namespace": TEXT, "labels": TEXTS, "annotations": TEXTS},
    "spec": {
        **dict.fromkeys(("entrypoint", "submissionMode", "runtimeEnvYAML"), TEXT),
        **dict.fromkeys(("entrypointNumCpus", "entrypointNumGpus"), NUMBER),
        **dict.fromkeys(
            ("activeDeadlineSeconds", "backoffLimit", "ttlSecondsAfterFinished"), INTEGER
        ),
        **dict.fromkeys(("shutdownAfterJobFinishes", "suspend"), FLAG),
        "rayClusterSpec": CLUSTER,
    },
}
#: Fields that the schema requires, by the last name of their parent's path.
REQUIRED = {
    "rayClusterSpec": ("headGroupSpec",),
    "headGroupSpec": ("template",),
    "workerGroupSpecs": ("groupName", "minReplicas", "maxReplicas", "template"),
    "containers": ("name", "image"),
}


def misfits(value: Any, schema: Any, path: str = "") -> Iterator[str]:
    """Yield a sentence for each part of a document that the schema refuses."""
    if isinstance(schema, tuple):
        # YAML's true is an int to Python; to Kubernetes it is not.
        if not isinstance(value, schema) or (isinstance(value, bool) and bool not in schema):
            yield f"{path}: {value!r} is of the wrong type"
    elif isinstance(schema, list):
        if not isinstance(value, list):
            yield f"{path}: not a list"
            return
        for each in value:
            yield from misfits(each, schema[0], path)
    elif not isinstance(value, dict):
        yield f"{path}: not an object"
    else:
        for name in REQUIRED.get(path.rpartition(".")[2], ()):
            if name not in value:
                yield f"{path}: {name} is missing"
        for name, part in value.items():
            if name in schema or "*" in schema:
                yield from misfits(part, schema.get(name, schema.get("*")), f"{path}.{name}")
            else:
                yield f"{path}: no field {name}"


def ray_containers(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    groups = [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]
    return [each for group in groups for each in group["template"]["spec"]["containers"]]


def token_faults(job: dict[str, Any]) -> Iterator[str]:
    """Yield why some part of the cluster would have no token, or another one."""
    cluster = job["spec"]["rayClusterSpec"]
    options = cluster.get("authOptions", {})
    if options.get("mode") != "token":
        # Only with it the operator's client and the submitter's pod get the token.
        yield "submitter and operator have no token"
        return
    if options.get("enableK8sTokenAuth"):
        yield "a RayJob cannot have tokens of Kubernetes"
    if Version(cluster.get("rayVersion", "0")) < TOKEN_RAY:
        yield "a token needs rayVersion from 2.52 on"
    for container in ray_containers(job):
        for variable in container.get("env", []):
            if variable["name"] in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
                yield f"{container['name']} sets {variable['name']} beside the operator"


def size_faults(job: dict[str, Any]) -> Iterator[str]:
    """Yield the rules of names and numbers that are broken."""
    name, spec = job["metadata"]["name"], job["spec"]
    if len(name) > NAME_LENGTH or not re.fullmatch(r"[a-z]([-a-z0-9]*[a-z0-9])?", name):
        yield f"{name!r} is not a name for a RayJob"
    cluster = spec["rayClusterSpec"]
    scales = cluster.get("enableInTreeAutoscaling", False)
    for group in cluster["workerGroupSpecs"]:
        least, most = group["minReplicas"], group["maxReplicas"]
        if not 0 <= least <= group.get("replicas", least) <= most:
            yield f"{group['groupName']}: replicas are outside of minReplicas and maxReplicas"
        if least < most and not scales:
            yield f"{group['groupName']}: without enableInTreeAutoscaling nothing changes replicas"
    if "autoscalerOptions" in cluster and not scales:
        yield "autoscalerOptions need enableInTreeAutoscaling"
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        if group.get("resources") and {"num-cpus", "num-gpus"} & set(group["rayStartParams"]):
            yield "resources are given twice"
    if not spec.get("shutdownAfterJobFinishes") and spec.get("ttlSecondsAfterFinished"):
        yield "ttlSecondsAfterFinished needs shutdownAfterJobFinishes"


def start_faults(job: dict[str, Any]) -> Iterator[str]:
    """Yield why a pod would not start, or the job not be submitted."""
    cluster = job["spec"]["rayClusterSpec"]
    if Version(cluster.get("rayVersion", "0")) < HTTP_RAY:
        yield "its health checks need wget, which images for Python lack"
    if cluster["headGroupSpec"]["rayStartParams"].get("include-dashboard") == "false":
        yield "no dashboard to submit the job to"
    if job["spec"].get("submissionMode", "K8sJobMode") == "InteractiveMode":
        yield "the job waits for somebody to submit it"
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        declared = {each["name"] for each in pod.get("volumes", [])}
        mounted = {m["name"] for c in pod["containers"] for m in c.get("volumeMounts", [])}
        if mounted != declared:
            yield f"volumes {sorted(mounted ^ declared)} are not both declared and mounted"
        if pod["containers"][0].get("command") or pod["containers"][0].get("args"):
            yield "the operator's `ray start` would be replaced"


def faults(job: dict[str, Any]) -> list[str]:
    if found := list(misfits(job, RAY_JOB)):
        return found
    return [*token_faults(job), *size_faults(job), *start_faults(job)]


def the_job() -> dict[str, Any]:
    (job,) = (each for each in yaml.safe_load_all(MANIFEST.read_text()) if each)
    return copy.deepcopy(job)


def test_kuberay_accepts_and_starts_the_ray_job() -> None:
    job = the_job()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert faults(job) == []


# ---- the image that the file names


def test_the_extra_ray_serves_jobs() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (ray,) = map(Requirement, project["optional-dependencies"]["ray"])
    assert ray.name == "ray"
    assert ray.extras == {"default"}


@pytest.mark.parametrize("extras", ["", "ray", "ray,terminal"])
def test_the_image_installs_the_extras_that_it_is_built_with(extras: str, tmp_path: Path) -> None:
    steps = re.sub(r"\\\n", " ", CONTAINERFILE.read_text())
    assert re.search(r"^ARG EXTRAS$", steps, re.M)
    (run,) = [line for line in re.findall(r"^RUN (.*)$", steps, re.M) if "pip install" in line]
    wheels, programs = tmp_path / "wheels", tmp_path / "bin"
    for folder in (wheels, programs):
        folder.mkdir()
    wheel = wheels / "joulefront-0.1.0-py3-none-any.whl"
    wheel.touch()
    for name in ("python3", "tuner"):
        program = programs / name
        program.write_text(f'#!/bin/sh\nprintf "%s\\n" "$@" >> {tmp_path}/called\n')
        program.chmod(0o755)
    done = subprocess.run(
        [shutil.which("sh") or "/bin/sh", "-c", run.replace("/tmp/wheels", str(wheels))],
        env={"PATH": f"{programs}{os.pathsep}/usr/bin:/bin", "EXTRAS": extras},
        check=False,
    )
    assert done.returncode == 0
    wanted = f"{wheel}[{extras}]" if extras else str(wheel)
    assert wanted in (tmp_path / "called").read_text().splitlines()


def test_the_ray_job_says_how_its_image_is_built() -> None:
    built = re.search(r"build (.*?)-t (\S+) \.$", re.sub(r"\\\n#", "", MANIFEST.read_text()), re.M)
    assert built is not None
    assert "--build-arg EXTRAS=ray" in built[1]
    assert {each["image"] for each in ray_containers(the_job())} == {f"{built[2]}:latest"}
