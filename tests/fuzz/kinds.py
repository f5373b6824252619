"""The kinds of bad input: sound files and lines, how each is bent, and whom it is given to.

Each kind makes once, in a folder, what all of its inputs share, and returns the function that tries
one input: by the command itself, in this process, or by the reader of that file. A file outside the
folder, a password in a sentence or a value that bash would run is a `Leak`.
"""

from __future__ import annotations

import contextlib
import functools
import gzip
import io
import json
import os
import re
import shlex
import shutil
import subprocess
import tomllib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any
from unittest import mock

from hypothesis import strategies as st

from benchmarks.gpu_hour.nvml_recording import FORMAT, NvmlRecording
from tests.fuzz.mutate import Draw, as_json, as_toml, as_yaml, bent, bent_file, nasty, torn
from tests.support.agent_lines import act_on, lines
from tests.support.studies import write_table
from tuner.cli import main as cli
from tuner.online.settings import FILE, SCHEMA, read_earlier
from tuner.planner.plan import PLAN_FILE, read_plan
from tuner.receipt.receipt import read_counts, trainings_of
from tuner.recordings.table import TableRunner, load_table, read_csv
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.search_spaces.knob_declarations import load_pack, parse_knob
from tuner.search_spaces.knobs import KNOBS
from tuner.search_spaces.space import load_space
from tuner.study.recorder import open_storage
from tuner.workload import hook
from tuner.workload.hook.tally import HEAD
from tuner.workload.records.trace import (
    read_power,
    read_trace,
    recover_pending,
    repair_torn_tail,
)
from tuner.workload.scripts.command import Script, read_command
from tuner.workload.scripts.frameworks import starts_of
from tuner.workload.scripts.frameworks.commands import training_of_file
from tuner.workload.scripts.frameworks.driver import load_drivers
from tuner.workload.scripts.inspection import blank_job
from tuner.workload.scripts.key_files import changed_text, parsed_file
from tuner.workload.scripts.user_code import of_knobs

DATA = Path(__file__).parents[1] / "data"
Try = Callable[[Draw], Any]
Prepare = Callable[[Path], Try]


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
    prepare: Prepare
    share: float = 1.0


@functools.cache
def parser() -> Any:
    """Return the command's parser, made once in a place: it takes longer than most inputs."""
    return cli.command_parser()


