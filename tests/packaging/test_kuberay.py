"""The RayJob against what KubeRay publishes: its fields and its operator's rules."""

from __future__ import annotations

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

from tests.support.commands import write_program

ROOT = Path(__file__).resolve().parents[2]
MANIFEST = ROOT / "contrib" / "kubernetes" / "tune-rayjob.yaml"
CONTAINERFILE = ROOT / "contrib" / "containers" / "Containerfile"

#: The first Ray that KubeRay asks for its health over HTTP; for older ones its checks run wget in
#: the container. Tokens need 2.52.
HTTP_RAY = Version("2.53")
#: Fields of KubeRay's custom resource (v1, release 1.5) and of pods that the file uses. An API
#: server with strict validation refuses others.
FIELDS = """
apiVersion kind metadata name spec entrypoint shutdownAfterJobFinishes rayClusterSpec rayVersion
authOptions mode secretName headGroupSpec workerGroupSpecs rayStartParams template groupName
replicas minReplicas maxReplicas containers volumes image env value resources limits volumeMounts
mountPath persistentVolumeClaim claimName emptyDir medium sizeLimit
"""
#: Fields below which names are free.
FREE = {"rayStartParams", "limits"}


def fields_of(value: Any) -> Iterator[str]:
    """Yield the names of all fields of a document."""
    parts = value if isinstance(value, list) else []
    if isinstance(value, dict):
        yield from value
        parts = [part for name, part in value.items() if name not in FREE]
    for part in parts:
        yield from fields_of(part)


def the_job() -> dict[str, Any]:
    (job,) = (each for each in yaml.safe_load_all(MANIFEST.read_text()) if each)
    return dict(job)


def groups_of(job: dict[str, Any]) -> list[dict[str, Any]]:
    cluster = job["spec"]["rayClusterSpec"]
    return [cluster["headGroupSpec"], *cluster["workerGroupSpecs"]]


def test_kuberay_accepts_and_starts_the_ray_job() -> None:
    job = the_job()
    assert (job["apiVersion"], job["kind"]) == ("ray.io/v1", "RayJob")
    assert set(fields_of(job)) <= set(FIELDS.split())
    # Longer names make no labels of those that are derived from them.
    assert re.fullmatch(r"[a-z][-a-z0-9]{,45}[a-z0-9]", job["metadata"]["name"])
    cluster = job["spec"]["rayClusterSpec"]
    assert Version(cluster["rayVersion"]) >= HTTP_RAY
    # Only with this mode the operator's client and the submitter's pod get the token.
    assert cluster["authOptions"]["mode"] == "token"
    # The job is submitted through the head's dashboard.
    assert cluster["headGroupSpec"]["rayStartParams"]["include-dashboard"] == "true"
    for group in cluster["workerGroupSpecs"]:  # nothing changes them without an autoscaler
        assert group["minReplicas"] == group["replicas"] == group["maxReplicas"] > 0
    for group in groups_of(job):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounted = {each["name"] for each in container["volumeMounts"]}
        assert mounted == {each["name"] for each in pod["volumes"]}
        assert not {"command", "args"} & container.keys()  # the operator's `ray start` stays
        assert not [each for each in container["env"] if each["name"].startswith("RAY_AUTH")]


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
        write_program(programs / name, f'#!/bin/sh\nprintf "%s\\n" "$@" >> {tmp_path}/called\n')
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
    assert "--build-arg EXTRAS=ray" in built[1]
    containers = [each["template"]["spec"]["containers"][0] for each in groups_of(the_job())]
    assert {each["image"] for each in containers} == {f"{built[2]}:latest"}
