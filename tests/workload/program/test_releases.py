"""Releases of packages that the built-in program needs; an older one is one sentence."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.figures import ROOT
from tuner.cli.main import main
from tuner.problem.from_job import problem_of_job
from tuner.problem.job_request import JobRequest
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.workload.node.facts import inspect_node
from tuner.workload.program import built_in_job
from tuner.workload.program.built_in_job import training_program
from tuner.workload.scripts.installed import release_of

#: Names that are younger than the releases of pyproject.toml, and the need that stands for each.
YOUNGER = {"parallel_state_sp": "sequence_parallel"}
#: Modules of the program that every job imports.
ALWAYS = ("train", "causal_lm", "host_activations", "lora")
Pretend = Callable[..., None]


@pytest.fixture
def pretend(monkeypatch: pytest.MonkeyPatch) -> Pretend:
    """Return a function by which packages seem to have other releases."""
    real = built_in_job.installed_version

    def installed(**versions: str | None) -> None:
        def version(package: str) -> str | None:
            return versions[package] if package in versions else real(package)

        monkeypatch.setattr(built_in_job, "installed_version", version)

    return installed


def imported_at_once(module: Path) -> set[str]:
    tree = ast.parse(module.read_text())
    found = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    return {alias.name for node in found for alias in node.names}


def test_what_every_job_imports_is_as_old_as_the_bounds() -> None:
    folder = training_program().parent
    for name in ALWAYS:
        assert not imported_at_once(folder / f"{name}.py") & YOUNGER.keys(), name


def test_every_younger_import_stands_behind_a_need() -> None:
    knobs = {need.knob for need in built_in_job.NEEDS}
    assert set(YOUNGER.values()) <= knobs


@pytest.mark.parametrize(
    ("transformers", "refused"),
    [("4.50.0", True), ("4.57.1", True), ("5.0.0", False), ("5.23.0", False), (None, False)],
)
def test_an_older_transformers_is_one_sentence(
    pretend: Pretend, transformers: str | None, refused: bool
) -> None:
    pretend(transformers=transformers)
    notes = [note for note in inspect_node().notes if "built-in program" in note]
    assert bool(notes) == refused
    if not refused:
        return
    assert notes == [
        f"the built-in program needs transformers 5.0 or later, and {transformers} is installed; "
        "update it, or tune a script of your own"
    ]
    with pytest.raises(InputError, match="needs transformers"):
        problem_of_job(JobRequest(job="tiny-gpt"))


def test_a_plan_and_a_search_elsewhere_need_no_release_here(
    pretend: Pretend, tmp_path: Path
) -> None:
    pretend(transformers="4.50.0", deepspeed="0.16.0")
    words = ["plan", "tiny-gpt", "--cluster", "a100-8", "--quiet"]
    assert main([*words, "--runs-dir", str(tmp_path)]) == 0
    assert len(problem_of_job(JobRequest(job="tiny-gpt", cluster="a100-8")).candidates) > 1


@pytest.mark.parametrize(
    ("versions", "lacking"),
    [
        ({"deepspeed": "0.16.0"}, {"sequence_parallel"}),
        ({"deepspeed": "0.16.9+cu124"}, {"sequence_parallel"}),
        ({"deepspeed": "0.17"}, set()),
        ({"deepspeed": "0.17.0"}, set()),
        ({"deepspeed": None}, set()),
    ],
)
def test_knobs_that_a_release_lacks_are_left_out(
    pretend: Pretend, versions: dict[str, str], lacking: set[str]
) -> None:
    pretend(**versions)
    asked = Configuration.of(
        activation_checkpointing="selective", sharding="fsdp2", sequence_parallel=2
    )
    assert {phrase.split()[0] for phrase in built_in_job.why_not(asked)} == lacking
    assert built_in_job.why_not(Configuration.of(activation_checkpointing="full")) == []


def test_the_bounds_of_scripts_stay_wide() -> None:
    """A user's cluster has its own pinned torch, and scripts are tuned with it."""
    text = (ROOT / "pyproject.toml").read_text()
    assert '"transformers>=4.50"' in text
    assert release_of("2.13.0+cu130") == (2, 13, 0)
    assert release_of("unknown") == ()