def command(*words: str) -> None:
    """Run the command in this process; raise where it ends as it must not.

    Raises:
        InputError: it refused its input, in one sentence.
    """
    err, made = io.StringIO(), parser()
    with (
        contextlib.redirect_stdout(io.StringIO()),
        contextlib.redirect_stderr(err),
        mock.patch.object(cli, "command_parser", return_value=made),
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
    if code == 2:
        raise InputError(said.strip())


def tables_in(package: str, *path: str) -> list[dict[str, Any]]:
    """Return the tables of the TOML files of a package's folder."""
    files = resources.files(package).joinpath(*path).iterdir()
    return [tomllib.loads(f.read_text()) for f in files if f.name.endswith(".toml")]


def shipped(kind: str, *names: str) -> list[dict[str, Any]]:
    """Return shipped files of one kind as tables."""
    folder = resources.files("tuner.search_spaces").joinpath("data", kind)
    read: Any = json.loads if kind == "models" else tomllib.loads
    ending = "json" if kind == "models" else "toml"
    return [read((folder / f"{name}.{ending}").read_text(encoding="utf-8")) for name in names]


def packs() -> list[dict[str, Any]]:
    """Return files of knobs: the shipped ones, and one with knobs of each kind."""
    live = {"values": ["a", "b"], "live": True, "set": ["sh", "-c", "true {value}"], "read": ["id"]}
    key = {"values": [1, 2], "how": "conf.json:a.b", "baseline": 1}
    mine = {"g": live, "c": {"values": [False, True], "how": "argument"}, "k": key}
    return [*tables_in("tuner.search_spaces", "data", "knobs"), {"knobs": mine}]


def drivers() -> list[dict[str, Any]]:
    return tables_in("tuner.workload.scripts", "frameworks")


def devices() -> list[dict[str, Any]]:
    (every,), of_node = (
        shipped("catalogue", "devices"),
        ("node", "also_called", "devices_per_board"),
    )
    names = ("A100-SXM-80GB", "GH200-96GB", "cpu-core")
    return [{k: v for k, v in every[name].items() if k not in of_node} for name in names]


# ---- files that are bent or torn and given to a command or a reader

#: Makes the files that go with the bent one.
Setup = Callable[[Path], Any]


def of_files(
    file: str,
    sounds: Callable[[], Sequence[Any]],
    ask: Callable[[Path, Draw], Any],
    *,
    write: Callable[[Any], bytes] = as_toml,
    setup: Setup = lambda folder: None,
) -> Prepare:
    """Return a kind's preparation: one of the sound values is bent, written and asked about."""

    def prepare(folder: Path) -> Try:
        made, path = sounds(), folder / file
        setup(folder)
        path.parent.mkdir(parents=True, exist_ok=True)

        def one(draw: Draw) -> None:
            bent_file(path, draw.choice(made), write, draw)
            ask(folder, draw)

        return one

    return prepare


def by(*words: str) -> Callable[[Path, Draw], None]:
    """Return a question to the command."""
    return lambda folder, draw: command(*words)


def torn_file(file: str, data: bytes, ask: Callable[[Path], Any]) -> Prepare:
    """Return a kind's preparation: the bytes are torn, written and read."""

    def prepare(folder: Path) -> Try:
        def one(draw: Draw) -> None:
            (folder / file).write_bytes(torn(data, draw))
            ask(folder / file)

        return one

    return prepare


def one_line_each(starts: Iterable[Any]) -> None:
    """Raise if what asks for trust could be forged by a line break."""
    for start in starts:
        if "\n" in str(start):
            raise AssertionError(f"two lines ask for trust: {start}")


def make_program(folder: Path) -> None:
    """Write the small program and the files that the launch lines name."""
    (folder / "train.py").write_text(
        "import torch, argparse\np = argparse.ArgumentParser()\n"
        "p.add_argument('--lr')\np.add_argument('--bs')\n"
    )
    (folder / "job.sh").write_text("#!/bin/bash\n#SBATCH --nodes=2\npython train.py\n")
    (folder / "conf.yaml").write_text("lr: 1\nmodel: {layers: 2}\n")
    (folder / "acc.yaml").write_text("distributed_type: MULTI_GPU\nnum_processes: 2\n")
    (folder / "ds.json").write_text('{"train_batch_size": 8, "zero_optimization": {"stage": 1}}')


def _model_as_job(folder: Path) -> None:
    (job,) = shipped("jobs", "tiny-gpt")
    (folder / "job.toml").write_bytes(as_toml({**job, "model": {"config": "c/config.json"}}))


def _ask_model(folder: Path, draw: Draw) -> None:
    command("fit", draw.choice(("job.toml", "c")), "--cluster", "a100-8")


def _cluster_of_device(folder: Path) -> None:
    (cluster,) = shipped("clusters", "a100-8")
    (folder / "cluster.toml").write_bytes(as_toml({**cluster, "device": "device.toml"}))


def _ask_space(folder: Path, draw: Draw) -> None:
    cluster = load_cluster(draw.choice(("cpu-2", "a100-8")))
    load_space(folder / "space.toml").candidates(load_job("tiny-gpt"), cluster)


def _ask_search(folder: Path, draw: Draw) -> None:
    words = ["optimize", "tiny-gpt", "--cluster", "cpu-2", "--dry-run", "--knobs", "k.toml"]
    command(*words, *draw.choice(((), ("--trust",))))


DEEPSPEED = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-4, "betas": [0.9, 0.95]}},
    "bf16": {"enabled": True},
    "activation_checkpointing": {"partition_activations": False},
}


