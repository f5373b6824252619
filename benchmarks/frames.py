"""Unmodified training scripts of every framework: the knobs that were varied, and launch times.

Each script is inspected once and then probed on two ranks of this machine: unchanged, and once for
each knob that can be searched. The included scripts are small and written in the ordinary style of
their framework (tests/scripts); `--script` adds another one, as for `tuner optimize`. The launch
time is from the request to the first measured step. The first probe of each script is reported
separately, because the fork server imports a framework other than DeepSpeed only when needed.
"""

from __future__ import annotations

import json
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, arguments, publish
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.knobs import Value
from tuner.search_spaces.rules import broken_rules
from tuner.workload.node.machine import detect_cluster
from tuner.workload.node.runner import LocalRunner
from tuner.workload.probe import ProbeRecord, ProbeRequest, WindowPolicy
from tuner.workload.scripts.command import LAUNCH, Script
from tuner.workload.scripts.inspection import blank_job, inspect_script
from tuner.workload.scripts.script_job import ScriptJob

SCRIPTS = Path(__file__).parents[1] / "tests" / "scripts"
QUICK = WindowPolicy(min_s=0.2, min_steps=3, max_s=0.5)
TRAINER = (
    "hf_trainer.py --output_dir out --use_cpu --max_steps 1000000 "
    "--per_device_train_batch_size 4 --gradient_accumulation_steps 2"
)
#: Frame, command, and what must be installed beside torch.
FRAMES: tuple[tuple[str, str, str], ...] = (
    ("DeepSpeed", "plain_deepspeed.py --deepspeed --deepspeed_config ds.json", "deepspeed"),
    ("Trainer + DeepSpeed", f"{TRAINER} --deepspeed auto.json", "accelerate"),
    ("Trainer", TRAINER, "accelerate"),
    ("Accelerate", "bare_accelerate.py", "accelerate"),
    ("Lightning", "lightning_module.py", "lightning"),
    ("plain DDP", "plain_torch.py", "torch"),
    (
        "own flags",
        "plain_torch.py --batch-size {micro_batch=4} --accumulation {gradient_accumulation=2}",
        "torch",
    ),
)
#: What is tried of each knob where it is in play, with what it needs beside itself.
TRIED: tuple[dict[str, Value], ...] = (
    {"micro_batch": 2},
    {"data_parallel": 1},
    {"zero_stage": 1},
    {"zero_stage": 3},
    {"zero_stage": 2, "optimizer_offload": "cpu"},
    {"zero_stage": 3, "parameter_offload": "cpu"},
    {"activation_checkpointing": "full"},
    {"pipeline_parallel": 2, "data_parallel": 1},
)


@dataclass
class Tried:
    """What became of one script.

    Attributes:
        frame: what it was listed as.
        command: as named.
        job: what the look found; None where it did not come to its first step.
        why: the reason then.
        look_s: seconds of the look.
        probes: what was varied, and the record.
    """

    frame: str
    command: str
    job: ScriptJob | None = None
    why: str = ""
    look_s: float = 0.0
    probes: list[tuple[str, ProbeRecord]] = field(default_factory=list)

    @property
    def launches_s(self) -> list[float]:
        return [record.launch_s for _, record in self.probes if record.ok]

    def lines(self) -> list[str]:
        """The script's rows of the table."""
        first = f"{self.frame:20} "
        if self.job is None:
            return [f"{first}not run here: {self.why}"]
        offers = self.job.offers
        turned = [name for name in LAUNCH if offers[name].turned]
        launches = self.launches_s
        cost = "no probe succeeded"
        if launches:
            later = f", later {statistics.median(launches[1:]):.1f} s" if launches[1:] else ""
            cost = f"first {launches[0]:.1f} s{later}"
        lines = [f"{first}run; look {self.look_s:.1f} s, launch of a probe: {cost}"]
        lines.append(f"{'':20} in play: {', '.join(turned) or 'no launch knob'}")
        reasons: dict[str, list[str]] = {}
        for name in LAUNCH:
            if name not in turned:
                reasons.setdefault(offers[name].why, []).append(name)
        lines += [f"{'':20} not: {', '.join(names)}: {why}" for why, names in reasons.items()]
        for what, record in self.probes:
            said = "ran" if record.failure is None else f"FAILED: {record.failure.message}"
            lines.append(f"{'':20} {what}: {said}")
        return lines


def variations(job: ScriptJob, cluster: Cluster) -> list[Configuration]:
    """Today's configuration, and one for each of `TRIED` that can be turned on the script."""
    found = [job.baseline]
    for knobs in TRIED:
        wanted = {**job.baseline.launch, **knobs}
        configuration = Configuration.of(wanted)
        if all(
            job.offers[name].turned or job.baseline.get(name) == v for name, v in knobs.items()
        ) and not (job.refused(configuration) or broken_rules(configuration, job, cluster)):
            found.append(configuration)
    return list(dict.fromkeys(found))


