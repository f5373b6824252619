"""Kinds of bad input to readers: files of users and strangers, launch lines, and lines of ranks.

Each is given to the function that reads it, which answers, or refuses it with an `InputError`.
"""

from __future__ import annotations

import json
import os
import tomllib
from collections.abc import Callable
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from hypothesis import strategies as st

from tests.fuzz.kinds import DATA, Kind
from tests.fuzz.mutate import Draw, as_json, as_toml, bent, bent_file, nasty, torn
from tests.support.agent_lines import act_on, lines

Try = Callable[[Draw], Any]
RECORDS = [
    json.loads(line) for line in (DATA / "measured/trace/probes.jsonl").read_text().splitlines()[:3]
]
CSV = b"time_s,energy_J,mb,clock_MHz\n" + b"".join(
    b"%.1f,%d,%d,%d\n" % (1 + row / 10, 100 - row, 2 ** (row % 3), 900 + 100 * (row % 4))
    for row in range(12)
)


def data_files(package: str, folder: str) -> list[dict[str, Any]]:
    """Return the tables of the TOML files of a package's folder."""
    files = resources.files(package).joinpath(folder).iterdir()
    return [tomllib.loads(f.read_text()) for f in files if f.name.endswith(".toml")]


def packs() -> list[dict[str, Any]]:
    """Return files of knobs: the shipped ones, and one with knobs of each kind."""
    live = {"values": ["a", "b"], "live": True, "set": ["sh", "-c", "true {value}"], "read": ["id"]}
    key = {"values": [1, 2], "how": "conf.json:a.b", "baseline": 1}
    mine = {"g": live, "c": {"values": [False, True], "how": "argument"}, "k": key}
    return [*data_files("tuner.search_spaces", "data/knobs"), {"knobs": mine}]


def _knobs(folder: Path) -> Try:
    from tuner.search_spaces.knob_declarations import load_pack
    from tuner.workload.scripts.user_code import of_knobs

    sounds, path = packs(), folder / "k.toml"

    def one(draw: Draw) -> None:
        bent_file(path, draw.choice(sounds), as_toml, draw)
        for start in of_knobs(load_pack(str(path)).knobs):
            if "\n" in str(start):
                raise AssertionError(f"two lines ask for trust: {start}")

    return one


def _drivers(folder: Path) -> Try:
    from tuner.workload.scripts.frameworks import starts_of
    from tuner.workload.scripts.frameworks.driver import load_drivers

    sounds, path = data_files("tuner.workload.scripts", "frameworks"), folder / "d.toml"

    def one(draw: Draw) -> None:
        bent_file(path, draw.choice(sounds), as_toml, draw)
        for driver in load_drivers(path):
            for start in starts_of(driver):
                if "\n" in str(start):
                    raise AssertionError(f"two lines ask for trust: {start}")

    return one


def _knob_words(folder: Path) -> Try:
    from tuner.search_spaces.knob_declarations import parse_knob

    sounds = (
        *("env:A=1,2", "deepspeed:a.b:int=1,2", "f.yaml:a:log-int=1,8", "live:x=1,2", "x:flag=0,1"),
        *("argument:--lr:float=0.1,0.2", "compile=false,true", "env:NCCL_ALGO=Ring,Tree"),
    )
    parts = (
        *("env:", "deepspeed:", ":int", ":log-int", ":float", ":flag", "=", ",", ":", "1", "-1"),
        *("nan", "1e400", "é", "\n", "\0", "x" * 300, "..", "/etc/passwd", " ", "1," * 60, ""),
    )

    def one(draw: Draw) -> None:
        text = draw.choice(sounds)
        for _ in range(draw.choice((0, 1, 1, 2, 4))):
            at, until = (draw.randrange(len(text) + 1) for _ in "12")
            text = text[:at] + draw.choice(parts) + text[max(at, min(until, at + 3)) :]
        parse_knob(text)

    return one


def _csv(folder: Path) -> Try:
    from tuner.recordings.table import read_csv

    path = folder / "t.csv"

    def one(draw: Draw) -> None:
        path.write_bytes(torn(CSV, draw))
        read_csv(path)

    return one


