"""Write the software bill of materials, and the list of dependencies with their licences.

usage: make sbom          writes build/sbom.cdx.json (CycloneDX 1.6) and docs/licences.md

Both are made of the metadata of the packages that are installed in this environment: those that the
core and each extra need, found by following their requirements. The sha256 of each package's files
are those of .ci/requirements.txt, which CI installs by.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[1]
BOM = ROOT / "build" / "sbom.cdx.json"
PAGE = ROOT / "docs" / "licences.md"
#: Extras that a user installs; "dev" is for work on this repository.
LEFT_OUT = ("dev", "all")
#: Names of licences in the metadata of packages that state no SPDX expression. A version that is
#: not stated ("BSD", "LGPL") is not made up.
SPDX = {
    "apache": "Apache-2.0",
    "mit": "MIT",
    "bsd 3": "BSD-3-Clause",
    "bsd-3": "BSD-3-Clause",
    "bsd": "BSD",
    "isc": "ISC",
    "python software foundation": "PSF-2.0",
    "psf": "PSF-2.0",
    "mozilla public license 2.0": "MPL-2.0",
    "mpl 2.0": "MPL-2.0",
    "lesser general public license": "LGPL",
    "unlicense": "Unlicense",
}
#: Licences that ask for no more than their notice; the page counts their packages.
PERMISSIVE = ("MIT", "MIT-0", "Apache-2.0", "BSD", "BSD-2-Clause", "BSD-3-Clause", "ISC", "PSF-2.0")
HEAD = """\
# Licences of dependencies

<!-- Written by `make sbom` from the metadata of installed packages. -->

What joulefront brings with it, and under which licence. joulefront itself is under Apache-2.0 and contains the code of one other project: plotly.js (MIT), which each report carries. The table counts the packages of the core and its extras by licence, and names those whose licence is not simply permissive. `make sbom` writes the bill of materials (CycloneDX 1.6). CUDA builds of torch bring NVIDIA's libraries, which are proprietary and not listed here.

| licence | packages | names |
|---|---:|---|
"""  # noqa: E501 - one paragraph a line, as in every page


@dataclass
class Package:
    """One dependency that is installed here.

    Attributes:
        found: its metadata.
        wanted_by: "core" and the extras that need it.
        needs: names of the packages that it requires.
    """

    found: Distribution
    wanted_by: set[str] = field(default_factory=set)
    needs: set[str] = field(default_factory=set)

    @property
    def name(self) -> str:
        return canonicalize_name(self.found.metadata["Name"])

    @property
    def version(self) -> str:
        """Version without the label of a build ("+cpu")."""
        return self.found.version.partition("+")[0]

    @property
    def licence(self) -> str:
        """The SPDX expression, or what the metadata says instead."""
        metadata = self.found.metadata
        if stated := metadata.get("License-Expression"):
            return str(stated)
        classified = [
            value.rpartition(" :: ")[2]
            for value in metadata.get_all("Classifier") or ()
            if value.startswith("License :: ") and value != "License :: OSI Approved"
        ]
        text = " ".join(classified) or (metadata.get("License") or "").strip().split("\n")[0]
        found = dict.fromkeys(spdx for words, spdx in SPDX.items() if words in text.lower())
        if len(classified) > 1 and len(found) > 1:
            return " OR ".join(found)
        return next(iter(found), text[:60] or "not stated")


def requirements(project: dict[str, Any]) -> Iterator[tuple[str, Requirement]]:
    """Yield what the core and each extra ask for."""
    for text in project["dependencies"]:
        yield "core", Requirement(text)
    for extra, texts in project["optional-dependencies"].items():
        if extra not in LEFT_OUT:
            yield from ((extra, Requirement(text)) for text in texts)


def dependencies() -> dict[str, Package]:
    """Return every package that the core or an extra needs here, by name.

    Raises:
        SystemExit: a package that is asked for is not installed.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    packages: dict[str, Package] = {}
    seen: set[tuple[str, str, frozenset[str]]] = set()
    left = list(requirements(project))
    while left:
        part, need = left.pop()
        name = canonicalize_name(need.name)
        if (part, name, frozenset(need.extras)) in seen:
            continue
        try:
            package = packages.setdefault(name, Package(distribution(need.name)))
        except PackageNotFoundError:
            sys.exit(f"{need.name} is not installed; run `make install` first")
        seen.add((part, name, frozenset(need.extras)))
        package.wanted_by.add(part)
        for text in package.found.requires or ():
            further = Requirement(text)
            extras = need.extras or {""}
            if further.marker is None or any(
                further.marker.evaluate({"extra": extra}) for extra in extras
            ):
                package.needs.add(canonicalize_name(further.name))
                left.append((part, further))
    return dict(sorted(packages.items()))


