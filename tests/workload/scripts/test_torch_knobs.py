"""Knobs that the hook sets in any program of torch: when they are added, how they are proven."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from textwrap import dedent
from typing import Any

import pytest

from tests.support.scripts import CPU, OPTIMIZER, groups_of_steps, script_job
from tuner import optimize
from tuner.problem.run_folder import RunFolder
from tuner.problem.settings import SearchSettings
from tuner.search_spaces.cluster import Cluster, load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knob_declarations import parse_knob
from tuner.study.request import job_of_script
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.script_facts import ScriptFacts
from tuner.workload.scripts.script_job import ScriptJob
from tuner.workload.scripts.torch_knobs import (
    differs_from_today,
    settings_today,
    torch_knobs,
    trains_otherwise,
    with_torch_knobs,
)

LOADER = {
    "num_workers": 0,
    "prefetch_factor": None,
    "items": True,
    "own_sampler": "",
    "batch_on_device": False,
}


def facts(waited: float = 0.5, updated: float = 0.2, **changes: Any) -> dict[str, Any]:
    groups = groups_of_steps(waited, updated)
    seen = {"groups": groups, "loader": LOADER, "optimizer": OPTIMIZER, "reads_by": "number"}
    return {**seen, **changes}


def at(seen: Mapping[str, Any], **chosen: Any) -> dict[str, Any]:
    """Return the facts of the same training with other settings."""
    kernel = chosen.get("optimizer_kernel", "loop")
    loader = {**seen["loader"], **{n: v for n, v in chosen.items() if n in LOADER}}
    return {**seen, "loader": loader, "optimizer": {**seen["optimizer"], "kernel": kernel}}


def job_of(folder: Path, seen: Mapping[str, Any]) -> ScriptJob:
    frame = ScriptFacts(
        kind="torch", micro_batch=4, accumulation=1, settings=settings_today(seen), threads=1
    )
    return replace(script_job("train.py", folder, frame), devices=1)


def added(folder: Path, seen: Mapping[str, Any]) -> tuple[dict[str, Any], list[str]]:
    """Return the values of the knobs that are added where every launch trains the same."""
    said: list[str] = []

    def launch(job: ScriptJob, configuration: Configuration) -> Mapping[str, Any]:
        return at(seen, **{k.name: configuration.get(k.name) for k in job.knobs})

    job = with_torch_knobs(job_of(folder, seen), seen, launch, CPU, said.append)
    return {knob.name: knob.values for knob in job.knobs}, said


@pytest.fixture(autouse=True)
def eight_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.cpu_count", lambda: 8)


KERNELS = ("loop", "fused")


def test_a_step_that_other_processes_stretch_hides_no_knob(tmp_path: Path) -> None:
    """On all cores it takes many times as long; what its own thread ran shows the shares."""
    seen = facts(waited=0.01, updated=0.01)
    busy = {"took": 0.1, "waited": 0.01, "updated": 0.01}
    stretched = {**seen, "groups": [{**group, "busy": busy} for group in seen["groups"]]}
    assert {*added(tmp_path, stretched)[0]} == {"num_workers", "optimizer_kernel"}
    idle = [{**group, "busy": {**busy, "took": 1.0}} for group in seen["groups"]]
    assert added(tmp_path, {**seen, "groups": idle})[0] == {}


def test_what_a_program_does_once_hides_no_knob(tmp_path: Path) -> None:
    """A GAN plotted before its second step, beside which its optimizers' 8 % were 1 %."""
    seen = facts(waited=0.0, updated=0.08)
    first, second, *others = seen["groups"]
    plotted = [first, {**second, "took": 100 * second["took"]}, *others]
    assert len(others) >= 2
    assert {*added(tmp_path, {**seen, "groups": plotted})[0]} == {"optimizer_kernel"}
    # One step of several that waits, as where workers deliver several batches at once, counts too.
    quiet = facts(waited=0.0, updated=0.0)["groups"]
    waits = [*quiet[:-1], {**quiet[-1], "waited": 0.5 * quiet[-1]["took"]}]
    assert {*added(tmp_path, {**seen, "groups": waits})[0]} == {"num_workers"}
    # That nothing but such a step was slow is no reason.
    slow = [first, {**second, "updated": 0.0}, *({**each, "updated": 0.0} for each in others)]
    assert added(tmp_path, {**seen, "groups": slow})[0] == {}