def _ask_deepspeed(folder: Path, draw: Draw) -> None:
    line = f"{folder}/train.py --deepspeed {folder}/ds.json"
    script = Script(line, steps=10, global_batch=8, cwd=folder)
    job = blank_job(script, load_cluster("a100-8"))
    wanted = Configuration.of(data_parallel=2, micro_batch=4, zero_stage=1)
    job.refused(wanted)
    job.start(wanted, folder / "probe")
    with contextlib.suppress(ValueError):  # no JSON: `start` has said so
        config = json.loads((folder / "ds.json").read_bytes())
        if isinstance(config, dict):
            hook.micro_batches(config, 2)
            hook.split_differently(config, 2)
            merged = hook.merge(config, {"zero_optimization": {"stage": 1}, "fp16": None})
            if merged["zero_optimization"]["stage"] != 1:
                raise AssertionError(f"the stage is not changed: {merged}")


def _key_files(folder: Path) -> Try:
    sound = {"model": {"name": "gpt", "layers": [1], "deep": {"lr": 1e-3, "on": True}}, "steps": 10}

    def one(draw: Draw) -> None:
        ending, write = draw.choice((("json", as_json), ("toml", as_toml), ("yaml", as_yaml)))
        path = folder / f"conf.{ending}"
        bent_file(path, sound, write, draw)
        if draw.random() < 0.1:
            path.write_bytes(draw.choice((b"a: &a [*a]\n", b"a: &a {b: *a}\nsteps: 1\n", b"- 1\n")))
        parsed_file(path)
        key = draw.choice(("steps", "model.deep.lr", "model.name", "model.layers", "zzz.a", ""))
        changed_text(path, {key: draw.choice((1, 2.5, "x", True))}, may_add=draw.random() < 0.5)

    return one


RECIPES: tuple[dict[str, Any], ...] = (
    {"base_model": "tiny-gpt", "micro_batch_size": 2, "gradient_accumulation_steps": 4,
     "sequence_len": 512, "adapter": "lora", "lora_r": 8, "bf16": True,
     "datasets": [{"path": "d"}]},
    {"model_name_or_path": "tiny-gpt", "stage": "sft", "finetuning_type": "full",
     "per_device_train_batch_size": 1, "cutoff_len": 2048, "deepspeed": "ds.json"},
    {"model": {"name": "llama3", "flavor": "8B"}, "activation_checkpoint": {"mode": "full"},
     "training": {"local_batch_size": 2, "seq_len": 512},
     "parallelism": {"data_parallel_shard_degree": 2}},
)  # fmt: skip
#: Ten levels of ten aliases, and a key for the last of them.
EXPANDING = "a0: &a0 [x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)


def _recipes(folder: Path) -> Try:
    make_program(folder)

    def one(draw: Draw) -> None:
        ending, write = draw.choice((("toml", as_toml), ("yaml", as_json)))  # JSON is YAML
        path = folder / f"r.{ending}"
        bent_file(path, draw.choice(RECIPES), write, draw)
        if ending == "yaml" and draw.random() < 0.1:
            path.write_text(EXPANDING + f"base_model: *a{draw.randrange(10)}\n")
        training_of_file(str(path), draw.choice((1, 8)))

    return one


# ---- runs, their records, and tables

RECORDS = [
    json.loads(line) for line in (DATA / "measured/trace/probes.jsonl").read_text().splitlines()[:3]
]


def keep_run(folder: Path, records: int | None = None) -> Path:
    """Copy a small run, with some of its records."""
    run = folder / "runs" / "kept"
    shutil.copytree(DATA / "measured", run)
    trace = run / "trace" / "probes.jsonl"
    trace.write_bytes(b"".join(trace.read_bytes().splitlines(keepends=True)[:records]))
    return run