def hashes() -> dict[str, list[str]]:
    """Return the sha256 of each package's files, from .ci/requirements.txt."""
    text = (ROOT / ".ci" / "requirements.txt").read_text()
    found: dict[str, list[str]] = {}
    for block in re.split(r"\n(?=\S)", text):
        if match := re.match(r"([A-Za-z0-9._-]+)==", block):
            found[canonicalize_name(match[1])] = re.findall(r"sha256:([0-9a-f]{64})", block)
    return found


def bill(packages: dict[str, Package], release: str) -> dict[str, Any]:
    """Return the bill of materials (CycloneDX 1.6, without a time stamp, so that it repeats)."""
    files = hashes()

    def reference(name: str) -> str:
        return f"pkg:pypi/{name}@{packages[name].version}"

    def component(package: Package) -> dict[str, Any]:
        licence = package.licence
        spdx = re.fullmatch(r"[\w.+-]+(?: (?:OR|AND|WITH) [\w.+() -]+)?", licence)
        known = (bool(spdx) and "-" in licence) or licence in ("MIT", "ISC", "Unlicense")
        stated = {"expression": licence} if known else {"license": {"name": licence}}
        return {
            "type": "library",
            "bom-ref": reference(package.name),
            "name": package.name,
            "version": package.version,
            "purl": reference(package.name),
            "licenses": [stated],
            "hashes": [{"alg": "SHA-256", "content": each} for each in files.get(package.name, ())],
            "properties": [
                {"name": "joulefront:needed-by", "value": part}
                for part in sorted(package.wanted_by)
            ],
        }

    ours = f"pkg:pypi/joulefront@{release}"
    direct = {canonicalize_name(need.name) for _, need in requirements(_project())}
    body = {
        "components": [component(package) for package in packages.values()],
        "dependencies": [
            {"ref": ours, "dependsOn": sorted(map(reference, direct))},
            *(
                {"ref": reference(name), "dependsOn": sorted(map(reference, package.needs))}
                for name, package in packages.items()
            ),
        ],
    }
    serial = uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(body, sort_keys=True))
    return {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        "metadata": {
            "component": {
                "type": "application",
                "bom-ref": ours,
                "name": "joulefront",
                "version": release,
                "purl": ours,
                "licenses": [{"expression": _project()["license"]}],
            }
        },
        **body,
    }


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def page(packages: dict[str, Package]) -> str:
    """Return the page of licences as Markdown."""
    rows: dict[str, list[Package]] = {}
    for package in packages.values():
        rows.setdefault(package.licence, []).append(package)
    lines = []
    for licence, found in sorted(rows.items(), key=lambda row: (-len(row[1]), row[0])):
        named = [] if licence in PERMISSIVE else [each.found.metadata["Name"] for each in found]
        lines.append(f"| {licence} | {len(found)} | {', '.join(named)} |\n")
    return HEAD + "".join(lines)


def main() -> None:
    packages = dependencies()
    BOM.parent.mkdir(exist_ok=True)
    BOM.write_text(json.dumps(bill(packages, _project()["version"]), indent=1) + "\n")
    PAGE.write_text(page(packages))
    print(f"{len(packages)} packages: {BOM.relative_to(ROOT)}, {PAGE.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