@pytest.mark.parametrize(
    ("seen", "expected"),
    [
        (facts(), {"num_workers": (0, 2, 4, 8), "optimizer_kernel": KERNELS}),
        (facts(waited=0.01), {"optimizer_kernel": KERNELS}),
        (facts(updated=0.01), {"num_workers": (0, 2, 4, 8)}),
        (facts(waited=0.01, updated=0.01), {}),
        (
            facts(updated=0.0, loader={**LOADER, "num_workers": 3, "prefetch_factor": 2}),
            {"num_workers": (2, 3, 4, 8), "prefetch_factor": (2, 8)},
        ),
        (facts(updated=0.0, loader={**LOADER, "items": False}), {}),
        (facts(updated=0.0, loader={**LOADER, "own_sampler": "Mine"}), {}),
        (facts(updated=0.0, loader={**LOADER, "batch_on_device": True}), {}),
        (facts(waited=0.0, optimizer={}), {}),
        (facts(waited=0.0, optimizer={"kernel": "foreach", "kernels": ["foreach"]}), {}),
        ({"groups": []}, {}),
    ],
)
def test_what_may_matter_is_added(
    tmp_path: Path, seen: dict[str, Any], expected: dict[str, Any]
) -> None:
    assert added(tmp_path, seen) == (expected, [])


ON_GPU = replace(CPU, device=load_cluster("a100-8").device)
NO_KERNEL: dict[str, Any] = {"waited": 0.0, "updated": 0.0, "optimizer": {}}
TORCH_LOOP = {"compiled": False, "counts": "optimizer", "backend": {}}
CONVOLUTIONS = {"benchmark": False, "deterministic": False, "convolutions": True}
FLAG = ("false", "true")


