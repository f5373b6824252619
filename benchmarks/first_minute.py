"""The first minutes of a new user: `make run` in a terminal, from an installed environment.

The command runs at a pseudo-terminal, as a person would start it, and its screen is read with time
stamps. All times count from the end of the install.

- `install_s`: `make .venv/.runnable` into a new environment; with `--install` alone (the package
  cache decides much of it: the first install of a machine downloads).
- `first_picture_s`: until the live view is drawn.
- `first_point_s`: until it shows the first measured point.
- `answer_s`: until the answer of the search and its report are there.
- `lines_before_first_probe`: lines of the search that scroll by before its first probe ends.
- `answer_lines`, `answer_width`: lines and columns of the answer on a screen of 80 columns.
- `probes`: of that search.
- `others_share`: share of the cores that other processes used meanwhile; a figure of a busy machine
  says little.
- `twin_...`: the same of the same search on a node of two twin GPUs with clocks
  (`tuner.testing.twin`), with `--twin`, and of a smaller job: such a GPU takes 30 ms a sample, and
  its ranks must compute a step on their core in less.

Aims on two quiet cores: 120, 5, 15 and 180 s, at least 16 probes, 3 lines before the first one, an
answer of 10 lines in 80 columns.
"""

from __future__ import annotations

import fcntl
import json
import os
import pty
import re
import select
import struct
import subprocess
import sys
import tempfile
import termios
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import tuner
from benchmarks.figures import ROOT, Figure, arguments, publish
from tuner.search_spaces.job import load_job

#: What the screen shows first at each moment.
MOMENTS = {
    "first_picture_s": re.compile(rb"preparing|probes  "),
    "first_point_s": re.compile(rb"front so far"),
    "answer_s": re.compile(rb"Report: "),
}


#: Limits of the search of `make run`.
SEARCH = "--max-probes 24 --search-time 170s"


@dataclass
class Screen:
    """Output of a command with the moments at which something appeared first.

    Attributes:
        text: everything so far.
        answer: what it wrote to standard output of it.
        moments: seconds from the start, by name.
        code: the exit code.
    """

    text: bytes = b""
    answer: bytes = b""
    moments: dict[str, float] = field(default_factory=dict)
    code: int = -1

    def add(self, chunk: bytes, now_s: float, *, answer: bool) -> None:
        """Append output that appeared at this time."""
        self.text += chunk
        self.answer += chunk if answer else b""
        for name, pattern in MOMENTS.items():
            if name not in self.moments and pattern.search(self.text):
                self.moments[name] = now_s

    @property
    def lines_before_first_probe(self) -> int:
        """Lines with a time of day before the first of a probe."""
        stamped = re.findall(r"^\d\d:\d\d:\d\d (p\d)?", _plain(self.text), re.MULTILINE)
        return next((i for i, probe in enumerate(stamped) if probe), len(stamped))

    @property
    def answer_lines(self) -> list[str]:
        """The lines of the answer of a search, up to its report, as they stand on the screen."""
        before, report, _ = _plain(self.answer).partition("\nReport: ")
        return [*before.rpartition("\n\n")[2].split("\n"), report.strip()]


def _plain(screen: bytes) -> str:
    """Return a screen's text without control sequences, a line for each that was drawn."""
    text = re.sub(r"\x1b\[[\d;?]*[A-Za-z]", "", screen.decode(errors="replace"))
    return text.replace("\r\n", "\n").replace("\r", "\n")


def _terminal(columns: int = 80) -> tuple[int, int]:
    """Return both ends of a pseudo-terminal, the command's second."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", 40, columns, 0, 0))
    return ours, theirs


def watch(
    command: Sequence[str],
    environment: Mapping[str, str],
    *,
    cwd: Path = ROOT,
    clock: Callable[[], float] = time.monotonic,
) -> Screen:
    """Run a command at a pseudo-terminal of 80 columns and read its screen."""
    (shown, stderr), (answered, stdout) = _terminal(), _terminal()
    began_s = clock()
    process = subprocess.Popen(
        command,
        stdin=stderr,
        stdout=stdout,
        stderr=stderr,
        env={**environment, "TERM": "xterm-256color"},
        cwd=cwd,
        start_new_session=True,
    )
    os.close(stdout)
    os.close(stderr)
    screen, open_ends = Screen(), [shown, answered]
    while open_ends:
        for end in select.select(open_ends, [], [])[0]:
            try:
                chunk = os.read(end, 65536)
            except OSError:  # the last process has closed the terminal
                chunk = b""
            if chunk:
                screen.add(chunk, clock() - began_s, answer=end == answered)
            else:
                open_ends.remove(end)
                os.close(end)
    screen.code = process.wait()
    return screen


def install(venv: Path) -> float:
    """Install what `make run` needs into a new environment; return its seconds."""
    began_s = time.monotonic()
    subprocess.run(["make", "-s", f"VENV={venv}", f"{venv}/.runnable"], cwd=ROOT, check=True)
    return time.monotonic() - began_s


def _cpu_s() -> tuple[float, float]:
    """Return the busy seconds of all cores, and those of this process's ended children."""
    ticks = os.sysconf("SC_CLK_TCK")
    words = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]
    user, nice, system = (int(word) for word in words[:3])
    times = os.times()
    return (user + nice + system) / ticks, times.children_user + times.children_system


