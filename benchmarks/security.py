"""The attacks of the security review, repeated on this machine.

Every group of findings is attacked as in the review, harmlessly and inside a temporary folder, with
the commands, files and sockets that a user has. One local study runs in a network namespace of its
own, where its listening sockets are sampled and every packet to another machine is counted. Attacks
by a second user use another user ID if this runs as root; otherwise they are reported as not tried.
`--only N` attacks one group; from 13 on they are those of the second review, whose finding N is
12 + N. Targets: no finding open, no connection to another machine, no listening socket beyond
loopback, and 500 lines that run as root where the user is not root.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from benchmarks import security_checks as checks
from benchmarks import security_second as second
from benchmarks.figures import Figure, arguments, publish
from benchmarks.security_study import Seen, unavailable, watch
from benchmarks.security_tools import Attempt, Finding, not_tried, tried

#: Groups that are seen in the study, and by which other attacks.
_IN_STUDY = (1, 2, 7, 12)


class _Study:
    """The watched study, run when it is first asked for."""

    def __init__(self) -> None:
        self._seen: Seen | None = None
        self._why = ""

    def seen(self) -> Seen | None:
        """Return what was seen, or None where no study can be watched here."""
        self._why = self._why or unavailable()
        if self._seen is None and not self._why:
            with tempfile.TemporaryDirectory(prefix="joulefront-security-") as folder:
                self._seen = watch(Path(folder))
        return self._seen

    @property
    def why(self) -> str:
        return self._why

    def attempts(self, number: int) -> list[Attempt]:
        """Return what the study shows of one group of findings."""
        seen = self.seen()
        if seen is None:
            return [not_tried("a study in a network namespace", self._why)]
        if seen.code:
            return [Attempt("the study", True, f"ended with {seen.code}: {seen.error[-300:]}")]
        if number == 1:
            what = "modules planted where the study is started are imported by Ray's workers"
            return [tried(what, bool(seen.planted), "; ".join(seen.planted))]
        if number == 2:
            return self._ray(seen)
        if number == 7:
            what = "another user renames folders of Ray's session"
            if not seen.ray:
                return [not_tried(what, "no Ray was seen")]
            return [tried(what, seen.renamed, seen.session)]
        ours = [name for name in seen.listening if not _of_ray(name)]
        what = "a rank's rendezvous listens beyond loopback"
        return [tried(what, bool(ours), ", ".join(ours))]

    def _ray(self, seen: Seen) -> list[Attempt]:
        what = "a process without the token runs a task in the study's Ray"
        if not seen.ray or seen.joined is None:
            return [not_tried(what, "no Ray was seen")]
        return [
            tried(what, seen.joined, seen.join_error),
            tried("the token is in the arguments of a process", seen.token_shown),
            tried(
                "the token lies in HOME, readable by others",
                bool(seen.token_file & 0o044),
                f"mode {seen.token_file:o}" if seen.token_file else "no file",
            ),
            tried(
                "that Ray asks for a token is left to Ray's default",
                not seen.own_token,
                "no RAY_AUTH_TOKEN was given to it" if not seen.own_token else "",
            ),
            checks.ray_floor(),
        ]


def _of_ray(name: str) -> bool:
    return name.startswith(("gcs_server", "raylet", "ray::", "driver", "dashboard", "runtime_env"))


_STUDY = _Study()


def _import_path(folder: Path) -> Sequence[Attempt]:
    return _STUDY.attempts(1)


def _ray(folder: Path) -> Sequence[Attempt]:
    return [*_STUDY.attempts(2), *checks.slurm_token(folder)]


def _session(folder: Path) -> Sequence[Attempt]:
    return _STUDY.attempts(7)


def _smaller(folder: Path) -> Sequence[Attempt]:
    return [*_STUDY.attempts(12), *checks.slurm_script(folder), *checks.smaller(folder)]


FINDINGS = (
    Finding(1, "import path of Ray's workers", _import_path),
    Finding(2, "a Ray that others can use", _ray),
    Finding(3, "SIGKILL to recycled process groups", checks.process_groups),
    Finding(4, "shell injection into clocks.sh", checks.clock_script),
    Finding(5, "links and foreign owners in a run folder", checks.links),
    Finding(6, "terminal escapes and CSV formulas", checks.terminal),
    Finding(7, "Ray's session folder", _session),
    Finding(8, "dashboard on a shared node", checks.dashboard),
    Finding(9, "secrets on the command line", checks.command_line),
    Finding(10, "power samples without a limit", checks.power_samples),
    Finding(11, "root's rights of training scripts", checks.other_users_rights),
    Finding(12, "smaller findings", _smaller),
    Finding(13, "launch.sh's rendezvous", second.launch_script),
    Finding(14, "root reads for the caller of sudo", second.root_reads),
    Finding(15, "root gives files away", second.root_gives),
    Finding(16, "root follows links in a cache", second.root_in_cache),
    Finding(18, "a parser of the caller's as root", second.root_parses),
    Finding(19, "variables before a command", second.secrets),
    Finding(20, "linked folders in a bundle", second.linked_bundle),
    Finding(22, "code in a file from a stranger", second.shown_commands),
    Finding(24, "a trace without a limit", second.large_trace),
    Finding(25, "names of variables in scripts", second.exported_names),
    Finding(26, "files that a driver names", second.driver_patterns),
    Finding(27, "an idle connection to the dashboard", second.idle_connection),
    Finding(28, "another user's zeusd", second.foreign_listener),
    Finding(29, "smaller findings of the second review", second.smaller),
)


def attack(finding: Finding) -> list[Attempt]:
    """Re-enact one group of findings in a folder of its own.

    An attack that cannot be carried out to its end counts as open: it shows nothing.
    """
    with tempfile.TemporaryDirectory(prefix="joulefront-security-") as folder:
        try:
            return list(finding.attack(Path(folder)))
        except Exception as error:  # the other groups are still to be tried
            return [Attempt("the attack itself", True, f"failed: {type(error).__name__}: {error}")]


def _line(finding: Finding, attempt: Attempt) -> str:
    outcome = {True: "OPEN", False: "closed", None: "not tried here"}[attempt.open]
    note = f" ({' '.join(attempt.note.split())})" if attempt.note else ""
    return f"{finding.number:2}  {outcome:14}  {attempt.what}{note}"


def main() -> None:
    parser = arguments("attacks of the security review")
    parser.add_argument(
        "--only", type=int, metavar="N", choices=range(1, 30), help="one group of findings, 1 to 29"
    )
    options = parser.parse_args()
    chosen = [f for f in FINDINGS if options.only in (None, f.number)]
    opened = 0
    for finding in chosen:
        attempts = attack(finding)
        opened += any(attempt.open for attempt in attempts)
        for attempt in attempts:
            print(_line(finding, attempt), flush=True)
    figures = [
        Figure("findings_open", opened, "count"),
        Figure("lines_as_root", second.lines_as_root(), "lines"),
    ]
    by_files = list(second.launch_listeners()[0]) if options.only is None else []
    if options.only is None or options.only in _IN_STUDY:
        seen = _STUDY.seen()
        if seen is None:
            print(f"no study was watched: {_STUDY.why}", file=sys.stderr)
        elif not seen.code:  # a study that failed shows nothing
            assert seen.counted, "packets to other machines are not counted here"
            print("connections to other machines:", ", ".join(seen.outside) or "none")
            listening = [*seen.listening, *by_files]
            print("listening beyond loopback:", ", ".join(listening) or "nothing")
            figures += [
                Figure("connections_outside", len(seen.outside), "count"),
                Figure("listening_beyond_loopback", len(listening), "count"),
            ]
    publish(figures, options.json)


if __name__ == "__main__":
    main()