def try_script(frame: str, script: Script, runner: LocalRunner, cluster: Cluster) -> Tried:
    """Look at a script and probe it."""
    tried = Tried(frame, script.command)
    seconds: list[str] = []
    try:
        blank = blank_job(script, cluster)
        runner.turn_to(blank)
        folder = runner.node.run_dir
        tried.job = job = inspect_script(
            script, blank, runner.run_of, cluster=cluster, folder=folder, say=seconds.append
        )
        runner.turn_to(job)
    except InputError as error:
        tried.why = str(error)
        return tried
    tried.look_s = next((float(s.split()[2]) for s in seconds if s.startswith("that took")), 0.0)
    for number, configuration in enumerate(variations(job, cluster)):
        changed = {k: v for k, v in configuration.launch.items() if v != job.baseline.get(k)}
        what = " ".join(f"{k}={v}" for k, v in changed.items()) or "as it is"
        name = f"{frame.replace(' ', '')}-{number}"
        request = ProbeRequest(name, configuration.launch, window=QUICK, time_limit_s=180.0)
        tried.probes.append((what, runner.run(request)))
    return tried


def user_folder(where: Path) -> Path:
    """A copy of the scripts, as a user's repository, with the configurations that they name."""
    folder = where / "repository"
    shutil.copytree(SCRIPTS, folder)
    adam = {"type": "AdamW", "params": {"lr": "auto", "torch_adam": True}}
    plain = {"train_batch_size": 16, "train_micro_batch_size_per_gpu": 4}
    sizes: dict[str, Any] = dict.fromkeys([*plain, "gradient_accumulation_steps"], "auto")
    auto = {**sizes, "optimizer": adam, "zero_optimization": {"stage": 1}}
    (folder / "ds.json").write_text(json.dumps(plain))
    (folder / "auto.json").write_text(json.dumps(auto))
    return folder


def installed(module: str) -> bool:
    from importlib.util import find_spec

    return find_spec(module) is not None


def frames(cluster: Cluster, runs: Path, only: Sequence[str] = ()) -> list[Tried]:
    """Try the scripts of our own, each printed as it is done."""
    folder = user_folder(runs)
    done = []
    for frame, command, needs in FRAMES:
        if only and frame not in only:
            continue
        if not installed(needs):
            done.append(Tried(frame, command, why=f"{needs} is not installed"))
        else:
            started = f"torchrun --nproc-per-node {cluster.devices_per_node} {command}"
            done.append(_fresh(frame, Script(started, cwd=folder), cluster, runs))
        print("\n".join(done[-1].lines()), flush=True)
    return done


def _fresh(frame: str, script: Script, cluster: Cluster, runs: Path) -> Tried:
    """With a fork server of its own, so that no script finds what another one imported."""
    runner = LocalRunner(blank_job(script, cluster), cluster, run_dir=runs)
    try:
        runner.prepare()
        return try_script(frame, script, runner, cluster)
    finally:
        runner.close()


def main() -> None:
    parser = arguments("training scripts, unmodified: what was varied, what a launch costs")
    parser.add_argument("--script", action="append", default=[], metavar="COMMAND")
    parser.add_argument("--frame", action="append", default=[], help="only these")
    parser.add_argument("--own", action="store_true", help="none of ours, only --script")
    options = parser.parse_args()
    cluster = replace(detect_cluster(), devices_per_node=2, nodes=1)
    with tempfile.TemporaryDirectory() as folder:
        done = [] if options.own else frames(cluster, Path(folder), options.frame)
        for number, command in enumerate(options.script):
            done.append(_fresh(f"script {number + 1}", Script(command), cluster, Path(folder)))
            print(f"{command}\n" + "\n".join(done[-1].lines()), flush=True)
    figures = [
        Figure("scripts_run", sum(tried.job is not None for tried in done), "count"),
        Figure("scripts_not_run", sum(tried.job is None for tried in done), "count"),
        Figure("probes_run", sum(len(tried.launches_s) for tried in done), "count"),
        Figure("probes_failed", sum(not r.ok for t in done for _, r in t.probes), "count"),
    ]
    for tried in done:
        if launches := tried.launches_s:
            name = tried.frame.lower().replace(" + ", "_").replace(" ", "_")
            figures.append(Figure(f"{name}_first_launch_s", launches[0], "s"))
            if launches[1:]:
                later = statistics.median(launches[1:])
                figures.append(Figure(f"{name}_later_launch_s", later, "s"))
    publish(figures, options.json)


if __name__ == "__main__":
    main()