def _pending(folder: Path) -> Try:
    from tuner.workload.records.trace import recover_pending

    probe = folder / "probes" / "p0000"
    probe.mkdir(parents=True)

    def one(draw: Draw) -> None:
        bent_file(probe / ".joulefront-record.json", RECORDS[0], as_json, draw)
        recover_pending(folder)

    return one


def _tails(folder: Path) -> Try:
    from tuner.workload.records.trace import read_trace, repair_torn_tail

    sound = b"".join(json.dumps(record).encode() + b"\n" for record in RECORDS)
    path = folder / "probes.jsonl"

    def one(draw: Draw) -> None:
        data = sound[: draw.randrange(len(sound))]
        path.write_bytes(data if draw.random() < 0.5 else torn(data, draw))
        repair_torn_tail(path)
        read_trace(path)

    return one


def _plans(folder: Path) -> Try:
    from tests.fuzz.kinds import command
    from tuner.planner.plan import PLAN_FILE, read_plan

    command("plan", "tiny-gpt", "--cluster", "cpu-2", "--name", "planned", "--quiet")
    (folder / "plan").mkdir()
    sound = json.loads((folder / "runs" / "planned" / PLAN_FILE).read_text())
    sound["rows"] = sound["rows"][:4]
    sound["baseline"], sound["probes"] = 0, []

    def one(draw: Draw) -> None:
        bent_file(folder / "plan" / PLAN_FILE, sound, as_json, draw)
        read_plan(folder / "plan")

    return one


def _counts(folder: Path) -> Try:
    from tuner.receipt.receipt import read_counts, trainings_of
    from tuner.workload.hook.tally import HEAD

    counts = folder / "counts"
    counts.mkdir()
    facts = {"rank": 0, "world": 2, "pid": 41, "parent": 40, "words": ["train.py", "--lr", "1"]}

    def one(draw: Draw) -> None:
        for rank in range(2):
            figures = [
                draw.choice((0.0, 1.0, 5.0, 9.0, -1.0, 1e308, float("nan"))) for _ in "12345"
            ]
            words = as_json(bent({**facts, "rank": rank}, draw)) if draw.random() < 0.7 else b"{}"
            data = HEAD.pack(*figures) + words
            (counts / str(rank)).write_bytes(data if draw.random() < 0.7 else torn(data, draw))
        odd = counts / "odd"
        odd.unlink(missing_ok=True)
        draw.choice((os.mkfifo, Path.touch, lambda path: path.symlink_to("/dev/zero")))(odd)
        for training in trainings_of(read_counts(counts)):
            _ = training.samples, training.world

    return one


def _key_files(folder: Path) -> Try:
    from tuner.workload.scripts.key_files import changed_text, parsed_file

    sound = {
        "model": {"name": "gpt", "layers": [1, 2], "deep": {"lr": 1e-3, "on": True}},
        "steps": 10,
    }

    def as_yaml(value: Any) -> bytes:
        try:
            return yaml.safe_dump(value, allow_unicode=True).encode()
        except (ValueError, UnicodeEncodeError, yaml.YAMLError):
            return b"a: &a [*a]\n"

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


def _tuned(folder: Path) -> Try:
    from tuner.online.earlier_measurements import FILE, SCHEMA, read_earlier

    head = {"schema": SCHEMA, "device": "core", "meter": "model", "ranks": 2}
    windows = [
        {"epoch": 0, "live": {"clock_MHz": clock}, "step_time_s": 0.5, "power_W": 90.0}
        for clock in (900, 1200, 900)
    ]

    def one(draw: Draw) -> None:
        lines = [as_json(line) for line in bent([head, *windows], draw)]
        data = b"\n".join(lines) + b"\n"
        (folder / FILE).write_bytes(data if draw.random() < 0.7 else torn(data, draw))
        read_earlier(folder)

    return one


def _recordings(folder: Path) -> Try:
    from benchmarks.gpu_hour.nvml_recording import FORMAT, NvmlRecording

    sound = {
        "version": FORMAT, "system": {"driver": "1"}, "devices": [{"name": "H100"}],
        "rows": [[[0.0, 90.0], [0.1, 91.0]]], "errors": {"0 nvmlDeviceGetPowerUsage 3": 60},
        "root": False,
    }  # fmt: skip
    path = folder / "nvml.json"

    def one(draw: Draw) -> None:
        bent_file(path, sound, as_json, draw)
        NvmlRecording.read(path).lines(path)

    return one