def _ask_run(folder: Path, draw: Draw) -> None:
    run, which = folder / "runs" / "kept", draw.random()
    at = ["--runs-dir", str(run.parent)]
    if which < 0.75:
        command("show", str(run), *at)
    elif which < 0.85:
        command("apply", str(run), *at, "--out", str(run / "best"))
        if (script := run / "best" / "launch.sh").exists():
            _check_script(script)
    elif which < 0.9:
        command("show", "--html", str(run), *at, "--out", str(run / "report.html"))
    else:
        command("compare", str(run), *at)


def _check_script(script: Path) -> None:
    """Raise if bash would run a value of launch.sh."""
    text = script.read_text(encoding="utf-8")
    done = subprocess.run(["bash", "-n", str(script)], capture_output=True, check=False)
    if done.returncode:
        raise Leak(f"launch.sh is no longer a script: {done.stderr!r}")
    inside = re.sub(r"'[^']*'", "", text)  # what is quoted is a word, whatever it says
    if any("touch pwned" in line and line[:1] != "#" for line in inside.splitlines()):
        raise Leak(f"launch.sh holds a value unquoted: {inside}")


def _traces(folder: Path) -> Try:
    run = keep_run(folder, 3)
    trace = run / "trace" / "probes.jsonl"
    sound = trace.read_bytes().splitlines()

    def one(draw: Draw) -> None:
        mine, at = list(sound), draw.randrange(len(sound))
        mine[at] = as_json(bent(json.loads(mine[at]), draw))
        torn_now = draw.random() < 0.25
        data = b"\n".join(sound if torn_now else mine) + b"\n"
        trace.write_bytes(torn(data, draw) if torn_now else data)
        _ask_run(folder, draw)

    return one


def _tails(folder: Path) -> Try:
    sound = b"".join(as_json(record) + b"\n" for record in RECORDS)
    path = folder / "probes.jsonl"

    def one(draw: Draw) -> None:
        data = sound[: draw.randrange(len(sound))]
        path.write_bytes(data if draw.random() < 0.5 else torn(data, draw))
        repair_torn_tail(path)
        read_trace(path)

    return one


def _powers(folder: Path) -> Try:
    path = folder / "p0000.csv.gz"
    rows = ["time_s,power_W,clock_MHz,phase"] + [f"{t / 10:.1f},{200 + t},1410," for t in range(20)]
    sound = ("\n".join([*rows, "0.5,,,forward"]) + "\n").encode()

    def one(draw: Draw) -> None:
        whole = draw.random() < 0.2
        data = gzip.compress(sound if whole else torn(sound, draw), compresslevel=1, mtime=0)
        path.write_bytes(torn(data, draw) if whole else data)
        read_power(path)

    return one


def _tables(folder: Path) -> Try:
    import optuna_dashboard  # noqa: F401 - it imports torch, which no alarm should interrupt

    table = write_table(folder / "table", shapes=(1, 2))
    layout, rows = tomllib.loads((table / "table.toml").read_text()), (table / "table.csv")
    sound = rows.read_text()

    def one(draw: Draw) -> None:
        rows.write_text(sound)
        bent_file(table / "table.toml", layout, as_toml, draw)
        if draw.random() < 0.5:
            (table / "table.toml").write_bytes(as_toml(layout))
            cells = sound.split("\n")
            at = draw.randrange(len(cells))
            words = cells[at].split(",")
            words[draw.randrange(len(words))] = draw.choice(("", "nan", "-1", "x", "1e400", "0"))
            cells[at] = ",".join(words)
            rows.write_bytes(torn("\n".join(cells).encode(), draw))
        if draw.random() < 0.03:
            name = f"r{draw.random()}".replace(".", "")
            command("replay", str(table), "--name", name, "--max-probes", "2", "--quiet")
            return
        loaded = load_table(table)
        for group in loaded.groups:
            TableRunner(loaded, group.name)

    return one


PLAN = ("plan", "tiny-gpt", "--cluster", "cpu-2", "--name", "planned", "--quiet")


