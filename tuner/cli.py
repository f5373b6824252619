"""The command `tuner`.

Each command is one function that imports what it needs when it runs, so that `tuner --help` costs
no more than argparse. Answers go to standard output, progress to standard error. Bad input is one
sentence and exit code 2; an interrupt is one sentence on how to go on and exit code 130; a probe
that failed is exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn

from search_spaces.errors import InputError

__all__ = ["main"]

OK, FAILED, BAD_INPUT, INTERRUPTED = 0, 1, 2, 130


class _Parser(argparse.ArgumentParser):
    """argparse whose errors are one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(BAD_INPUT, f"{self.prog}: {message}; see {self.prog} --help\n")


def _answer(args: argparse.Namespace, data: Any, lines: Sequence[str]) -> None:
    """Print the answer: JSON where it was asked for, else the lines."""
    if args.json:
        from workload.trace import strict_json

        print(json.dumps(strict_json(data), indent=2, default=str))
    else:
        print("\n".join(lines))


def _printer(args: argparse.Namespace) -> Any:
    if args.quiet:
        return None
    from tuner.progress import ProgressPrinter

    return ProgressPrinter()


def _choices(args: argparse.Namespace) -> dict[str, Any]:
    names = (
        "budget_kJ",
        "deadline_s",
        "power_cap_W",
        "probe_budget_kJ",
        "max_probes",
        "search_s",
        "storage",
        "name",
        "runs_dir",
        "seed",
        "sampler",
    )
    return {name: getattr(args, name) for name in names}


def _optimize(args: argparse.Namespace) -> int:
    from tuner.api import optimize
    from tuner.summary import summary_lines

    if args.job and args.script:
        raise InputError(f"give either the job {args.job!r} or --script")
    result = optimize(
        _script(args) or args.job,
        cluster=args.cluster,
        space=args.space,
        executor=args.executor,
        in_flight=args.in_flight,
        on_progress=_printer(args),
        **_choices(args),
    )
    _answer(args, result.to_json(), ["", *summary_lines(result)])
    return OK if result.points else FAILED


def _replay(args: argparse.Namespace) -> int:
    from tuner.api import replay
    from tuner.summary import summary_lines

    result = replay(
        args.path,
        group=args.group,
        steps=args.steps,
        in_flight=args.in_flight,
        on_progress=_printer(args),
        **_choices(args),
    )
    _answer(args, result.to_json(), ["", *summary_lines(result)])
    return OK if result.points else FAILED


def _asked(
    args: argparse.Namespace, what: str, size: Callable[[Any, int], Any] | None = None
) -> tuple[Any, Any, Any]:
    """Job, cluster and configuration of a command that takes [JOB] KNOB=VALUE."""
    from search_spaces.cluster import load_cluster
    from search_spaces.configuration import Configuration
    from search_spaces.job import load_job
    from search_spaces.knobs import Value, parse_value
    from search_spaces.space import default_configuration
    from workload.machine import detect_cluster

    jobs = [word for word in args.what if "=" not in word]
    if len(jobs) > 1:
        raise InputError(f"{jobs[1]!r} is a second job; {what} takes one job and KNOB=VALUE")
    values: dict[str, Value] = {}
    for word in args.what:
        name, equals, text = word.partition("=")
        if equals:
            values[name] = parse_value(name, text)
    job = load_job(jobs[0] if jobs else None)
    cluster = detect_cluster() if args.cluster == "auto" else load_cluster(args.cluster)
    if size is not None and args.target_gpus is not None:
        cluster = size(cluster, args.target_gpus)
    return job, cluster, Configuration.of(values) if values else default_configuration(job, cluster)


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
    job, cluster, configuration = _asked(args, "a prediction", size=enlarged)
    said = forecast(job, cluster, configuration, records=records, probed_on=probed_on)
    _answer(args, said.to_json(), forecast_lines(said))
    return OK