def _agent_lines(whole: bool) -> Callable[[Path], Try]:
    def prepare(folder: Path) -> Try:
        def one(draw: Draw) -> None:
            sent = draw.of(st.lists(lines(), max_size=6))
            act_on(whole, [b"hello 0 41 2", *sent] if draw.random() < 0.7 else sent)

        return one

    return prepare


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


def _launches(folder: Path) -> Try:
    import shlex

    from tuner.search_spaces.cluster import load_cluster
    from tuner.workload.scripts.command import Script
    from tuner.workload.scripts.inspection import blank_job

    make_program(folder)
    cluster = load_cluster("cpu-2")

    def one(draw: Draw) -> None:
        words = bent_launch(draw)
        # The vendors' parsers take seconds, and have a kind of their own.
        if {Path(word).name for word in words} & {"torchrun", "accelerate", "deepspeed"}:
            return
        (folder / "job.sh").write_bytes(torn(b"#!/bin/bash\n#SBATCH -N 2\npython train.py\n", draw))
        line = shlex.join(words) if draw.random() < 0.7 else " ".join(words)
        blank_job(Script(line, steps=10, global_batch=8, cwd=folder), cluster)

    return one


def _vendors(folder: Path) -> Try:
    import shlex

    from tuner.workload.scripts.command import read_command

    make_program(folder)

    def one(draw: Draw) -> None:
        for name in ("acc.yaml", "ds.json"):
            if draw.random() < 0.3:
                (folder / name).write_bytes(torn((folder / name).read_bytes()[:2000], draw))
        words = bent_launch(draw, VENDORS_LAUNCHES)
        read_command(words, folder)
        shlex.join(words)

    return one


#: Ten levels of ten aliases, and a key for the last of them.
_EXPANDING = "a0: &a0 [x, x]\n" + "".join(
    f"a{level}: &a{level} [{', '.join([f'*a{level - 1}'] * 10)}]\n" for level in range(1, 10)
)


def _stated(folder: Path) -> Try:
    from tuner.workload.scripts.frameworks.commands import training_of_file

    sounds = (
        {"base_model": "tiny-gpt", "micro_batch_size": 2, "gradient_accumulation_steps": 4,
         "sequence_len": 512, "adapter": "lora", "lora_r": 8, "bf16": True,
         "datasets": [{"path": "d"}]},
        {"model_name_or_path": "tiny-gpt", "stage": "sft", "finetuning_type": "full",
         "per_device_train_batch_size": 1, "cutoff_len": 2048, "deepspeed": "ds.json"},
        {"model": {"name": "llama3", "flavor": "8B"},
         "training": {"local_batch_size": 2, "seq_len": 512},
         "parallelism": {"data_parallel_shard_degree": 2},
         "activation_checkpoint": {"mode": "full"}},
    )  # fmt: skip
    make_program(folder)

    def one(draw: Draw) -> None:
        sound = draw.choice(sounds)
        if draw.random() < 0.5:
            path = folder / "r.toml"
            bent_file(path, sound, as_toml, draw)
        else:
            path = folder / "r.yaml"
            bent_file(path, sound, as_json, draw)  # JSON is YAML
            if draw.random() < 0.1:
                path.write_text(_EXPANDING + f"base_model: *a{draw.randrange(10)}\n")
        training_of_file(str(path), draw.choice((1, 8)))

    return one


KINDS: tuple[Kind, ...] = (
    Kind("knobs files", _knobs, 6.0),
    Kind("drivers", _drivers, 6.0),
    Kind("knob words", _knob_words, 6.0),
    Kind("CSV tables", _csv, 4.0),
    Kind("pending records", _pending, 4.0),
    Kind("torn traces", _tails, 4.0),
    Kind("plans", _plans, 4.0),
    Kind("counts of ranks", _counts, 4.0),
    Kind("key files", _key_files, 4.0),
    Kind("tuned trainings", _tuned, 4.0),
    Kind("NVML recordings", _recordings, 2.0),
    Kind("lines of ranks", _agent_lines(whole=False), 4.0),
    Kind("lines of a command", _agent_lines(whole=True), 4.0),
    Kind("launch lines", _launches, 4.0),
    Kind("vendors' launch lines", _vendors, 0.1),
    Kind("frameworks' files", _stated, 2.0),
)
