"""The kinds of bad input: what each one bends, and whom it is given to.

Each kind makes once, in a folder, what all of its inputs share, and returns the function that tries
one input: mostly the command itself, in this process, else the reader of that file. A file outside
the folder, a password in a sentence or a value that bash would run is a `Leak`.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import re
import shutil
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock

from tests.fuzz.mutate import Draw, as_json, as_toml, bent, bent_file, nasty, torn
from tuner.search_spaces.errors import InputError

DATA = Path(__file__).parents[1] / "data"


def _data(kind: str, name: str) -> str:
    return (resources.files("tuner.search_spaces") / "data" / kind / name).read_text(
        encoding="utf-8"
    )


class Leak(Exception):
    """Something was touched that the input should not reach."""


@dataclass(frozen=True)
class Kind:
    """One kind of input.

    Attributes:
        name: as in the table.
        prepare: makes what all inputs of the kind share, in a folder; returns the try.
        share: of all inputs.
    """

    name: str
    prepare: Callable[[Path], Callable[[Draw], Any]]
    share: float = 1.0


@functools.cache
def parser() -> Any:
    """Return the command's parser, made once in a place: it takes longer than most inputs."""
    from tuner.cli.main import command_parser

    return command_parser()


def command(*words: str) -> None:
    """Run the command in this process; raise where it ends as it must not."""
    from tuner.cli import main as cli

    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        mock.patch.object(cli, "command_parser", return_value=parser()),
    ):
        try:
            code = cli.main(words)
        except SystemExit as stop:  # argparse: its own sentence
            code = stop.code if isinstance(stop.code, int) else 1
    said = err.getvalue()
    if code not in (0, 1, 2, 3):  # 3: no configuration meets the limits, as in the kept run
        raise AssertionError(f"exit code {code}: {said}")
    if code == 2 and len(said.strip().splitlines()) != 1:
        raise AssertionError(f"not one sentence: {said!r}")


def _jobs(folder: Path) -> Callable[[Draw], Any]:
    sound = tomllib.loads(_data("jobs", "tiny-gpt.toml"))
    path = folder / "job.toml"

    def one(draw: Draw) -> None:
        bent_file(path, sound, as_toml, draw)
        command("fit", str(path), "--cluster", "a100-8")

    return one


def _models(folder: Path) -> Callable[[Draw], Any]:
    names = ("tiny-gpt", "tiny-qwen2.5", "tiny-olmoe", "opt-350m")
    sounds = [json.loads(_data("models", f"{name}.json")) for name in names]
    job = tomllib.loads(_data("jobs", "tiny-gpt.toml"))
    (folder / "checkpoint").mkdir()
    (folder / "job.toml").write_bytes(as_toml({**job, "model": {"config": "model.json"}}))

    def one(draw: Draw) -> None:
        asked = draw.choice(("job.toml", "checkpoint"))  # of a job, and as a stranger's folder
        name = "model.json" if asked == "job.toml" else "checkpoint/config.json"
        bent_file(folder / name, draw.choice(sounds), as_json, draw)
        command("fit", str(folder / asked), "--cluster", "a100-8")

    return one


def _clusters(folder: Path) -> Callable[[Draw], Any]:
    sounds = [
        tomllib.loads(_data("clusters", f"{n}.toml")) for n in ("a100-8", "cpu-2", "gh200-32")
    ]
    path = folder / "cluster.toml"

    def one(draw: Draw) -> None:
        bent_file(path, draw.choice(sounds), as_toml, draw)
        command("fit", "tiny-gpt", "--cluster", str(path))

    return one


def _devices(folder: Path) -> Callable[[Draw], Any]:
    every = tomllib.loads(_data("catalogue", "devices.toml"))
    of_node = ("node", "also_called", "devices_per_board")
    sounds = [
        {key: value for key, value in every[name].items() if key not in of_node}
        for name in ("A100-SXM-80GB", "GH200-96GB", "cpu-core")
    ]
    cluster = tomllib.loads(_data("clusters", "a100-8.toml"))
    device = {"device": str(folder / "device.toml")}
    (folder / "cluster.toml").write_bytes(as_toml({**cluster, **device}))

    def one(draw: Draw) -> None:
        bent_file(folder / "device.toml", draw.choice(sounds), as_toml, draw)
        command("fit", "tiny-gpt", "--cluster", str(folder / "cluster.toml"))

    return one


