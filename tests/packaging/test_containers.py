"""Images of the container recipe, built and started where buildah is installed.

No registry is asked: the image to build on is made of this machine's Python and bears the name that
the recipe gives. The packages that joulefront needs are mounted, as if that image had them.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from importlib.metadata import Distribution, PackageNotFoundError, distribution, version
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.support.commands import finished

ROOT = Path(__file__).resolve().parents[2]
CONTAINERFILE = ROOT / "contrib" / "containers" / "Containerfile"
MANIFEST = ROOT / "contrib" / "kubernetes" / "tune-rayjob.yaml"
#: Where the packages of this machine are in a container.
PACKAGES = "/opt/packages"
#: Programs that the recipe's steps and its commands start.
PROGRAMS = ("sh", "ls", "mkdir", "rm")
#: A user of a cluster, without a home and a name in the image.
SOMEBODY = "12345:12345"

pytestmark = [
    pytest.mark.slow,
    pytest.mark.root,
    pytest.mark.timeout(900),
    pytest.mark.needs("buildah"),
]


class Builder:
    """buildah with a storage of its own, which needs neither a daemon nor a kernel's help."""

    def __init__(self, folder: Path) -> None:
        self._places = ("--root", str(folder / "images"), "--runroot", str(folder / "running"))
        self._packages = folder / "packages"
        self.options = ("--isolation", "chroot", "-v", f"{self._packages}:{PACKAGES}:ro")

    def __call__(self, command: str, *words: str | Path) -> str:
        """Return the standard output of a subcommand, which must succeed."""
        done = finished(
            ["buildah", *self._places, "--storage-driver", "vfs", command, *map(str, words)]
        )
        assert done.returncode == 0, (
            f"buildah {command}: {done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
        return done.stdout.strip()

    def run(self, image: str, *command: str) -> str:
        """Return what a command prints that another user starts in a container of an image."""
        container = self("from", "--pull-never", image)
        return self("run", *self.options, "--user", SOMEBODY, container, "--", *command)

    def start(self, image: str, *arguments: str) -> str:
        """Return what the entry point of an image prints, started with arguments."""
        config = json.loads(self("inspect", "--type", "image", image))["OCIv1"]["config"]
        return self.run(image, *config["Entrypoint"], *arguments)


def closure(names: Iterable[str]) -> Iterator[Distribution]:
    """Yield the installed distributions that requirements need, with those they need."""
    waiting = [Requirement(name) for name in names]
    seen: set[tuple[str, frozenset[str]]] = set()
    while waiting:
        wanted = waiting.pop()
        key = (canonicalize_name(wanted.name), frozenset(wanted.extras))
        if key in seen:
            continue
        seen.add(key)
        try:
            found = distribution(wanted.name)
        except PackageNotFoundError:
            continue
        yield found
        for each in map(Requirement, found.requires or ()):
            extras = wanted.extras or {""}
            if not each.marker or any(each.marker.evaluate({"extra": e}) for e in extras):
                waiting.append(each)


def copy(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copy2(source, target)


def libraries(binaries: Iterable[Path]) -> set[Path]:
    """Return the shared libraries that binaries load from this machine, and its loader."""
    done = finished(["ldd", *map(str, binaries)])
    return {Path(path) for path in re.findall(r"(/\S+\.so\S*) \(0x", done.stdout)}


def link_packages(folder: Path, requirements: Iterable[str]) -> Iterator[Path]:
    """Link the packages of requirements into a folder; yield their shared libraries."""
    for package in closure(requirements):
        for file in package.files or ():
            source = Path(str(package.locate_file(file)))
            if ".." in file.parts or "__pycache__" in file.parts or not source.is_file():
                continue
            target = folder / file
            if target.exists():  # of the namespace of another package, or wanted with an extra
                continue
            target.parent.mkdir(parents=True, exist_ok=True)
            try:
                os.link(source, target)
            except OSError:  # another file system
                shutil.copy2(source, target)
            if ".so" in source.suffixes:
                yield source


def write_file_system(folder: Path, binaries: list[Path]) -> None:
    """Write a root file system with Python, a shell, and the libraries that binaries need."""
    standard = Path(sysconfig.get_path("stdlib"))
    python = folder / "usr" / "local" / "lib" / standard.name
    left_out = shutil.ignore_patterns("site-packages", "test", "config-*", "__pycache__")
    shutil.copytree(standard, python, ignore=left_out)
    (python / "site-packages").mkdir()
    (python / "site-packages" / "packages.pth").write_text(f"{PACKAGES}\n")
    interpreter = Path(sys.executable).resolve()
    programs = {f"usr/local/bin/{name}": interpreter for name in ("python3", interpreter.name)}
    programs |= {f"bin/{name}": Path(shutil.which(name) or name).resolve() for name in PROGRAMS}
    for name, program in programs.items():
        copy(program, folder / name)
    loading = {*programs.values(), *standard.glob("lib-dynload/*.so"), *binaries}
    packages = Path(sysconfig.get_path("purelib"))
    for library in libraries(loading):
        if not library.is_relative_to(packages):
            copy(library.resolve(), folder / library.relative_to("/"))
    (folder / "tmp").mkdir()
    (folder / "tmp").chmod(0o1777)


def base_name() -> str:
    found = re.search(r"^ARG BASE=(\S+)$", CONTAINERFILE.read_text(), re.M)
    return found[1]


@pytest.fixture(scope="module")
def builder(tmp_path_factory: pytest.TempPathFactory) -> Builder:
    """buildah, with an image of this machine under the name that the recipe builds on."""
    folder = tmp_path_factory.mktemp("buildah")
    build = Builder(folder)
    own = distribution("joulefront").requires or ()
    needed = [each for each in own if "extra" not in each]
    binaries = list(link_packages(folder / "packages", ["pip", "ray[default]", *needed]))
    write_file_system(folder / "root", binaries)
    container = build("from", "scratch")
    build("copy", container, folder / "root", "/")
    build("config", "--env", "PATH=/usr/local/bin:/usr/bin:/bin", container)
    build("commit", container, base_name())
    shutil.rmtree(folder / "root")
    return build


def built(build: Builder, wheel: Path, *words: str) -> None:
    """Build the recipe, with its defaults but for the words of the command, from a wheel."""
    context = wheel.parent
    (context / "dist").mkdir(exist_ok=True)
    shutil.copy2(wheel, context / "dist")
    options = ("--pull-never", "--build-arg", "PIP_NO_INDEX=1")
    build("build", *build.options, *options, *words, "-f", CONTAINERFILE, context)


def test_the_image_plans_as_any_user(builder: Builder, wheel: Path) -> None:
    built(builder, wheel, "-t", "plain")
    assert builder.start("plain", "--version").startswith("joulefront ")
    plan = builder.start("plain", "plan", "opt-350m", "--cluster", "a100-8", "--name", "first")
    assert "Predicted, not measured" in plan
    assert "Report: /runs/first/report.html" in plan


@pytest.mark.long
def test_the_image_of_the_ray_job_has_ray_and_its_command(builder: Builder, wheel: Path) -> None:
    job = yaml.safe_load(MANIFEST.read_text())
    built(builder, wheel, "--build-arg", "EXTRAS=ray", "-t", "joulefront")
    found = builder.run("joulefront", "python3", "-c", "import ray; print(ray.__version__)")
    assert found == version("ray")
    # Not the whole line: a container of this isolation sees the machine's other Ray clusters.
    program, command, *_ = shlex.split(job["spec"]["entrypoint"])
    assert "--ray " in builder.run("joulefront", program, command, "--help-all")