def _script(args: argparse.Namespace) -> Any:
    """The user's script; None where the command names none."""
    told = ("steps", "global_batch", "sequence_length", "model_config")
    if args.script is None:
        for name in told:
            if getattr(args, name) is not None:
                option = name.replace("_", "-")
                raise InputError(f"--{option} is for --script; a job says it itself")
        return None
    from workload.script import Script

    return Script(args.script, **{name: getattr(args, name) for name in told})


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

    script = _script(args)
    if script is None:
        job, cluster, configuration = _asked(args, "a probe")
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

    _answer(args, record.to_json(), [*record_lines(record), f"record: {writer.path}"])
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
    answer = {"folder": str(done.folder), "rows": done.rows, "probes": len(done.records)}
    _answer(args, {**answer, "failed": failed}, lines)
    return OK


def _front(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.summary import summary_lines

    result = load_result(args.run, runs_dir=args.runs_dir)
    _answer(args, result.to_json(), summary_lines(result))
    return OK


def _compare(args: argparse.Namespace) -> int:
    from tuner.api import load_result

    comparison = load_result(args.run, runs_dir=args.runs_dir).compare(args.a, args.b)
    _answer(args, comparison.to_json(), comparison.lines())
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
    _answer(args, calibration.to_json(), calibration.lines())
    return OK


def _report(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.report import write_report
    from tuner.runs import find_run
    from workload.trace import read_trace

    folder = find_run(args.run, args.runs_dir)
    result = load_result(folder.path)
    records = read_trace(folder.trace).records if folder.trace.exists() else ()
    path = write_report(result, Path(args.out or folder.report), records=records)
    _answer(args, {"report": str(path)}, [f"Report: {path}"])
    return OK


def _dashboard(args: argparse.Namespace) -> int:
    from tuner.dashboard import serve
    from tuner.runs import find_run

    folder = find_run(args.run, args.runs_dir)
    url = f"http://{args.host}:{args.port}/"
    _answer(args, {"url": url, "run": folder.name}, [f"{folder.name} at {url} (Ctrl-C ends it)"])
    sys.stdout.flush()
    serve(args.storage or folder.journal, host=args.host, port=args.port)
    return OK


def _apply(args: argparse.Namespace) -> int:
    from tuner.api import load_result
    from tuner.launch_files import write_launch_files
    from tuner.runs import find_run

    folder = find_run(args.run, args.runs_dir)
    result = load_result(folder.path)
    out = Path(args.out or folder.path / "best")
    files = [str(path) for path in write_launch_files(result, out)]
    chosen = result.best.to_json() if result.best else None
    _answer(args, {"files": files, "best": chosen}, [result.choice.sentence, *files])
    return OK


def _doctor(args: argparse.Namespace) -> int:
    from workload.machine import machine_facts

    facts = machine_facts()
    _answer(args, facts.to_json(), facts.lines())
    return OK


def _columns(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return ["  ".join(c.ljust(w) for c, w in zip(r, widths, strict=True)).rstrip() for r in rows]


def _jobs(args: argparse.Namespace) -> int:
    from search_spaces.job import job_names, load_job

    jobs = [load_job(name) for name in job_names()]
    rows = [
        (
            job.name,
            str(job.model.get("model_type")),
            f"sequences of {job.sequence_length} tokens, {job.global_batch} a step",
            f"{job.steps:,} steps",
            job.precision,
        )
        for job in jobs
    ]
    _answer(args, [{**job.to_json(), "model": dict(job.model)} for job in jobs], _columns(rows))
    return OK


def _clusters(args: argparse.Namespace) -> int:
    from dataclasses import asdict

    from search_spaces.cluster import cluster_names, load_cluster

    clusters = [load_cluster(name) for name in cluster_names()]
    rows = [
        (
            cluster.name,
            f"{cluster.nodes} node{'s' * (cluster.nodes != 1)}",
            f"{cluster.devices_per_node} x {cluster.device.name}",
            "clocks can be set" if cluster.clock_control else "clocks cannot be set",
        )
        for cluster in clusters
    ]
    _answer(args, [asdict(cluster) for cluster in clusters], _columns(rows))
    return OK


def _spaces(args: argparse.Namespace) -> int:
    from search_spaces.space import load_space, space_names

    spaces = [load_space(name) for name in space_names()]
    _answer(
        args,
        [{"name": s.name, "what": s.what, "knobs": sorted(s.choices)} for s in spaces],
        _columns([(space.name, space.what) for space in spaces]),
    )
    return OK


def _add_choices(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--budget-kJ", type=float, metavar="X", help="energy that the training job may use")
    add("--deadline-s", type=float, metavar="X", help="time that the training job may take")
    add("--power-cap-W", type=float, metavar="X", help="bound on the job's average power")
    add("--probe-budget-kJ", type=float, metavar="X", help="energy that the search may use")
    add("--max-probes", type=int, metavar="N", help="probes that the search may make")
    add("--search-s", type=float, metavar="X", help="no probe starts after this many seconds")
    add("--storage", metavar="URL", help="the study's database (default: a journal in the run)")
    add("--name", metavar="NAME", help="the run; one that stands goes on where it stopped")
    add("--runs-dir", default="runs", metavar="DIR", help="where runs are (default: runs)")
    add("--seed", type=int, default=0, metavar="N", help="of everything random (default: 0)")
    add("--sampler", metavar="NAME", help="joulefront (default), tpe, nsgaii, gp or random")
    add("--quiet", action="store_true", help="no progress")


def _add_script(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--script", metavar="CMD", help='your own training script, "train.py --data DIR"')
    add("--steps", type=int, metavar="N", help="of a script: optimizer steps of the solution")
    add("--global-batch", type=int, metavar="N", help="of a script: samples a step, if unknown")
    add("--sequence-length", type=int, metavar="N", help="of a script: tokens a sample")
    add("--model-config", type=Path, metavar="FILE", help="of a script: Hugging Face config.json")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="tuner",
        description="Tunes the configuration of a training job for energy and time together.",
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", parser_class=_Parser)

    def command(name: str, run: Any, what: str) -> argparse.ArgumentParser:
        added: argparse.ArgumentParser = commands.add_parser(name, help=what, description=what)
        added.add_argument("--json", action="store_true", help="the answer as JSON")
        added.set_defaults(run_command=run)
        return added

    def of_run(name: str, run: Any, what: str) -> argparse.ArgumentParser:
        added = command(name, run, what)
        added.add_argument("run", nargs="?", metavar="RUN", help="name or folder (default: latest)")
        added.add_argument("--runs-dir", default="runs", metavar="DIR", help="where runs are")
        return added

    optimize = command("optimize", _optimize, "tune a job on this machine or cluster")
    optimize.add_argument("job", nargs="?", metavar="JOB", help="a job file or a name")
    optimize.add_argument("--cluster", default="auto", metavar="NAME", help="auto, name or file")
    optimize.add_argument("--space", default="default", metavar="NAME", help="name or file")
    optimize.add_argument(
        "--executor",
        metavar="NAME",
        help="ray, inline or simulated (default: simulated for another kind of machine, else ray)",
    )
    optimize.add_argument("--in-flight", type=int, metavar="N", help="probes together, simulated")
    _add_script(optimize)
    _add_choices(optimize)

    replay = command("replay", _replay, "the same study, answered from a trace or a table")
    replay.add_argument("path", metavar="PATH", help="a table's folder, a run, or a trace")
    replay.add_argument("--group", metavar="NAME", help="which search problem of the table")
    replay.add_argument("--steps", type=int, metavar="N", help="units of work of the solution")
    replay.add_argument("--in-flight", type=int, default=1, metavar="N", help="probes together")
    _add_choices(replay)

    probe = command("probe", _probe, "one probe on this machine, its record printed")
    probe.add_argument(
        "what", nargs="*", metavar="[JOB] KNOB=VALUE", help="job file or name; knobs"
    )
    probe.add_argument("--cluster", default="auto", metavar="NAME", help="auto, name or file")
    _add_script(probe)
    probe.add_argument("--time-limit-s", type=float, default=300.0, metavar="X", help="killed then")
    probe.add_argument("--runs-dir", default="runs", metavar="DIR", help="where its folder is made")
    probe.add_argument("--quiet", action="store_true", help="no progress")

    record = command("record", _record, "measure a space, or part of it, into a recorded table")
    record.add_argument("job", nargs="?", metavar="JOB", help="a job file or a name")
    record.add_argument("--cluster", default="auto", metavar="NAME", help="auto, name or file")
    record.add_argument("--space", default="default", metavar="NAME", help="name or file")
    record.add_argument("--sample", type=int, metavar="N", help="so many launches, at random")
    record.add_argument("--seed", type=int, default=0, metavar="N", help="of the draw and order")
    record.add_argument("--out", required=True, metavar="DIR", help="the table's folder")
    record.add_argument("--quiet", action="store_true", help="no progress")

    calibrate = command("calibrate", _calibrate, "what metering costs here, and its sources")
    calibrate.add_argument("job", nargs="?", metavar="JOB", help="a job file or a name")
    calibrate.add_argument("--cluster", default="auto", metavar="NAME", help="auto, name or file")
    calibrate.add_argument("--pairs", type=int, default=20, metavar="N", help="metered and not")
    calibrate.add_argument("--block-s", type=float, default=3.0, metavar="X", help="of each half")
    calibrate.add_argument("--runs-dir", default="runs", metavar="DIR", help="where it is kept")
    calibrate.add_argument("--quiet", action="store_true", help="no progress")

    predict = command("predict", _predict, "where one configuration's time and energy would go")
    predict.add_argument(
        "what", nargs="*", metavar="[JOB] KNOB=VALUE", help="job file or name; knobs"
    )
    predict.add_argument("--cluster", default="auto", metavar="NAME", help="auto, name or file")
    predict.add_argument(
        "--target-gpus", type=int, metavar="N", help="as if it had so many devices"
    )
    predict.add_argument("--run", metavar="RUN", help="correct by the probes of this run")
    predict.add_argument("--runs-dir", default="runs", metavar="DIR", help="where runs are")

    of_run("front", _front, "the front of a run and the choice on it")
    compare = of_run("compare", _compare, "by how much one measured point differs from another")
    for name, default in (("a", "baseline"), ("b", "best")):
        what = f'"best", "baseline" or a configuration\'s key (default: {default})'
        flag = "--from" if name == "a" else "--to"
        compare.add_argument(flag, dest=name, default=default, metavar="POINT", help=what)
    out = of_run("report", _report, "write a run's report")
    out.add_argument("--out", metavar="FILE", help="where to (default: report.html in the run)")
    dashboard = of_run("dashboard", _dashboard, "serve a run's study in optuna-dashboard")
    dashboard.add_argument("--storage", metavar="URL", help="where the study was kept by URL")
    dashboard.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    dashboard.add_argument("--port", type=int, default=8080, help="port (default: 8080)")
    out = of_run("apply", _apply, "write the files that start the job as chosen")
    out.add_argument("--out", metavar="DIR", help="where to (default: best in the run)")
    command("doctor", _doctor, "what this machine offers")
    command("jobs", _jobs, "the jobs that are named")
    command("clusters", _clusters, "the clusters that are named")
    command("spaces", _spaces, "the search spaces that are named")
    return parser


def _interrupted(signum: int, frame: object) -> NoReturn:
    raise KeyboardInterrupt


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code: 0, 1 (a failed probe), 2 (bad input) or 130."""
    parser = _parser()
    args = parser.parse_args(argv)
    if args.command is None:
        parser.print_help()
        return OK
    before = signal.signal(signal.SIGTERM, _interrupted)  # a polite kill cleans up as Ctrl-C does
    try:
        code: int = args.run_command(args)
        sys.stdout.flush()
        return code
    except InputError as error:
        print(f"tuner: {error}", file=sys.stderr)
        return BAD_INPUT
    except KeyboardInterrupt as error:
        run = getattr(error, "run", None)
        if run is not None:
            print(
                f"tuner: interrupted; every finished probe is in {run.path}, and the same command "
                f"with --name {run.name} goes on from there",
                file=sys.stderr,
            )
        else:
            print("tuner: interrupted", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:
        # Whoever read the output has gone; nothing is left to say, not even at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    finally:
        signal.signal(signal.SIGTERM, before)


if __name__ == "__main__":
    sys.exit(main())