def _spaces(folder: Path) -> Callable[[Draw], Any]:
    from tuner.search_spaces.cluster import load_cluster
    from tuner.search_spaces.job import load_job
    from tuner.search_spaces.space import load_space

    names = ("default", "clocks", "parallelism")
    sounds = [tomllib.loads(_data("spaces", f"{name}.toml")) for name in names]
    job, clusters = load_job("tiny-gpt"), [load_cluster("cpu-2"), load_cluster("a100-8")]
    path = folder / "space.toml"

    def one(draw: Draw) -> None:
        bent_file(path, draw.choice(sounds), as_toml, draw)
        load_space(path).candidates(job, draw.choice(clusters))

    return one


def _words(folder: Path) -> Callable[[Draw], Any]:
    from tuner.search_spaces.knobs import KNOBS

    def one(draw: Draw) -> None:
        words = []
        for _ in range(draw.randrange(1, 5)):
            name = draw.choice((*KNOBS, "zzz", "", "clock_MHz"))
            value = draw.choice((1, 2, 4, 8, "none", "cpu", "full", "900,1200", "1e9", nasty(draw)))
            with contextlib.suppress(ValueError):
                words.append(f"{name}={value}".replace("\x00", ""))
        # A word that begins with a dash is an option to argparse, and its sentence shows it whole.
        words = [word for word in words if not word.startswith("-")]
        command("fit", "tiny-gpt", *words, "--cluster", "a100-8")

    return one


def _run(folder: Path) -> Path:
    """Copy a small run."""
    run = folder / "runs" / "kept"
    shutil.copytree(DATA / "measured", run)
    trace = run / "trace" / "probes.jsonl"
    trace.write_bytes(b"".join(trace.read_bytes().splitlines(keepends=True)[:3]))
    return run


def _ask_run(run: Path, draw: Draw) -> None:
    at = ["--runs-dir", str(run.parent)]
    which = draw.random()
    if which < 0.75:
        command("show", str(run), *at)
    elif which < 0.85:
        command("apply", str(run), *at, "--out", str(run / "best"))
        script = run / "best" / "launch.sh"
        if script.exists():
            _check_script(script)
    elif which < 0.9:
        command("show", "--html", str(run), *at, "--out", str(run / "report.html"))
    else:
        command("compare", str(run), *at)


def _check_script(script: Path) -> None:
    """Return what bash would run of a launch.sh: its words, with nothing of them substituted."""
    import subprocess

    text = script.read_text(encoding="utf-8")
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, check=False)
    if done.returncode:
        raise Leak(f"launch.sh is no longer a script: {done.stderr!r}")
    inside = re.sub(r"'[^']*'", "", text)  # what is quoted is a word, whatever it says
    if "touch pwned" in inside and not all(
        line.startswith("#") for line in inside.splitlines() if "touch pwned" in line
    ):
        raise Leak(f"launch.sh holds a value unquoted: {inside}")


def _traces(folder: Path) -> Callable[[Draw], Any]:
    run = _run(folder)
    trace = run / "trace" / "probes.jsonl"
    lines = trace.read_bytes().splitlines()
    records = [json.loads(line) for line in lines]

    def one(draw: Draw) -> None:
        at = draw.randrange(len(records))
        if draw.random() < 0.25:
            trace.write_bytes(torn(b"\n".join(lines) + b"\n", draw))
        else:
            mine = list(lines)
            mine[at] = as_json(bent(records[at], draw))
            trace.write_bytes(b"\n".join(mine) + b"\n")
        _ask_run(run, draw)

    return one


def _studies(folder: Path) -> Callable[[Draw], Any]:
    run = _run(folder)
    sound = tomllib.loads((run / "study.toml").read_text(encoding="utf-8"))

    def one(draw: Draw) -> None:
        bent_file(run / "study.toml", sound, as_toml, draw)
        _ask_run(run, draw)

    return one


def _powers(folder: Path) -> Callable[[Draw], Any]:
    from tuner.workload.records.trace import read_power

    path = folder / "p0000.csv.gz"
    rows = ["time_s,power_W,clock_MHz,phase"] + [f"{t / 10:.1f},{200 + t},1410," for t in range(20)]
    sound = ("\n".join([*rows, "0.5,,,forward"]) + "\n").encode()

    def one(draw: Draw) -> None:
        if draw.random() < 0.2:
            path.write_bytes(torn(gzip.compress(sound, mtime=0), draw))
        else:
            path.write_bytes(gzip.compress(torn(sound, draw), compresslevel=1))
        read_power(path)

    return one


