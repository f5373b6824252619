"""Frameworks as data: each driver against the framework's own release.

For each driver: whether a command in the framework's ordinary style is recognised, the knobs that
are in play, and its keys looked up in the sources of a release. Releases come as wheels from the
package registry into a throw-away folder (`pip download --no-deps`), and are read as text; nothing
of them is imported. `--source NAME=FOLDER` gives a checkout instead, for what is no package
(Megatron-LM's training scripts, nanoGPT). What really trains under an installed framework is in
tests/workload/scripts/frameworks.
"""

from __future__ import annotations

import sys
import tempfile
import tomllib
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.figures import ROOT, Figure, arguments, publish
from tests.support.commands import finished
from tests.support.scripts import on_every_device
from tuner.search_spaces.cluster import Cluster, Device
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.frameworks import Driver, shipped_drivers
from tuner.workload.scripts.frameworks.keys import KeyCheck, check_keys
from tuner.workload.scripts.script_facts import LAUNCH

NODE = Cluster("node", Device("core", "cpu", 2**33, 1e11, 1e10, 2.0, 15.0), devices_per_node=8)
TABLE = ROOT / "benchmarks" / "data" / "frameworks.toml"


@dataclass(frozen=True)
class Sample:
    """Command in a framework's ordinary style.

    Attributes:
        name, versions: of the driver.
        command: the command.
        files: text of the files that it needs, by path.
        packages: releases whose wheels hold the keys.
    """

    name: str
    command: str
    files: Mapping[str, str] = field(default_factory=dict)
    packages: Sequence[str] = ()
    versions: str = ""


def samples() -> list[Sample]:
    """Return the samples, at least one of each driver."""
    rows = tomllib.loads(TABLE.read_text(encoding="utf-8"))["sample"]
    return [Sample(**row) for row in rows]


@dataclass(frozen=True)
class Row:
    """One framework.

    Attributes:
        title: name and versions.
        recognised: its sample command is.
        knobs: knobs in play on the sample command.
        checked: its keys against a release.
        why: the reason where something was not possible.
    """

    title: str
    recognised: bool
    knobs: tuple[str, ...]
    checked: KeyCheck
    why: str = ""

    @property
    def complete(self) -> bool:
        """True if the command is recognised and every key is in the release."""
        return self.recognised and bool(self.checked.files) and not self.checked.gone

    def __str__(self) -> str:
        found, gone = len(self.checked.found), len(self.checked.gone)
        version = self.checked.version or "a checkout"
        keys = (
            f"{found} keys in {version}, {gone} gone" if self.checked.files else "keys unverified"
        )
        return (
            f"{self.title}: {'recognised' if self.recognised else 'NOT recognised'}; in play: "
            f"{', '.join(self.knobs) or 'none'}; {keys}"
            + (f" ({self.why})" if self.why else "")
            + "".join(f"\n  gone: {key}" for key in self.checked.gone)
        )


def driver_of(sample: Sample) -> Driver:
    return next(
        driver
        for driver in shipped_drivers()
        if driver.name == sample.name and driver.versions.startswith(sample.versions)
    )


def download(packages: Sequence[str], wheels: Path, folder: Path) -> str:
    """Unpack the wheels of some packages; return why that is not possible, or ""."""
    for package in packages:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--retries",
            "1",
        ]
        command += ["--only-binary", ":all:", "--dest", str(wheels / package), package]
        done = finished(command, timeout=300)
        if done.returncode:
            return f"{package} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}"
        for wheel in (wheels / package).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
    return ""


def contract(sample: Sample, sources: Mapping[str, Path], wheels: Path, folder: Path) -> Row:
    """Compare a driver with a release, and apply it to its sample command."""
    driver = driver_of(sample)
    release = sources.get(sample.name, folder / "release")
    why = "" if sample.name in sources else download(sample.packages, wheels, release)
    checked = check_keys(driver, [release]) if release.is_dir() else KeyCheck()
    work = folder / "work"
    for name, text in sample.files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    work.mkdir(exist_ok=True)
    script = Script(sample.command, cwd=work)
    bound = script.framework_of_command
    known = bound is not None and bound.driver == driver
    knobs: tuple[str, ...] = ()
    if known:
        blank = on_every_device(script, NODE)
        job = replace(blank, frame=replace(blank.frame, kind="torch"))
        knobs = tuple(name for name in LAUNCH if job.offers[name].turned)
        if (job.start(job.baseline, folder / "probe", probe=False).words) != job.words:
            why = "its baseline changes the command"
    return Row(
        f"{driver.name} {driver.versions}".strip(),
        known,
        knobs,
        checked,
        why,
    )


def measure(sources: Mapping[str, Path], only: Sequence[str]) -> list[Row]:
    rows = []
    for sample in samples():
        if only and sample.name not in only:
            continue
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            row = contract(sample, sources, folder / "wheels", folder)
        print(row, flush=True)
        rows.append(row)
    return rows


def figures(rows: Sequence[Row]) -> list[Figure]:
    return [
        Figure("frameworks_by_contract", sum(row.complete for row in rows), "count"),
        Figure("keys_verified", sum(len(row.checked.found) for row in rows), "count"),
        Figure("keys_gone", sum(len(row.checked.gone) for row in rows), "count"),
    ]


def main() -> int:
    parser = arguments(__doc__, "frameworks")
    parser.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    args = parser.parse_args()
    sources = {}
    for given in args.source:
        name, _, folder = given.partition("=")
        sources[name] = Path(folder).resolve()
    rows = measure(sources, args.only)
    publish(figures(rows), args.json)
    return 0 if all(row.recognised for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
