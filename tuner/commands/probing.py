"""`tuner probe`, `predict`, `record`, `calibrate` and `doctor`: no study, one thing at a time."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from search_spaces.errors import InputError
from tuner.commands.shared import FAILED, OK, Commands, add_script, answer, asked, script_of


def _predict(args: argparse.Namespace) -> int:
    """One configuration, by the analytic models: nothing is started."""
    from tuner.predict import enlarged, forecast, forecast_lines

    records: tuple[Any, ...] = ()
    probed_on = None
    if args.run is not None:
        from tuner.asked import known_cluster
        from tuner.runs import find_run
        from workload.trace import read_trace

        folder = find_run(args.run, args.runs_dir)
        records, probed_on = (
            read_trace(folder.trace).records,
            known_cluster(folder.read_asked() or {}),
        )
    job, cluster, configuration = asked(args, "a prediction", size=enlarged)
    said = forecast(job, cluster, configuration, records=records, probed_on=probed_on)
    answer(args, said.to_json(), forecast_lines(said))
    return OK


def _changed(job: Any, words: Sequence[str]) -> Any:
    """A script's configuration of today, but for KNOB=VALUE."""
    from search_spaces.configuration import Configuration
    from search_spaces.knobs import parse_value

    values = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not equals:
            raise InputError(f"give either the job {word!r} or --script")
        values[name] = parse_value(name, text)
    return Configuration.of({**job.baseline.launch, **values})


def _probe(args: argparse.Namespace) -> int:
    """One probe on this machine; needs neither Ray nor Optuna."""
    from contextlib import closing
    from datetime import datetime

    from search_spaces.cluster import load_cluster
    from search_spaces.errors import InvalidConfiguration
    from search_spaces.rules import broken_rules
    from workload.agent import LocalRunner, refused
    from workload.inspection import blank_job, inspect_script
    from workload.machine import detect_cluster
    from workload.probe import ProbeRequest
    from workload.trace import TraceWriter

    def say(sentence: str) -> None:
        if not args.quiet:
            print(sentence, file=sys.stderr, flush=True)

    script = script_of(args)
    if script is None:
        job, cluster, configuration = asked(args, "a probe")
    else:
        cluster = detect_cluster() if args.cluster == "auto" else load_cluster(args.cluster)
        job = blank_job(script, cluster)
        configuration = _changed(job, args.what)
    folder = Path(args.runs_dir) / f"probe-{datetime.now():%Y%m%d-%H%M%S}-{os.getpid()}"
    with closing(LocalRunner(job, cluster, run_dir=folder, say=say)) as runner:
        if script is not None:
            job = inspect_script(script, runner, cluster, say=say)
            configuration = _changed(job, args.what)
            for sentence in job.sentences():
                say(sentence)
        if phrases := refused(configuration, job) or broken_rules(configuration, job, cluster):
            raise InvalidConfiguration(configuration.key, phrases)
        request = ProbeRequest(
            "p0000",
            configuration.launch,
            (configuration.live,),
            time_limit_s=args.time_limit_s,
            purpose="probe",
        )
        say(f"probing {configuration.key}")
        record = runner.run(request)
    with TraceWriter(folder / "trace" / "probes.jsonl") as writer:
        writer.append(record)
    from tuner.summary import record_lines

    answer(args, record.to_json(), [*record_lines(record), f"record: {writer.path}"])
    return OK if record.ok else FAILED


def _record(args: argparse.Namespace) -> int:
    """Measure a space into a recorded table; needs neither Ray nor Optuna."""
    from contextlib import closing

    from search_spaces.cluster import load_cluster
    from search_spaces.job import load_job
    from search_spaces.rules import unrunnable
    from search_spaces.space import Candidates, load_space
    from workload.agent import LocalRunner
    from workload.machine import detect_cluster
    from workload.record import record_space

    job = load_job(args.job)
    cluster = detect_cluster() if args.cluster == "auto" else load_cluster(args.cluster)
    valid = load_space(args.space).candidates(job, cluster)
    able = [configuration for configuration in valid if not unrunnable(configuration, job)]
    if not able:
        raise InputError(f"of space {args.space!r} nothing can be run yet")

    def say(sentence: str) -> None:
        if not args.quiet:
            print(sentence, file=sys.stderr, flush=True)

    with closing(LocalRunner(job, cluster, run_dir=args.out, say=say)) as runner:
        done = record_space(
            runner,
            Candidates.from_configurations(able),
            args.out,
            workload=job.name,
            hardware=f"{cluster.devices} x {cluster.device.name}",
            sample=args.sample,
            seed=args.seed,
            say=say,
        )
    failed = sum(not record.ok for record in done.records)
    lines = [
        f"{done.rows} rows in {done.folder}/table.csv, from {len(done.records)} probes, "
        f"{failed} of them failed"
    ]
    said = {"folder": str(done.folder), "rows": done.rows, "probes": len(done.records)}
    answer(args, {**said, "failed": failed}, lines)
    return OK