def sound_plan() -> dict[str, Any]:
    """Return a plan of the current folder's runs, with a few rows."""
    command(*PLAN)
    sound: dict[str, Any] = json.loads(Path("runs", "planned", PLAN_FILE).read_text())
    return {**sound, "rows": sound["rows"][:4], "baseline": 0, "probes": []}


def _counts(folder: Path) -> Try:
    counts = folder / "counts"
    counts.mkdir()
    facts = {"rank": 0, "world": 2, "pid": 41, "parent": 40, "words": ["train.py", "--lr", "1"]}
    times = (0.0, 1.0, 5.0, 9.0, -1.0, 1e308, float("nan"))

    def one(draw: Draw) -> None:
        for rank in range(2):
            words = as_json(bent({**facts, "rank": rank}, draw)) if draw.random() < 0.7 else b"{}"
            data = HEAD.pack(*draw.choices(times, k=5)) + words
            (counts / str(rank)).write_bytes(data if draw.random() < 0.7 else torn(data, draw))
        odd = counts / "odd"
        odd.unlink(missing_ok=True)
        draw.choice((os.mkfifo, Path.touch, lambda path: path.symlink_to("/dev/zero")))(odd)
        for training in trainings_of(read_counts(counts)):
            _ = training.samples, training.world

    return one


def _tuned(folder: Path) -> Try:
    head = {"schema": SCHEMA, "device": "core", "meter": "model", "ranks": 2}
    windows = [
        {"epoch": 0, "live": {"clock_MHz": clock}, "step_time_s": 0.5, "power_W": 90.0}
        for clock in (900, 1200, 900)
    ]

    def one(draw: Draw) -> None:
        data = b"\n".join(as_json(line) for line in bent([head, *windows], draw)) + b"\n"
        (folder / FILE).write_bytes(data if draw.random() < 0.7 else torn(data, draw))
        read_earlier(folder)

    return one


RECORDING = {
    "version": FORMAT, "system": {"driver": "1"}, "devices": [{"name": "H100"}],
    "rows": [[[0.0, 90.0], [0.1, 91.0]]], "errors": {"0 nvmlDeviceGetPowerUsage 3": 60},
    "root": False,
}  # fmt: skip


# ---- lines and words


def _agent_lines(whole: bool) -> Prepare:
    def prepare(folder: Path) -> Try:
        def one(draw: Draw) -> None:
            sent = draw.of(st.lists(lines(), max_size=6))
            act_on(whole, [b"hello 0 41 2", *sent] if draw.random() < 0.7 else sent)

        return one

    return prepare


def _words(folder: Path) -> Try:
    values = (1, 2, 4, 8, "none", "cpu", "full", "900,1200", "1e9")

    def one(draw: Draw) -> None:
        words = []
        for _ in range(draw.randrange(1, 5)):
            name = draw.choice((*KNOBS, "zzz", "", "clock_MHz"))
            with contextlib.suppress(ValueError):
                words.append(f"{name}={draw.choice((*values, nasty(draw)))}".replace("\x00", ""))
        # A word that begins with a dash is an option to argparse, and its sentence shows it whole.
        words = [word for word in words if not word.startswith("-")]
        command("fit", "tiny-gpt", *words, "--cluster", "a100-8")

    return one


KNOB_WORDS = (
    *("env:A=1,2", "deepspeed:a.b:int=1,2", "f.yaml:a:log-int=1,8", "live:x=1,2", "x:flag=0,1"),
    *("argument:--lr:float=0.1,0.2", "compile=false,true", "env:NCCL_ALGO=Ring,Tree"),
)
PARTS = (
    *("env:", "deepspeed:", ":int", ":log-int", ":float", ":flag", "=", ",", ":", "1", "-1"),
    *("nan", "1e400", "é", "\n", "\0", "x" * 300, "..", "/etc/passwd", " ", "1," * 60, ""),
)


