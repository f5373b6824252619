"""What a script trains today in three lines, and in JSON."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from tests.support.scripts import CPU, script_job
from tests.support.studies import problem_of_job
from tuner.problem.study_spec import parse_job
from tuner.search_spaces.job import load_job
from tuner.search_spaces.knob_declarations import Knob
from tuner.workload.scripts.script_facts import ScriptFacts

SEEN = ScriptFacts(
    "torch",
    micro_batch=8,
    accumulation=2,
    counted=True,
    sources={
        "micro_batch": "counted in 3 steps",
        "accumulation": "the command",
        "steps": "--steps",
    },
)
COMMAND = "torchrun --nproc-per-node 2 train.py -t {threads=2} -a {gradient_accumulation=2}"


@pytest.mark.extra("tuner.workload.scripts.launchers")
@pytest.mark.usefixtures("launchers_here")
def test_each_value_is_told_with_its_source(tmp_path: Path) -> None:
    job = script_job(COMMAND, tmp_path, SEEN, (Knob("threads", (1, 2)),), global_batch=32)
    facts = job.today_facts()
    assert facts.lines == (
        "today: 2 ranks (torchrun), global batch 32 = micro-batch 8 x accumulation 2 x 2 replicas "
        "(micro-batch: counted in 3 steps; accumulation: the command)",
        "length: 100 optimizer steps (--steps)",
        "today's knobs: threads=2 (the command)",
    )
    # Of the baseline, not of the command, where the user gives another.
    problem = problem_of_job(job, CPU, baseline=["micro_batch=16"])
    changed = job.today_facts(problem.baseline)
    assert (changed.micro_batch, changed.accumulation, changed.global_batch) == (16, 1, 32)
    assert "(micro-batch and accumulation: --today)" in changed.lines[0]
    # It survives study.toml, and an older study reads as before.
    again = parse_job(json.loads(json.dumps(problem.identity)))
    assert again.today_facts() == facts
    assert "counted" not in json.loads(
        script_job("train.py", tmp_path, ScriptFacts()).to_json()["frame"]
    )


def test_what_is_unknown_is_null_and_says_what_would_tell_it(tmp_path: Path) -> None:
    job = script_job("train.py", tmp_path, ScriptFacts("torch"), global_batch=0, steps=None)
    facts = replace(job, devices=1).today_facts()
    assert facts.lines[0] == (
        "today: 1 rank (no launcher says more), global batch unknown (--global-batch N tells it)"
    )
    assert "energy and time are per optimizer step (--steps N gives the total)" in facts.lines[1]
    told = facts.to_json()
    assert [told[n] for n in ("global_batch", "micro_batch", "accumulation", "steps")] == [None] * 4
    assert (told["ranks"], told["replicas"]) == (1, 1)
    assert load_job("tiny-gpt").today_facts() is None