def _calibrate(args: argparse.Namespace) -> int:
    from tuner.calibrate import calibrate

    calibration = calibrate(
        args.job,
        cluster=args.cluster,
        runs_dir=args.runs_dir,
        pairs=args.pairs,
        block_s=args.block_s,
        say=None if args.quiet else lambda sentence: print(sentence, file=sys.stderr, flush=True),
    )
    answer(args, calibration.to_json(), calibration.lines())
    return OK


def _doctor(args: argparse.Namespace) -> int:
    if args.ray is not None:
        from tuner.ray_cluster import survey

        seen = survey(args.ray, device_kind=args.device_kind)
        answer(args, seen.to_json(), seen.lines())
        return OK if seen.cluster is not None else FAILED
    from workload.machine import machine_facts

    facts = machine_facts()
    answer(args, facts.to_json(), facts.lines())
    return OK


def add(commands: Commands) -> None:
    """The commands of this module."""
    probe = commands.command("probe", _probe, "one probe on this machine, its record printed")
    probe.add_argument(
        "what", nargs="*", metavar="[JOB] KNOB=VALUE", help="job file or name; knobs"
    )
    probe.add_argument("--cluster", default="auto", metavar="NAME", help="auto, name or file")
    add_script(probe)
    probe.add_argument("--time-limit-s", type=float, default=300.0, metavar="X", help="killed then")
    probe.add_argument("--runs-dir", default="runs", metavar="DIR", help="where its folder is made")
    probe.add_argument("--quiet", action="store_true", help="no progress")

    record = commands.command(
        "record", _record, "measure a space, or part of it, into a recorded table"
    )
    record.add_argument("job", nargs="?", metavar="JOB", help="a job file or a name")
    record.add_argument("--cluster", default="auto", metavar="NAME", help="auto, name or file")
    record.add_argument("--space", default="default", metavar="NAME", help="name or file")
    record.add_argument("--sample", type=int, metavar="N", help="so many launches, at random")
    record.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw and order")
    record.add_argument("--out", required=True, metavar="DIR", help="the table's folder")
    record.add_argument("--quiet", action="store_true", help="no progress")

    calibrate = commands.command(
        "calibrate", _calibrate, "what metering costs here, and its sources"
    )
    calibrate.add_argument("job", nargs="?", metavar="JOB", help="a job file or a name")
    calibrate.add_argument("--cluster", default="auto", metavar="NAME", help="auto, name or file")
    calibrate.add_argument("--pairs", type=int, default=20, metavar="N", help="metered and not")
    calibrate.add_argument("--block-s", type=float, default=3.0, metavar="X", help="of each half")
    calibrate.add_argument("--runs-dir", default="runs", metavar="DIR", help="where it is kept")
    calibrate.add_argument("--quiet", action="store_true", help="no progress")

    predict = commands.command(
        "predict", _predict, "where one configuration's time and energy would go"
    )
    predict.add_argument(
        "what", nargs="*", metavar="[JOB] KNOB=VALUE", help="job file or name; knobs"
    )
    predict.add_argument("--cluster", default="auto", metavar="NAME", help="auto, name or file")
    predict.add_argument(
        "--target-gpus", type=int, metavar="N", help="as if it had so many devices"
    )
    predict.add_argument("--run", metavar="RUN", help="correct by the probes of this run")
    predict.add_argument("--runs-dir", default="runs", metavar="DIR", help="where runs are")
    doctor = commands.command(
        "doctor", _doctor, "what this machine, or each node of a Ray cluster, offers"
    )
    doctor.add_argument("--ray", metavar="ADDRESS", help="look at this Ray: auto or HOST:PORT")
    doctor.add_argument("--device-kind", metavar="NAME", help="the kind that would be used")