def _knob_words(folder: Path) -> Try:
    def one(draw: Draw) -> None:
        text = draw.choice(KNOB_WORDS)
        for _ in range(draw.choice((0, 1, 1, 2, 4))):
            at, until = (draw.randrange(len(text) + 1) for _ in "12")
            text = text[:at] + draw.choice(PARTS) + text[max(at, min(until, at + 3)) :]
        parse_knob(text)

    return one


def _urls(folder: Path) -> Try:
    parts = ("sqlite:///", "postgresql://", "u:hunter2@", "@", ":", "/", "?password=hunter2", "db")

    def one(draw: Draw) -> None:
        url = "".join(draw.choices(parts, k=draw.randrange(1, 6)))
        if draw.random() < 0.2:
            url += draw.choice(("\x00", "\n", "é", "%zz", "[::1", "x" * 300))
        if "sqlite" not in url and "postgresql://" not in url:
            try:
                open_storage(url, folder / "journal")
            except InputError as error:
                if "hunter2" in str(error):
                    raise Leak(f"the password is shown: {error}") from None

    return one


LAUNCHES = (
    "python train.py --lr 1 --bs {micro_batch=4}",
    "A=1 B=2 env C=3 python -u -m pkg.train --bs 4",
    "bash job.sh --bs 4",
    "srun -N 1 --ntasks-per-node=2 --export=A=1 python train.py",
    "mpirun -np 2 python train.py",
    "OMP_NUM_THREADS=2 python train.py --config conf.yaml",
)
#: Read by the vendors' own parsers, in an interpreter that imports torch: seconds each.
VENDORS_LAUNCHES = (
    "torchrun --nproc-per-node 2 train.py --lr 1",
    "accelerate launch --config_file acc.yaml train.py --bs 4",
    "deepspeed --num_gpus 2 train.py --deepspeed_config ds.json",
)
_WORDS = (
    *("-m", "--nproc-per-node", "--nnodes", "2", "torchrun", "env", "--config_file", "A=1", "&&"),
    *("|", ";", "$(id)", "{micro_batch=1}", "{", "}", "'", '"', "\\", "-", "--", "-x", "é", "=1"),
    *("A=", "~", "/", "train.py", "srun", "bash", "-c", "accelerate", "python3.11"),
)


def bent_launch(draw: Draw, launches: tuple[str, ...] = LAUNCHES) -> list[str]:
    """Return the words of a launch line, with some replaced, taken away, added or cut."""
    words = draw.choice(launches).split()
    for _ in range(draw.choice((1, 1, 2, 3))):
        at, how = draw.randrange(len(words) + 1), draw.random()
        other = str(nasty(draw)) if draw.random() < 0.4 else draw.choice(_WORDS)
        if how < 0.3 and at < len(words):
            words[at] = other
        elif how < 0.5 and at < len(words) and len(words) > 1:
            del words[at]
        elif how < 0.8:
            words.insert(at, other)
        elif at < len(words):
            words[at] = words[at][: draw.randrange(len(words[at]) + 1)]
    return [word.replace("\0", "") for word in words]


def _launches(folder: Path) -> Try:
    make_program(folder)

    def one(draw: Draw) -> None:
        words = bent_launch(draw)
        # The vendors' parsers take seconds, and have a kind of their own.
        if {Path(word).name for word in words} & {"torchrun", "accelerate", "deepspeed"}:
            return
        (folder / "job.sh").write_bytes(torn(b"#!/bin/bash\n#SBATCH -N 2\npython train.py\n", draw))
        line = shlex.join(words) if draw.random() < 0.7 else " ".join(words)
        blank_job(Script(line, steps=10, global_batch=8, cwd=folder), load_cluster("cpu-2"))

    return one


def _vendors(folder: Path) -> Try:
    make_program(folder)
    files = [folder / "acc.yaml", folder / "ds.json"]
    sound = [(file, file.read_bytes()) for file in files]

    def one(draw: Draw) -> None:
        for file, data in sound:
            file.write_bytes(torn(data, draw) if draw.random() < 0.3 else data)
        read_command(bent_launch(draw, VENDORS_LAUNCHES), folder)

    return one


