"""The package for OptunaHub: its registry's rules, its loader, and that launches are reused."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import ModuleType

import optuna
import pytest
import yaml

from tests.by_path import module_at

ROOT = Path(__file__).resolve().parents[2] / "contrib" / "optunahub"
FOLDER = ROOT / "package" / "samplers" / "joulefront"
LAUNCH = {"batch_size": [16, 32, 64, 128, 256]}
LIVE = {"power_limit_W": [100, 150, 200, 250]}


@pytest.fixture(scope="module")
def package() -> ModuleType:
    """The package as `optunahub.load_local_module` loads it: its __init__.py, by path."""
    name = "optunahub_registry.package.samplers.joulefront"
    return module_at(FOLDER / "__init__.py", name)


def test_the_folder_holds_what_the_registry_asks_for() -> None:
    files = {path.name for path in FOLDER.iterdir() if path.is_file()}
    assert files >= {"README.md", "LICENSE", "__init__.py", "example.py"}
    licence = (FOLDER / "LICENSE").read_text()
    assert licence.startswith("MIT License")
    assert "<COPYRIGHT HOLDER>" not in licence


def test_the_header_of_the_readme_passes_the_registrys_check() -> None:
    _, header, text = (FOLDER / "README.md").read_text().split("---\n", 2)
    fields = yaml.safe_load(header)
    assert all(isinstance(fields[name], str) for name in ("author", "title", "description"))
    for name in ("tags", "optuna_versions"):
        assert isinstance(fields[name], list)
        assert all(isinstance(value, str) for value in fields[name])
    assert "sampler" in fields["tags"]
    assert fields["license"] == "MIT License"
    assert all(f"## {part}" in text for part in ("Abstract", "APIs", "Installation", "Example"))


def test_the_front_is_found_with_few_launches(package: ModuleType) -> None:
    source = (FOLDER / "example.py").read_text().split("LAUNCH = ")[1].split("if __name__")[0]
    names: dict[str, object] = {}
    exec(f"LAUNCH = {source}", names)
    measure = names["measure"]
    assert callable(measure)
    assert (names["LAUNCH"], names["LIVE"]) == (LAUNCH, LIVE)
    sampler = package.LaunchAwareSampler(LAUNCH, LIVE, seed=0)
    study = optuna.create_study(directions=["minimize", "minimize"], sampler=sampler)
    for _ in range(12):
        trial = study.ask(sampler.distributions())
        study.tell(trial, measure(**trial.params))
    trials = study.get_trials()
    points = {(t.params["batch_size"], t.params["power_limit_W"]) for t in trials}
    assert len(points) == 12
    launches = [t.params["batch_size"] for t in trials]
    entered = 1 + sum(a != b for a, b in itertools.pairwise(launches))
    assert entered <= 6
    every = {(b, p): measure(b, p) for b in LAUNCH["batch_size"] for p in LIVE["power_limit_W"]}
    front = {
        k
        for k, (e, t) in every.items()
        if not any(a <= e and b <= t and (a, b) != (e, t) for a, b in every.values())
    }
    assert len(front & points) >= 0.6 * len(front)


def test_the_example_runs_with_optunahubs_own_loader(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("optunahub")
    import runpy

    runpy.run_path(str(FOLDER / "example.py"), run_name="__main__")
    assert "batch_size" in capsys.readouterr().out
