"""Tune programs with other releases: the lowest of pyproject.toml, and some in the middle.

usage: make lowest | make middle

The package is installed with `constraints-lowest.txt` or `constraints-middle.txt` into an
environment of its own, as a user's pip would do it, and each program is searched by the command. An
environment is removed when all went well.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

ROOT = Path(__file__).parents[1]
SCRIPTS = ROOT / "tests" / "scripts"
#: Names in a checkout that a clone does not have.
NOT_CLONED = (".*", "__pycache__", "*.egg-info", "build", "dist", "runs", "site")
#: Free disk that an environment needs, with torch's CUDA build and its archives.
NEEDED_BYTES = 14e9
DEEPSPEED_FILE = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 2,
    "zero_optimization": {"stage": 1},
}
EXTRAS = "train,ray,terminal,dashboard,notebook,metrics"
#: The release from which on the built-in program runs, and what `tuner` says below it.
BUILT_IN_NEEDS, REFUSAL = "5.0.0", "the built-in program needs transformers 5.0 or later"
PROGRAMS = {
    "a plain script": ["torchrun", "--nproc-per-node=2", str(SCRIPTS / "plain_torch.py")],
    "a script on DeepSpeed": [
        *("deepspeed", "--num_gpus", "1", str(SCRIPTS / "plain_deepspeed.py")),
        *("--epochs", "10000000", "--deepspeed", "--deepspeed_config", "ds.json"),
    ],
    "a script on transformers' Trainer": [
        *("python", str(SCRIPTS / "hf_trainer.py"), "--output_dir", "out"),
        *("--per_device_train_batch_size", "4", "--report_to", "none", "--use_cpu"),
    ],
}


class Environment:
    """Virtual environment with the package and the releases of a file of constraints."""

    def __init__(self, folder: Path, constraints: Path) -> None:
        """Install into a new folder; subprocess.CalledProcessError if pip cannot."""
        self.folder, self.constraints = folder, constraints
        shutil.rmtree(folder, ignore_errors=True)
        venv.create(folder, with_pip=True)
        # As a clone: pip builds in the folder that it is given, and leaves its files there.
        source = folder / "source"
        shutil.copytree(ROOT, source, symlinks=True, ignore=shutil.ignore_patterns(*NOT_CLONED))
        self.pip("-c", constraints, f"{source}[{EXTRAS}]", "accelerate")

    def pip(self, *words: str | Path) -> None:
        """Install packages."""
        # Python compiles what is imported, which is little of what is installed.
        quiet = ("--quiet", "--disable-pip-version-check", "--no-compile")
        self.run(["python", "-m", "pip", "install", *quiet, *words], cwd=self.folder)

    def run(
        self, words: list[str | Path], cwd: Path, *, refused: bool = False
    ) -> subprocess.CompletedProcess[str]:
        """Run a command of the environment, which must succeed, or exit with 2 if `refused`."""
        kept = {
            k: v for k, v in os.environ.items() if not k.startswith(("PYTHON", "PIP_", "VIRTUAL"))
        }
        found = f"{self.folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            [self.folder / "bin" / words[0], *words[1:]],
            cwd=cwd,
            env={**kept, "PATH": found, "TERM": "dumb"},
            capture_output=True,
            text=True,
            timeout=1500,
            check=False,
        )
        if done.returncode != (2 if refused else 0):
            sys.exit(
                f"{' '.join(map(str, words))}: exit code {done.returncode}\n"
                f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
            )
        return done

    def search(self, name: str, words: list[str], cwd: Path) -> None:
        """Search a program with three probes, of which two at least must have been measured."""
        options = ["--max-probes", "3", "--no-verify", "--json", "--name", "search"]
        folder = cwd / name.replace(" ", "-")
        folder.mkdir(parents=True)
        (folder / "ds.json").write_text(json.dumps(DEEPSPEED_FILE))
        done = self.run(["tuner", "optimize", *options, *words], folder)
        answer = json.loads(done.stdout)
        measured = len(answer["points"])
        print(f"  {name}: {measured} configurations measured", flush=True)
        if measured < 2:
            sys.exit(f"{name}: too few\n{done.stdout[-4000:]}\n{done.stderr[-4000:]}")


def main(name: str) -> None:
    """Check one file of constraints; exit with a sentence where something fails."""
    folder = ROOT / "build" / "versions" / name
    free = shutil.disk_usage(ROOT).free
    if free < NEEDED_BYTES:
        print(
            f"{name} versions were not tried: {free / 1e9:.0f} GB are free, and an environment "
            f"needs {NEEDED_BYTES / 1e9:.0f} GB"
        )
        return
    made = Environment(folder, ROOT / f"constraints-{name}.txt")
    versions = made.run(["tuner", "doctor"], folder).stdout.partition("software")[2]
    print(f"{name}: {versions.splitlines()[0].strip()}", flush=True)
    runs = folder / "tried"
    for what, command in PROGRAMS.items():
        made.search(what, ["--", *command], runs)
    if REFUSAL in versions:
        refused = made.run(["tuner", "optimize", "tiny-gpt"], folder, refused=True).stderr
        if REFUSAL not in refused or "Traceback" in refused:
            sys.exit(refused)
        made.pip(f"transformers=={BUILT_IN_NEEDS}")
    made.search("the built-in program", ["tiny-gpt"], runs)
    shutil.rmtree(folder)


if __name__ == "__main__":
    main(sys.argv[1])
