"""The bill of materials and the page of licences, made of what is installed."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from types import ModuleType

import pytest

from tests.by_path import module_at

ROOT = Path(__file__).resolve().parents[2]
PINS = dict(line.split("==") for line in (ROOT / "constraints.txt").read_text().split())


@pytest.fixture(scope="module")
def sbom() -> ModuleType:
    return module_at(ROOT / ".ci" / "sbom.py")


@pytest.fixture(scope="module")
def packages(sbom: ModuleType) -> dict[str, object]:
    try:
        found: dict[str, object] = sbom.dependencies()
    except SystemExit as missing:
        pytest.skip(str(missing))
    return found


def _require_pinned(sbom: ModuleType, packages: dict[str, object]) -> None:
    """Skip where other packages than the pinned ones are installed: torch's CUDA build, say."""
    for name in packages:
        pin = next((v for n, v in PINS.items() if sbom.canonicalize_name(n) == name), None)
        if pin is None or version(name).partition("+")[0] != pin:
            pytest.skip(f"{name} {version(name)} is installed here, and {pin} is pinned")


def test_every_dependency_is_listed_once_with_version_hash_and_licence(
    sbom: ModuleType, packages: dict[str, object]
) -> None:
    _require_pinned(sbom, packages)
    bill = sbom.bill(packages, "0.1.0")
    names = [component["name"] for component in bill["components"]]
    assert len(names) == len(set(names))
    assert {"numpy", "optuna", "torch", "ray", "optuna-dashboard", "mkdocs"} <= set(names)
    assert "pytest" not in names
    assert not [c["name"] for c in bill["components"] if not c["hashes"] or not c["licenses"]]
    references = {component["bom-ref"] for component in bill["components"]}
    for each in bill["dependencies"]:
        assert set(each["dependsOn"]) <= references
    core = next(each for each in bill["dependencies"] if "joulefront" in each["ref"])
    assert any(name.startswith("pkg:pypi/numpy@") for name in core["dependsOn"])
    assert sbom.bill(packages, "0.1.0") == bill


def test_the_page_of_licences_is_current(sbom: ModuleType, packages: dict[str, object]) -> None:
    _require_pinned(sbom, packages)
    assert sbom.PAGE.read_text() == sbom.page(packages), "run `make sbom`"