CSV = b"time_s,energy_J,mb,clock_MHz\n" + b"".join(
    b"%.1f,%d,%d,%d\n" % (1 + row / 10, 100 - row, 2 ** (row % 3), 900 + 100 * (row % 4))
    for row in range(12)
)
KINDS: tuple[Kind, ...] = (
    Kind("jobs", of_files("job.toml", lambda: shipped("jobs", "tiny-gpt"),
                          by("fit", "job.toml", "--cluster", "a100-8"))),
    Kind("model configs", of_files(
        "c/config.json",
        lambda: shipped("models", "tiny-gpt", "tiny-qwen2.5", "tiny-olmoe", "opt-350m"),
        _ask_model, write=as_json, setup=_model_as_job)),
    Kind("clusters", of_files("cluster.toml",
                              lambda: shipped("clusters", "a100-8", "cpu-2", "gh200-32"),
                              by("fit", "tiny-gpt", "--cluster", "cluster.toml")), 0.5),
    Kind("devices", of_files("device.toml", devices,
                             by("fit", "tiny-gpt", "--cluster", "cluster.toml"),
                             setup=_cluster_of_device), 0.5),
    Kind("spaces", of_files("space.toml",
                            lambda: shipped("spaces", "default", "clocks", "parallelism"),
                            _ask_space)),
    Kind("configurations", _words),
    Kind("traces", _traces, 0.5),
    Kind("study.toml", of_files("runs/kept/study.toml",
                                lambda: [tomllib.loads((DATA / "measured/study.toml").read_text())],
                                _ask_run, setup=lambda f: keep_run(f, 3)), 0.5),
    Kind("power samples", _powers, 2.0),
    Kind("recorded tables", _tables, 0.5),
    Kind("DeepSpeed JSON", of_files(
        "ds.json", lambda: [DEEPSPEED], _ask_deepspeed, write=as_json,
        setup=lambda f: (f / "train.py").write_text("import deepspeed\n")), 2.0),
    Kind("storage URLs", _urls, 0.5),
    Kind("knobs files", of_files("k.toml", packs, lambda f, draw: one_line_each(
        of_knobs(load_pack(str(f / "k.toml")).knobs))), 6.0),
    Kind("drivers", of_files("d.toml", drivers, lambda f, draw: one_line_each(
        start for driver in load_drivers(f / "d.toml") for start in starts_of(driver))), 6.0),
    Kind("knob words", _knob_words, 6.0),
    Kind("CSV tables", torn_file("t.csv", CSV, read_csv), 4.0),
    Kind("pending records", of_files("probes/p0000/.joulefront-record.json", lambda: RECORDS[:1],
                                     lambda f, draw: recover_pending(f), write=as_json), 4.0),
    Kind("torn traces", _tails, 4.0),
    Kind("plans", of_files(f"plan/{PLAN_FILE}", lambda: [sound_plan()],
                           lambda f, draw: read_plan(f / "plan"), write=as_json), 4.0),
    Kind("counts of ranks", _counts, 4.0),
    Kind("key files", _key_files, 4.0),
    Kind("tuned trainings", _tuned, 4.0),
    Kind("NVML recordings", of_files(
        "nvml.json", lambda: [RECORDING],
        lambda f, draw: NvmlRecording.read(f / "nvml.json").lines(f / "nvml.json"),
        write=as_json), 2.0),
    Kind("lines of ranks", _agent_lines(whole=False), 4.0),
    Kind("lines of a command", _agent_lines(whole=True), 4.0),
    Kind("launch lines", _launches, 4.0),
    Kind("vendors' launch lines", _vendors, 0.1),
    Kind("frameworks' files", _recipes, 2.0),
    Kind("knobs of a search", of_files("k.toml", packs, _ask_search)),
    Kind("checked drivers", of_files("d.toml", drivers,
                                     by("dev", "frameworks", "check", "d.toml")), 2.0),
)  # fmt: skip