@pytest.mark.parametrize(
    ("seen", "steps", "cluster", "expected"),
    [
        # A step takes 1 s here: what a compilation takes is repaid by an hour on cores.
        ({**NO_KERNEL, **TORCH_LOOP}, 4000, CPU, ["compile"]),
        ({**NO_KERNEL, **TORCH_LOOP}, 3000, CPU, []),
        ({**NO_KERNEL, **TORCH_LOOP}, None, CPU, []),
        ({**NO_KERNEL, **TORCH_LOOP}, None, ON_GPU, ["compile"]),
        ({**NO_KERNEL, **TORCH_LOOP}, 100, ON_GPU, []),
        ({**NO_KERNEL, **TORCH_LOOP, "compiled": True}, 4000, CPU, []),  # by the program itself
        ({**NO_KERNEL, **TORCH_LOOP, "counts": "program"}, 4000, CPU, []),
        (
            {**NO_KERNEL, **TORCH_LOOP, "waited": 0.9, "loader": {}},
            4000,
            CPU,
            [],
        ),  # hardly computes
        ({**NO_KERNEL, "backend": CONVOLUTIONS}, None, ON_GPU, ["cudnn_benchmark"]),
        ({**NO_KERNEL, "backend": CONVOLUTIONS}, None, CPU, []),
        ({**NO_KERNEL, "backend": {**CONVOLUTIONS, "deterministic": True}}, None, ON_GPU, []),
        ({**NO_KERNEL, "backend": {**CONVOLUTIONS, "convolutions": False}}, None, ON_GPU, []),
        ({**NO_KERNEL, "zeroes": True}, None, ON_GPU, ["set_to_none"]),
        ({**NO_KERNEL, "zeroes": True, "updated": 0.2}, None, CPU, ["set_to_none"]),
        ({**NO_KERNEL, "zeroes": True}, None, CPU, []),
        ({**NO_KERNEL, "waited": 0.2}, None, ON_GPU, ["num_workers", "pin_memory"]),
        ({**NO_KERNEL, "waited": 0.01}, None, ON_GPU, []),
    ],
)
def test_a_flag_is_added_where_it_applies_and_may_matter(
    tmp_path: Path,
    seen: dict[str, Any],
    steps: int | None,
    cluster: Cluster,
    expected: list[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    job = replace(job_of(tmp_path, facts(**seen)), steps=steps)
    knobs = torch_knobs(job, facts(**seen), cluster)
    assert [knob.name for knob in knobs] == expected
    assert {knob.values for knob in knobs if knob.name != "num_workers"} <= {FLAG}


def test_a_model_is_not_compiled_on_cores_without_a_compiler(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: None)
    seen = facts(**NO_KERNEL, **TORCH_LOOP)
    assert torch_knobs(replace(job_of(tmp_path, seen), steps=4000), seen, CPU) == ()


@pytest.mark.parametrize(
    ("chosen", "there"),
    [
        ({"compile": "true"}, {"compiles": True}),
        ({"set_to_none": "true"}, {"zeroes": False}),
        ({"cudnn_benchmark": "true"}, {"backend": {**CONVOLUTIONS, "benchmark": True}}),
        ({"pin_memory": "true"}, {"loader": {**LOADER, "pin_memory": True}}),
    ],
)
def test_a_flag_that_the_program_undoes_or_that_changes_a_loss_is_no_knob(
    chosen: dict[str, Any], there: dict[str, Any]
) -> None:
    seen = facts(zeroes=True)
    assert trains_otherwise(seen, {**seen, **there}, chosen) == ""
    assert trains_otherwise(seen, seen, chosen) == "the program sets it itself"
    others = [{**group, "loss": group["loss"] + 0.02} for group in seen["groups"]]
    assert "more than rounding" in trains_otherwise(
        seen, {**seen, **there, "groups": others}, chosen
    )


def compiling(folder: Path) -> tuple[ScriptJob, dict[str, Any]]:
    """Return a job whose model may be compiled, and the facts of today's first steps."""
    seen = facts(**NO_KERNEL, **TORCH_LOOP)
    job = replace(job_of(folder, seen), steps=4000)

    def launch(*_: Any) -> str:
        raise AssertionError("nothing is launched to prove a compilation before the search")

    return with_torch_knobs(job, seen, launch, CPU, print), seen


def test_a_compilation_is_compared_in_the_probes_that_set_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    job, seen = compiling(tmp_path)
    assert [knob.name for knob in job.knobs] == ["compile"]
    compiled = Configuration(Settings({**job.baseline.launch, "compile": "true"}))
    for each, compares in ((compiled, True), (job.baseline, False)):
        assert job.start(each, tmp_path).options.get("compares", False) is compares
        assert "compares" not in job.start(each, tmp_path, probe=False).options
    there = {**seen, "compiles": True}
    assert differs_from_today(job, compiled, there) == ""
    assert differs_from_today(job, compiled, seen) == "the program sets it itself"
    others = [{**group, "loss": group["loss"] + 0.02} for group in seen["groups"]]
    assert "more than rounding" in differs_from_today(job, compiled, {**there, "groups": others})
    again = ScriptFacts.from_json(job.frame.to_json())
    kept = replace(job, frame=again)
    assert "more than rounding" in differs_from_today(kept, compiled, {**there, "groups": others})


def test_a_compilation_at_another_split_is_compared_by_the_losses_of_a_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("shutil.which", lambda name: f"/usr/bin/{name}")
    job, seen = compiling(tmp_path)
    halved = Configuration(Settings({**job.baseline.launch, "compile": "true", "micro_batch": 2}))
    groups = [
        {**group, "drawn": [[0, 2, False]] * 2, "passes": 2, "shapes": [[2, 2]] * 2}
        for group in seen["groups"]
    ]
    there = {**seen, "compiles": True, "groups": groups}
    assert differs_from_today(job, halved, there) == ""
    assert differs_from_today(job, halved, {**there, "compiles": False})
    others = [{**group, "loss": 2 * group["loss"]} for group in groups]
    assert "divide" in differs_from_today(job, halved, {**there, "groups": others})


@pytest.mark.parametrize(
    ("changes", "chosen", "why"),
    [
        ({}, {"num_workers": 2, "optimizer_kernel": "fused"}, ""),
        ({"reads_by": ""}, {"num_workers": 2}, "a generator of its own"),
        ({"reads_by": ""}, {"optimizer_kernel": "fused"}, ""),
        ({"loader": LOADER}, {"num_workers": 2}, "sets it itself"),
        ({"optimizer": OPTIMIZER}, {"optimizer_kernel": "fused"}, "sets it itself"),
        ({"indices": [9]}, {"num_workers": 2}, "other samples"),
        ({"batches": [9]}, {"num_workers": 2}, "its batches are others"),
        ({"batches": [9], "reads_by": "random"}, {"num_workers": 2}, ""),
        ({"batches": [9], "reads_by": "random", "loss": 2.0}, {"num_workers": 2}, "the losses"),
        ({"batches": [9]}, {"optimizer_kernel": "fused"}, "its batches are others"),
        ({"batches": [None]}, {"num_workers": 2}, "cannot be compared"),
        ({"loss": 0.9}, {"optimizer_kernel": "fused"}, "more than rounding"),
        ({"loss": None}, {"optimizer_kernel": "fused"}, "cannot be read"),
        ({"drawn": [[0, 8, False]]}, {"optimizer_kernel": "fused"}, "8 samples x 1 passes"),
    ],
)
def test_what_trains_otherwise_is_no_knob(
    changes: dict[str, Any], chosen: dict[str, Any], why: str
) -> None:
    again = at(facts(), **chosen)
    groups = [
        {**group, **{n: v for n, v in changes.items() if n in group}} for group in again["groups"]
    ]
    whole = {name: value for name, value in changes.items() if name in again}
    found = trains_otherwise(facts(), {**again, "groups": groups, **whole}, chosen)
    assert (why in found) if why else found == ""


def test_of_two_settings_that_do_not_train_the_same_the_other_is_kept(tmp_path: Path) -> None:
    said, launches = [], 0

    def launch(job: ScriptJob, configuration: Configuration) -> Mapping[str, Any] | str:
        nonlocal launches
        launches += 1
        workers = configuration.get("num_workers")
        assert (configuration.get("optimizer_kernel"), workers) != (None, None)
        return "no memory" if workers else at(facts(), optimizer_kernel="fused")

    job = with_torch_knobs(job_of(tmp_path, facts()), facts(), launch, CPU, said.append)
    assert [knob.name for knob in job.knobs] == ["optimizer_kernel"]
    assert launches == 3
    assert said == [
        "num_workers is left as today: with num_workers=2, it does not start (no memory)"
    ]
    start = job.start(job.baseline, tmp_path / "today")
    assert "torch" not in start.options
    other = Configuration(
        Settings({**job.baseline.launch, "optimizer_kernel": "fused"}), Settings({})
    )
    assert job.start(other, tmp_path / "other").options["torch"] == {"optimizer_kernel": "fused"}
    assert job.needs_hook


def test_a_knob_of_torch_that_the_script_does_not_have_is_refused(tmp_path: Path) -> None:
    job = job_of(tmp_path, facts(loader={}))
    with pytest.raises(InputError, match="not seen to use"):
        job.declares([parse_knob("torch:num_workers=0,2")])
    with pytest.raises(InputError, match="optimizer_kernel"):
        parse_knob("torch:seed=1,2")


PROGRAM = """
import random, sys, torch
class Items(torch.utils.data.Dataset):
    def __init__(self):
        self.own = random.Random(0)
    def __len__(self):
        return 4096
    def __getitem__(self, number):
        for _ in range(300):
            item = torch.full((8,), number / 4096)
        {ADD}
        return item
torch.manual_seed(0)
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
while True:
    for x in torch.utils.data.DataLoader(Items(), 8, shuffle=True):
        (model(x) - x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize(
    ("add", "found"),
    [
        ("item = item + 0.01 * random.random()", True),
        ("item = item + 0.01 * self.own.random()", False),
    ],
)
def test_workers_are_a_knob_of_a_program_that_waits_and_reads_alike(
    tmp_path: Path, add: str, found: bool
) -> None:
    (tmp_path / "train.py").write_text(dedent(PROGRAM).replace("{ADD}", add))
    job = job_of_script(
        Script(f"{sys.executable} train.py", cwd=tmp_path),
        replace(detect_cluster(), devices_per_node=2),
        RunFolder(tmp_path / "run"),
        address=None,
        announce=lambda sentence: None,
        adds_knobs=True,
    )
    assert ("num_workers" in {knob.name for knob in job.knobs}) is found


COMPILED = """
import torch
torch.manual_seed(0)
class Model(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = torch.nn.Linear(64, 64), torch.nn.Linear(64, 64)
    def forward(self, x):
        return self.second(torch.dropout(self.first(x).relu(), 0.1, True))
model, loss = Model(), torch.nn.MSELoss()
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
while True:
    x = torch.randn(32, 64)
    loss(model(x), x).backward()
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.parametrize(
    ("trick", "why"),
    [
        ("if torch.compiler.is_compiling(): x = 2 * x", "more than rounding"),
        pytest.param(
            "if torch.compiler.is_compiling(): x = x.reshape(3)",
            "fake tensor",
            marks=pytest.mark.long,
        ),
        ("pass", ""),
    ],
)
def test_a_model_that_trains_otherwise_when_compiled_costs_one_probe(
    tmp_path: Path, trick: str, why: str
) -> None:
    program = COMPILED.replace(
        "    def forward(self, x):", f"    def forward(self, x):\n        {trick}"
    )
    (tmp_path / "train.py").write_text(dedent(program))
    said: list[str] = []
    result = optimize(
        Script(f"{sys.executable} train.py", cwd=tmp_path, steps=10**9),
        runs_dir=tmp_path,
        name="compiled",
        search=SearchSettings(max_probes=4),
        report=False,
        progress=False,
        on_progress=lambda event: said.append(event.message),
    )
    left = [line for line in said if line.startswith("compile stays as it is")]
    assert [why in line for line in left] == [True] * bool(why), said
    compiled = [p for p in result.points if p.configuration.get("compile") == "true"]
    assert bool(compiled) is not bool(why)