def small_job(folder: Path) -> Path:
    """Write a job whose step takes a share of a core some 15 ms; return its file."""
    model = {
        **load_job("tiny-gpt").model,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "vocab_size": 512,
    }
    (folder / "config.json").write_text(json.dumps(model))
    path = folder / "job.toml"
    path.write_text(
        'name = "twin-gpt"\nsequence_length = 32\nglobal_batch = 8\nsteps = 5000000\n'
        'precision = "fp32"\n[model]\nconfig = "config.json"\n'
    )
    return path


def on_twin(venv: Path, search: str, folder: Path) -> list[str]:
    """Return the command of the search of `make run` on a twin node, with a smaller job."""
    job, example = str(small_job(folder)), ROOT / "examples" / "laptop"
    return [
        *(f"{venv}/bin/python", "-m", "tuner.testing.twin", "--", f"{venv}/bin/tuner", "optimize"),
        *(job, "--space", f"{example}/space.toml", "--executor", "inline", *search.split()),
        *("--today", f"{example}/ds_config.json", "activation_checkpointing=full"),
    ]


def figures_of(command: Sequence[str], folder: str, prefix: str = "") -> list[Figure]:
    """Run a command that searches, with its runs in a folder, and return its figures."""
    before, began_s = _cpu_s(), time.monotonic()
    screen = watch(command, {**os.environ, "JOULEFRONT_RUNS": folder})
    after, seconds = _cpu_s(), time.monotonic() - began_s
    if screen.code:
        print(screen.text.decode(errors="replace")[-3000:], file=sys.stderr)
        raise SystemExit(f"{' '.join(command)} ended with {screen.code}")
    # `make run` ends with a plan.
    (searched,) = (p.name for p in Path(folder).iterdir() if not p.name.startswith("plan-"))
    result = tuner.load_result(searched, runs_dir=folder)
    print("\n".join(screen.answer_lines))
    busy_s, own_s = (b - a for a, b in zip(before, after, strict=True))
    others = max(0.0, busy_s - own_s) / (seconds * (os.cpu_count() or 1))
    return [
        *(Figure(f"{prefix}{name}", screen.moments[name], "s") for name in MOMENTS),
        Figure(f"{prefix}probes", result.spent.probes, "count"),
        Figure(f"{prefix}answer_lines", len(screen.answer_lines), "count"),
        Figure(f"{prefix}answer_width", max(map(len, screen.answer_lines)), "columns"),
        Figure(f"{prefix}lines_before_first_probe", screen.lines_before_first_probe, "count"),
        Figure(f"{prefix}others_share", others, "ratio"),
    ]


def main() -> None:
    parser = arguments("the first minutes of a new user")
    parser.add_argument("--install", action="store_true", help="install into a new environment")
    parser.add_argument("--search", help="limits of the search, instead of the Makefile's")
    parser.add_argument("--twin", action="store_true", help="search on a twin GPU node, too")
    options = parser.parse_args()
    figures = []
    with tempfile.TemporaryDirectory() as folder:
        venv = Path(sys.prefix)
        if options.install:
            venv = Path(folder) / "venv"
            figures.append(Figure("install_s", install(venv), "s"))
        given = [f"SEARCH={options.search}"] if options.search else []
        # -o: the environment is taken as it is.
        make = ["make", "-s", "-o", f"{venv}/.runnable", "run", f"VENV={venv}", *given]
        figures += figures_of(make, f"{folder}/runs")
        if options.twin:
            command = on_twin(venv, options.search or SEARCH, Path(folder))
            figures += figures_of(command, f"{folder}/twin", "twin_")
    publish(figures, options.json)


if __name__ == "__main__":
    main()
