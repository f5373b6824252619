"""Frameworks as data: each driver against the framework's own release.

For each driver: whether a command in the framework's ordinary style is recognised, the knobs that
are in play, and its keys looked up in the sources of a release. Releases come as wheels from the
package registry into a throw-away folder (`pip download --no-deps`), and are read as text; nothing
of them is imported. `--source NAME=FOLDER` gives a checkout instead, for what is no package
(Megatron-LM's training scripts, nanoGPT). What really trains under an installed framework is in
tests/workload/scripts/frameworks.
"""

from __future__ import annotations

import sys
import tempfile
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.figures import Figure, arguments, publish
from tests.support.commands import finished
from tests.support.scripts import on_every_device
from tuner.search_spaces.cluster import Cluster, Device
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.frameworks import Driver, shipped_drivers
from tuner.workload.scripts.frameworks.keys import KeyCheck, check_keys
from tuner.workload.scripts.script_facts import LAUNCH

NODE = Cluster("node", Device("core", "cpu", 2**33, 1e11, 1e10, 2.0, 15.0), devices_per_node=8)
TORCHTITAN = "torchtitan/train.py"


@dataclass(frozen=True)
class Sample:
    """Command in a framework's ordinary style.

    Attributes:
        name, versions: of the driver.
        command: the command.
        files: text of the files that it needs, by path.
        packages: releases whose wheels hold the keys.
    """

    name: str
    command: str
    files: Mapping[str, str] = field(default_factory=dict)
    packages: tuple[str, ...] = ()
    versions: str = ""


TITAN_TOML = """[training]
local_batch_size = 4
seq_len = 128
steps = 9
[activation_checkpoint]
mode = "none"
"""
TITAN_FUNCTION = (
    "from types import SimpleNamespace as N\n\n\ndef small():\n"
    "    return N(parallelism=N(), activation_checkpoint=None,\n"
    "             training=N(local_batch_size=4, global_batch_size=32, seq_len=64, steps=9))\n"
)
FLAGS = (
    "--num-layers 4 --hidden-size 64 --num-attention-heads 8 --seq-length 32 --micro-batch-size 1 "
    "--global-batch-size 32 --train-iters 1000000"
)
SAMPLES = (
    Sample(
        "torchtitan",
        f"torchrun --nproc-per-node 8 {TORCHTITAN} --job.config_file run.toml",
        {TORCHTITAN: "", "run.toml": TITAN_TOML},
        ("torchtitan==0.2.2",),
        versions=">=0.1,<0.3",
    ),
    Sample(
        "torchtitan",
        f"torchrun --nproc-per-node 8 {TORCHTITAN} --module ours --config small",
        {TORCHTITAN: "", "ours.py": TITAN_FUNCTION},
        ("torchtitan==0.3.0",),
        versions=">=0.3",
    ),
    Sample(
        "megatron-lm",
        f"torchrun --nproc-per-node 8 pretrain_gpt.py {FLAGS}",
        {"pretrain_gpt.py": "import megatron.training\n"},
        ("megatron-core==0.16.1",),
    ),
    Sample(
        "transformers-trainer",
        "torchrun --nproc-per-node 8 sft.py --config sft.yaml",
        {
            "sft.py": "from transformers import HfArgumentParser\n",
            "sft.yaml": "per_device_train_batch_size: 4\ngradient_accumulation_steps: 2\n",
        },
        ("transformers", "accelerate"),
    ),
    Sample(
        "accelerate",
        "torchrun --nproc-per-node 8 train.py",
        {"train.py": "from accelerate import Accelerator\n"},
        ("accelerate",),
    ),
    Sample(
        "llama-factory",
        "llamafactory-cli train f.yaml",
        {"f.yaml": "per_device_train_batch_size: 4\ncutoff_len: 64\nmax_steps: 9\n"},
        ("llamafactory==0.9.5", "transformers"),
    ),
    Sample(
        "llama-factory-v1",
        "llamafactory-cli sft f.yaml",
        {
            "f.yaml": "model: Qwen/Qwen3-0.6B\ntrain_dataset: data.yaml\nmicro_batch_size: 2\n"
            "global_batch_size: 64\ncutoff_len: 64\nmax_steps: 9\n"
        },
        ("llamafactory==0.9.5", "transformers"),
    ),
    Sample(
        "axolotl",
        "torchrun --nproc-per-node 8 -m axolotl.cli.train a.yaml",
        {"a.yaml": "micro_batch_size: 2\nsequence_len: 64\n"},
        ("axolotl==0.19.0",),
    ),
    Sample(
        "lightning",
        "main.py fit --data.batch_size 4",
        {"main.py": "from lightning.pytorch.cli import LightningCLI\n"},
        ("lightning",),
    ),
    Sample(
        "litgpt",
        "-m litgpt pretrain pythia-14m --train.micro_batch_size 4 --train.global_batch_size 64",
        {},
        ("litgpt==0.5.13",),
    ),
    Sample(
        "nanogpt",
        "torchrun --nproc-per-node 8 train.py --batch_size=4",
        {
            "train.py": "gradient_accumulation_steps = 5 * 8\nbatch_size = 12\nblock_size = 64\n"
            "max_iters = 9\nexec(open('configurator.py').read())\n"
        },
    ),
    Sample(
        "nemo-automodel",
        "torchrun --nproc-per-node 8 -m nemo_automodel.recipes.llm.train_ft --config f.yaml",
        {"f.yaml": "step_scheduler:\n  local_batch_size: 2\n  global_batch_size: 64\n"},
        ("nemo-automodel==0.7.0",),
    ),
    Sample(
        "torchtune",
        "torchrun --nproc-per-node 8 full_finetune.py --config f.yaml",
        {
            "full_finetune.py": "from torchtune import config\n",
            "f.yaml": "tokenizer:\n  max_seq_len: 64\nmodel:\n  _component_: "
            "torchtune.models.llama3_2.llama3_2_1b\ncheckpointer:\n  checkpoint_dir: weights\n"
            "optimizer:\n  _component_: torch.optim.AdamW\n  fused: true\n"
            "batch_size: 2\ngradient_accumulation_steps: 1\nmax_steps_per_epoch: 9\n",
        },
        ("torchtune==0.6.1",),
    ),
    Sample(
        "megatron-bridge",
        "torchrun --nproc-per-node 8 run.py train.micro_batch_size=2 train.global_batch_size=64 "
        "model.tensor_model_parallel_size=2",
        {"run.py": "from megatron.bridge import recipes\n"},
        ("megatron-bridge==0.3.1", "megatron-core==0.16.1"),
    ),
)


