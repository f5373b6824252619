"""Attacks of three security reviews, each a test, and what a real study sends to other machines.

A group of findings is closed if its tests pass (`FINDINGS`); they attack as the review did,
harmlessly, with the commands, files and sockets that a user has. Attacks by a second user need
root, some others a namespace: a group whose tests are all skipped was not tried. One local study
runs in a network namespace of its own, where its listening sockets are sampled and every packet to
another machine is counted. Findings of the second review have 12 added to their number, those of
the third 29. Targets: no finding open, no connection to another machine, no listening socket
beyond loopback, and 500 lines that run as root where the user is not root.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.security_study import unavailable, watch
from tuner.workload.node.clocks import guard

_RAY, _SLURM = "tests/executors/test_ray_security.py", "tests/deploy/test_slurm.py"
_FILES, _SCRIPTS = "tests/workload/test_safe_files.py", "tests/deploy/test_generated_scripts.py"
_RIGHTS, _TERMINAL = "tests/workload/node/test_rights.py", "tests/cli/test_terminal.py"
_TRUST, _RUNS = "tests/cli/test_trust.py", "tests/problem/test_run_list.py"
_DASHBOARD, _STORAGE = "tests/display/test_dashboard.py", "tests/test_storage.py"
_GUARD = "tests/workload/node/clocks/test_guard_attacks.py"


@dataclass(frozen=True)
class Finding:
    """One group of findings.

    Attributes:
        number: of the review, plus 12 (second) or 29 (third).
        name: a few words.
        tests: files of tests, each with words of the tests' names, as of pytest's -k; "" for all.
    """

    number: int
    name: str
    tests: tuple[tuple[str, str], ...]


FINDINGS = (
    Finding(1, "import path of Ray's workers", ((_RAY, "imports_nothing or joined"),)),
    Finding(2, "a Ray that others can use", ((_RAY, "enter or token"), (_SLURM, "token"))),
    Finding(3, "SIGKILL to recycled process groups", ((_RIGHTS, "signal"),)),
    Finding(4, "shell injection into clocks.sh", ((_SCRIPTS, "clocks_sh or planted"),)),
    Finding(5, "links and foreign owners in a run folder", ((_FILES, "link or users_run"),)),
    Finding(
        6,
        "terminal escapes and CSV formulas",
        ((_TERMINAL, "control or exception"), ("tests/display/test_export.py", "formula")),
    ),
    Finding(7, "Ray's session folder", ((_RAY, "private or enter"),)),
    Finding(8, "dashboard on a shared node", ((_DASHBOARD, "printed_address or note_escapes"),)),
    Finding(9, "secrets on the command line", ((_RIGHTS, "command_line or closed_to_others"),)),
    Finding(
        10,
        "power samples without a limit",
        (("tests/workload/records/test_trace.py", "up_to_a_limit"),),
    ),
    Finding(11, "root's rights of training scripts", ((_RIGHTS, "sudo"),)),
    Finding(
        12,
        "smaller findings",
        (
            (_RIGHTS, "port or lock_in_the_users"),
            ("tests/workload/hook/test_meeting.py", "listens_beyond"),
            (_FILES, "bare_name"),
            (_SLURM, "submit_folder"),
            ("tests/packaging/test_install.py", "pinned"),
        ),
    ),
    Finding(
        13, "launch.sh's rendezvous", (("tests/deploy/test_launch_files.py", "script_trains"),)
    ),
    Finding(14, "root reads for the caller of sudo", ((_RIGHTS, "sudo"),)),
    Finding(15, "root gives files away", ((_RIGHTS, "sudo"),)),
    Finding(16, "root follows links in a cache", ((_RIGHTS, "sudo"),)),
    Finding(18, "a parser of the caller's as root", ((_RIGHTS, "sudo"),)),
    Finding(
        19,
        "variables before a command",
        (
            ("tests/workload/scripts/launchers/test_secrets.py", ""),
            ("tests/deploy/test_redact.py", "secrets or variables"),
        ),
    ),
    Finding(20, "linked folders in a bundle", (("tests/deploy/test_bundle.py", "link"),)),
    Finding(22, "code in a file from a stranger", ((_TRUST, "trust_is or yes or dry_run"),)),
    Finding(24, "a trace without a limit", (("tests/workload/records/test_trace.py", "stranger"),)),
    Finding(
        25,
        "names of variables in scripts",
        (("tests/workload/scripts/test_declared.py", "is_a_command"),),
    ),
    Finding(
        26,
        "files that a driver names",
        (("tests/workload/scripts/frameworks/test_drivers.py", "files_are_few"),),
    ),
    Finding(27, "an idle connection to the dashboard", ((_DASHBOARD, "idle or printed_address"),)),
    Finding(
        28, "another user's zeusd", (("tests/workload/node/clocks/test_zeusd.py", "another_user"),)
    ),
    Finding(
        29,
        "smaller findings of the second review",
        (
            (_RIGHTS, "secret_of_the_search"),
            (_STORAGE, "password"),
            ("tests/workload/records/test_trace.py", "in_place_of_a_number"),
        ),
    ),
    Finding(30, "what a file turns on in the program", ((_TRUST, "driver or key or run_lists"),)),
    Finding(31, "the clock guard believes its caller", ((_GUARD, "stood_before"),)),
    Finding(32, "two clock guards on one GPU", ((_GUARD, "second_search"),)),
    Finding(
        33, "compilers that outlive a search", (("tests/workload/node/test_nothing_left.py", ""),)
    ),
    Finding(
        34,
        "the clock guard's caller ends or stops it",
        ((_GUARD, "signal or key or inherited or child or frozen"),),
    ),
    Finding(35, "a run folder that blocks the list", ((_RUNS, "pipe or closed"),)),
    Finding(36, "a list of trust that can be forged", ((_TRUST, "word or terminal_is_sent"),)),
    Finding(37, "controls in names that scripts hold", ((_TERMINAL, "for_scripts"),)),
    Finding(38, "a list of runs beside a search", ((_RUNS, "vanish or looks_at"),)),
    Finding(
        39,
        "tracebacks of outputs that are full or closed",
        ((_TERMINAL, "full_or_closed or folder_as"),),
    ),
    Finding(
        40, "metrics for pages of other sites", (("tests/online/test_metrics.py", "other_sites"),)
    ),
    Finding(41, "what is installed as the clock guard", ((_GUARD, "installed or confined"),)),
)


def outcome_of(file: str, words: str, folder: Path) -> tuple[bool | None, str]:
    """Run tests; return True if a finding is open, None if it was not tried, and pytest's words.

    Tests that cannot be run, or words that no test has, count as open: they show nothing.
    """
    command = [sys.executable, "-m", "pytest", "-q", "-m", "slow or not slow", "-k", words, file]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--basetemp={folder / 'tests'}"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    said = (done.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    if done.returncode:
        return True, said
    return (False if re.search(r"\d+ passed", said) else None), said


def is_open(finding: Finding) -> bool:
    """Attack one group of findings, print a line for each file of tests, and return the outcome."""
    opened = False
    for file, words in finding.tests:
        with tempfile.TemporaryDirectory(prefix="joulefront-security-") as folder:
            found, said = outcome_of(file, words, Path(folder))
        opened = opened or bool(found)
        outcome = {True: "OPEN", False: "closed", None: "not tried here"}[found]
        print(f"{finding.number:2}  {outcome:14}  {finding.name}: {file} ({said})", flush=True)
    return opened


def lines_as_root() -> int:
    """Return the lines that ever run as root where the user is not root: those of the guard."""
    lines = Path(guard.__file__).read_text(encoding="utf-8").splitlines()
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


def study_figures() -> list[Figure]:
    """Watch a study; return its connections to other machines and its open sockets."""
    if why := unavailable():
        print(f"no study was watched: {why}", file=sys.stderr)
        return []
    with tempfile.TemporaryDirectory(prefix="joulefront-security-") as folder:
        seen = watch(Path(folder))
    if seen.code:
        raise SystemExit(f"the watched study ended with {seen.code}: {seen.error[-300:]}")
    if not seen.counted:
        raise SystemExit("packets to other machines are not counted here")
    print("connections to other machines:", ", ".join(seen.outside) or "none")
    print("listening beyond loopback:", ", ".join(seen.listening) or "nothing")
    return [
        Figure("connections_outside", len(seen.outside), "count"),
        Figure("listening_beyond_loopback", len(seen.listening), "count"),
    ]


def main(argv: Sequence[str] | None = None) -> None:
    """Attack, watch a study, and publish the figures."""
    parser = arguments("attacks of the security reviews")
    parser.add_argument(
        "--only", type=int, metavar="N", choices=range(1, 42), help="one group of findings, 1 to 41"
    )
    options = parser.parse_args(argv)
    opened = sum(is_open(f) for f in FINDINGS if options.only in (None, f.number))
    figures = [
        Figure("findings_open", opened, "count"),
        Figure("lines_as_root", lines_as_root(), "lines"),
    ]
    publish(figures + (study_figures() if options.only is None else []), options.json)


if __name__ == "__main__":
    main()