def _tables(folder: Path) -> Callable[[Draw], Any]:
    import optuna_dashboard  # noqa: F401 - it imports torch, which no alarm should interrupt

    from tests.support.studies import write_table
    from tuner.recorded.table import TableRunner, load_table

    table = write_table(folder / "table", shapes=(1, 2))
    layout = tomllib.loads((table / "table.toml").read_text())
    rows = (table / "table.csv").read_bytes()

    def one(draw: Draw) -> None:
        (table / "table.csv").write_bytes(rows)
        bent_file(table / "table.toml", layout, as_toml, draw)
        if draw.random() < 0.5:
            (table / "table.toml").write_bytes(as_toml(layout))
            cells = rows.decode().split("\n")
            at = draw.randrange(len(cells))
            words = cells[at].split(",")
            words[draw.randrange(len(words))] = str(
                draw.choice(("", "nan", "-1", "x", "1e400", "0"))
            )
            cells[at] = ",".join(words)
            (table / "table.csv").write_bytes(torn("\n".join(cells).encode(), draw))
        if draw.random() < 0.03:
            words_ = ["--max-probes", "2", "--quiet", "--runs-dir", str(folder / "runs")]
            command("replay", str(table), "--name", f"r{draw.random()}".replace(".", ""), *words_)
            return
        loaded = load_table(table)
        for group in loaded.groups:
            TableRunner(loaded, group.name)

    return one


def _deepspeed(folder: Path) -> Callable[[Draw], Any]:
    from tuner.search_spaces.cluster import load_cluster
    from tuner.search_spaces.configuration import Configuration
    from tuner.workload import hook
    from tuner.workload.scripts.command import Script
    from tuner.workload.scripts.inspection import blank_job

    sound = {
        "train_batch_size": 16,
        "train_micro_batch_size_per_gpu": 4,
        "gradient_accumulation_steps": 2,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
        "bf16": {"enabled": True},
        "activation_checkpointing": {"partition_activations": False},
    }
    (folder / "train.py").write_text("import deepspeed\n")
    path = folder / "ds.json"
    cluster = load_cluster("a100-8")
    wanted = Configuration.of(data_parallel=2, micro_batch=4, zero_stage=1)

    def one(draw: Draw) -> None:
        bent_file(path, sound, as_json, draw)
        script = Script(
            f"{folder}/train.py --deepspeed {path}", steps=10, global_batch=8, cwd=folder
        )
        job = blank_job(script, cluster)
        job.refused(wanted)
        job.start(wanted, folder / "probe")
        with contextlib.suppress(ValueError):  # no JSON: `start` has said so
            config = json.loads(path.read_bytes())
            if isinstance(config, dict):
                hook.micro_batches(config, 2)
                hook.split_differently(config, 2)
                hook.merge(config, {"zero_optimization": {"stage": 1}, "fp16": None})

    return one


def _urls(folder: Path) -> Callable[[Draw], Any]:
    from tuner.storage import open_storage

    parts = (
        "sqlite:///",
        "postgresql://",
        "u:hunter2@",
        "@",
        ":",
        "/",
        "?password=hunter2",
        "h",
        "db",
    )

    def one(draw: Draw) -> None:
        url = "".join(draw.choice(parts) for _ in range(draw.randrange(1, 6)))
        if draw.random() < 0.2:
            url += str(draw.choice(("\x00", "\n", "é", "%zz", "[::1", "x" * 300)))
        if "sqlite" not in url and "postgresql://" not in url:
            try:
                open_storage(url, folder / "journal")
            except InputError as error:
                if "hunter2" in str(error):
                    raise Leak(f"the password is shown: {error}") from None

    return one


KINDS: tuple[Kind, ...] = (
    Kind("jobs", _jobs),
    Kind("model configs", _models),
    Kind("clusters", _clusters, 0.5),
    Kind("devices", _devices, 0.5),
    Kind("spaces", _spaces),
    Kind("configurations", _words),
    Kind("traces", _traces, 0.5),
    Kind("study.toml", _studies, 0.5),
    Kind("power samples", _powers, 2.0),
    Kind("recorded tables", _tables, 0.5),
    Kind("DeepSpeed JSON", _deepspeed, 2.0),
    Kind("storage URLs", _urls, 0.5),
)