@dataclass(frozen=True)
class Row:
    """One framework.

    Attributes:
        title: name and versions.
        recognised: its sample command is.
        knobs: knobs in play on the sample command.
        checked: its keys against a release.
        why: the reason where something was not possible.
    """

    title: str
    recognised: bool
    knobs: tuple[str, ...]
    checked: KeyCheck
    why: str = ""

    @property
    def complete(self) -> bool:
        """True if the command is recognised and every key is in the release."""
        return self.recognised and bool(self.checked.files) and not self.checked.gone

    def __str__(self) -> str:
        found, gone = len(self.checked.found), len(self.checked.gone)
        version = self.checked.version or "a checkout"
        keys = (
            f"{found} keys in {version}, {gone} gone" if self.checked.files else "keys unverified"
        )
        return (
            f"{self.title}: {'recognised' if self.recognised else 'NOT recognised'}; in play: "
            f"{', '.join(self.knobs) or 'none'}; {keys}"
            + (f" ({self.why})" if self.why else "")
            + "".join(f"\n  gone: {key}" for key in self.checked.gone)
        )


def driver_of(sample: Sample) -> Driver:
    """Return the driver of a sample."""
    return next(
        driver
        for driver in shipped_drivers()
        if driver.name == sample.name and driver.versions.startswith(sample.versions)
    )


def download(packages: Sequence[str], wheels: Path, folder: Path) -> str:
    """Unpack the wheels of some packages; return why that is not possible, or ""."""
    for package in packages:
        command = [
            sys.executable,
            "-m",
            "pip",
            "download",
            "--quiet",
            "--no-deps",
            "--retries",
            "1",
        ]
        command += ["--only-binary", ":all:", "--dest", str(wheels / package), package]
        done = finished(command, timeout=300)
        if done.returncode:
            return f"{package} cannot be downloaded: {done.stderr.strip().splitlines()[-1:]}"
        for wheel in (wheels / package).glob("*.whl"):
            with zipfile.ZipFile(wheel) as archive:
                archive.extractall(folder)
    return ""


def contract(sample: Sample, sources: Mapping[str, Path], wheels: Path, folder: Path) -> Row:
    """Compare a driver with a release, and apply it to its sample command."""
    driver = driver_of(sample)
    release = sources.get(sample.name, folder / "release")
    why = "" if sample.name in sources else download(sample.packages, wheels, release)
    checked = check_keys(driver, [release]) if release.is_dir() else KeyCheck()
    work = folder / "work"
    for name, text in sample.files.items():
        (work / name).parent.mkdir(parents=True, exist_ok=True)
        (work / name).write_text(text)
    work.mkdir(exist_ok=True)
    script = Script(sample.command, cwd=work)
    bound = script.framework_of_command
    known = bound is not None and bound.driver == driver
    knobs: tuple[str, ...] = ()
    if known:
        blank = on_every_device(script, NODE)
        job = replace(blank, frame=replace(blank.frame, kind="torch"))
        knobs = tuple(name for name in LAUNCH if job.offers[name].turned)
        if (job.start(job.baseline, folder / "probe", probe=False).words) != job.words:
            why = "its baseline changes the command"
    return Row(
        f"{driver.name} {driver.versions}".strip(),
        known,
        knobs,
        checked,
        why,
    )


def measure(sources: Mapping[str, Path], only: Sequence[str]) -> list[Row]:
    """Return a row for each framework."""
    rows = []
    for sample in SAMPLES:
        if only and sample.name not in only:
            continue
        with tempfile.TemporaryDirectory() as made:
            folder = Path(made)
            row = contract(sample, sources, folder / "wheels", folder)
        print(row, flush=True)
        rows.append(row)
    return rows


def figures(rows: Sequence[Row]) -> list[Figure]:
    """Return the figures of the rows."""
    return [
        Figure("frameworks_by_contract", sum(row.complete for row in rows), "count"),
        Figure("keys_verified", sum(len(row.checked.found) for row in rows), "count"),
        Figure("keys_gone", sum(len(row.checked.gone) for row in rows), "count"),
    ]


def main() -> int:
    parser = arguments(__doc__ or "")
    parser.add_argument("--source", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--only", action="append", default=[], metavar="NAME")
    args = parser.parse_args()
    sources = {}
    for given in args.source:
        name, _, folder = given.partition("=")
        sources[name] = Path(folder).resolve()
    rows = measure(sources, args.only)
    publish(figures(rows), args.json)
    return 0 if all(row.recognised for row in rows) else 1


if __name__ == "__main__":
    sys.exit(main())
