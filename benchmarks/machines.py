"""`make run` and `make test` on other machines: clean roots of Debian, with little installed.

Each is a folder that mmdebstrap fills with a bare Debian and the few packages of the README. There
an ordinary user clones this repository's last commit and runs both commands in an empty
environment: what the tests need and nobody named fails there. Of this machine a root has the
kernel, the network, and the settings of pip (mirrors, certificates), which are not the machine's.

    python -m benchmarks.machines --list
    python -m benchmarks.machines debian-12 python-3.13
    python -m benchmarks.machines debian-12 --brief
    python -m benchmarks.machines debian-12 --keep -- .venv/bin/python -m pytest -q tests/receipt

`--brief` is for CI: a search of half a minute, no checks of the code, and of the tests that start
Ray, which CI runs elsewhere, the one that measures. What passes in a root is in
build/machines/MACHINE.xml, so that CI runs only the other everyday tests on its own machine (`make
everyday-rest`). The last line runs a command in such a root's clone instead, and keeps the root for
a look. Needs root, for chroot and mounts, and mmdebstrap; what a machine needs and cannot have is
said, and the others go on.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import os
import shlex
import shutil
import subprocess
import sys
import time
import tomllib
import xml.etree.ElementTree as ElementTree
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import unquote, urlsplit

from benchmarks.figures import ROOT, Figure, arguments, publish

FOLDER = ROOT / "build" / "machines"
#: Packages of every root: what the README asks for.
PACKAGES = ("python3", "python3-venv", "git", "make", "ca-certificates")
USER, UID = "contributor", 1000
PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
#: Variables of this machine's network, which the package index may need.
NETWORK = ("http_proxy", "https_proxy", "no_proxy", "HTTP_PROXY", "HTTPS_PROXY", "NO_PROXY")
#: What is mounted, and what a command starts, ends with it.
ALONE = ("setpriv", "--pdeathsig", "KILL", "unshare", "--mount", "--pid", "--fork", "--kill-child")
#: Words of make for `--brief`, in place of the longer search and of "test".
BRIEF_SEARCH = ("SEARCH=--max-probes 4 --search-time 30s",)
BRIEF_TESTS = (
    ("everyday-alone", "CASES=-k test_it_keeps_the_executor_protocol_and_measures"),
    ("everyday-shared", "ABOVE=fail"),
)
#: Lines of its output that are shown of a machine that failed: the summary of its tests.
LAST_LINES = 60
#: A command that takes longer is ended, and counts as failed.
LIMIT_S = 45 * 60


@dataclass(frozen=True)
class Machine:
    """One machine on which the two commands must work.

    Attributes:
        what: in words.
        suite: of Debian.
        packages: installed besides `PACKAGES`.
        python: the version of an interpreter that is copied from this machine; empty for Debian's.
        interpreter: given to make; empty for its own choice.
        environment: set besides PATH, HOME and TERM.
        clone: the folder of the clone.
        read_only_home: nothing can be written in the home.
        shm_MB: size of /dev/shm; None for this machine's.
        cores: the processes may run on the first so many only; None for all.
    """

    what: str
    suite: str = "bookworm"
    packages: tuple[str, ...] = ()
    python: str = ""
    interpreter: str = ""
    environment: Mapping[str, str] = field(default_factory=dict)
    clone: str = f"/home/{USER}/joulefront"
    read_only_home: bool = False
    shm_MB: int | None = None
    cores: int | None = None


def _machines() -> dict[str, Machine]:
    rows = tomllib.loads((ROOT / "benchmarks" / "data" / "machines.toml").read_text("utf-8"))
    return {
        name: Machine(**{**row, "packages": tuple(row.get("packages", ()))})
        for name, row in rows.items()
    }


MACHINES = _machines()


class CannotBeHadError(Exception):
    """A machine needs what this one does not have."""


@dataclass(frozen=True)
class Outcome:
    """What a machine made of the two commands.

    Attributes:
        make_run_exit: exit code of `make run`.
        make_test_exit: exit code of `make test`.
        everyday_s: time of `make test`, without what it installs.
        passed: number of tests that passed.
        failed: the names of tests that failed or could not begin.
        skipped: the number of tests that were left out for each reason.
    """

    make_run_exit: int
    make_test_exit: int
    everyday_s: float
    passed: int
    failed: tuple[str, ...]
    skipped: Mapping[str, int]

    @property
    def well(self) -> bool:
        """Return whether both commands ended well, and something was tested."""
        return not (self.make_run_exit or self.make_test_exit or self.failed) and self.passed > 0


def tests_of(files: Sequence[Path]) -> tuple[int, tuple[str, ...], Counter[str]]:
    """Return the number of passed tests, the failed ones and the skipped ones' reasons."""
    passed, failed, skipped = 0, [], Counter[str]()
    for file in files:
        for case in ElementTree.parse(file).iter("testcase"):
            name = f"{case.get('classname')}::{case.get('name')}"
            if case.find("failure") is not None or case.find("error") is not None:
                failed.append(name)
            elif (left_out := case.find("skipped")) is not None:
                skipped[left_out.get("message") or "no reason"] += 1
            else:
                passed += 1
    return passed, tuple(failed), skipped


def interpreter(version: str) -> Path:
    """Return the folder in which this machine has a Python of a version.

    Raises:
        CannotBeHadError: there is none.
    """
    pyenv = Path(os.environ.get("PYENV_ROOT") or Path.home() / ".pyenv") / "versions"
    name = f"python{version}"
    ask = "import ensurepip, sys, venv; print('%d.%d' % sys.version_info[:2], sys.base_prefix)"
    for place in (*sorted(pyenv.glob(f"{version}.*/bin/{name}")), shutil.which(name)):
        if place is None:
            continue
        done = subprocess.run([place, "-c", ask], capture_output=True, text=True, check=False)
        found, _, prefix = done.stdout.strip().partition(" ")
        if found == version and prefix not in ("", "/usr"):
            return Path(prefix)
    raise CannotBeHadError(f"no {name} here that can be copied (in a folder of its own)")


def pip_settings() -> dict[str, str]:
    """Return what configures pip here, from its files and from the environment."""
    words = [sys.executable, "-m", "pip", "config", "list"]
    done = subprocess.run(words, capture_output=True, text=True, check=True)
    settings = {}
    # The environment's hold against those of files.
    for line in sorted(done.stdout.splitlines(), key=lambda line: line.startswith(":env:")):
        name, _, value = line.partition("=")
        settings[name.rpartition(".")[2]] = str(ast.literal_eval(value))
    return settings


def local_paths(settings: Mapping[str, str]) -> list[Path]:
    """Return the folders and files of this machine that pip's settings name."""
    found = set()
    for value in settings.values():
        for word in value.split():
            url = urlsplit(word)
            path = Path(unquote(url.path) if url.scheme == "file" else word)
            if path.is_absolute() and path.exists():
                # The pages of an index name the files beside it.
                found.add(path.parent if path.name == "simple" else path)
    return sorted(found)


class CleanRoot:
    """Folder with a bare Debian, a user and a clone, in which commands run as on a machine."""

    def __init__(self, machine: Machine, folder: Path) -> None:
        """Make the root.

        Args:
            machine: what it is like.
            folder: replaced if it exists.

        Raises:
            CannotBeHadError: this machine cannot make it.
        """
        self.machine, self.folder = machine, folder
        self.pip = pip_settings()
        if folder.exists():
            shutil.rmtree(folder)
        subprocess.run(
            ["cp", "-a", bare_debian(machine.suite, machine.packages), folder], check=True
        )
        self._add_user()
        self._add_settings()
        if machine.python:
            self._copy_interpreter(machine.python)
        self._clone()

    def _copy_interpreter(self, version: str) -> None:
        """Copy an interpreter to the same place, which is written in its programs."""
        prefix, name = interpreter(version), f"python{version}"
        shutil.copytree(prefix, self._inside(prefix), symlinks=True)
        _reachable(self._inside(prefix))
        (self.folder / "usr/local/bin" / name).symlink_to(prefix / "bin" / name)

    @property
    def _python(self) -> str:
        version = self.machine.python
        return f"python{version}" if version else self.machine.interpreter

    @property
    def durations(self) -> Path:
        """The folder in which each part of `make test` leaves what became of its tests."""
        return self._inside(self.machine.clone) / "build" / "durations"

    def _inside(self, path: str | Path) -> Path:
        return self.folder / str(path).lstrip("/")

    def _add_user(self) -> None:
        home = self.folder / "home" / USER
        home.mkdir(parents=True)
        os.chown(home, UID, UID)
        for name, line in (
            ("passwd", f"{USER}:x:{UID}:{UID}::/home/{USER}:/bin/sh\n"),
            ("group", f"{USER}:x:{UID}:\n"),
        ):
            with open(self.folder / "etc" / name, "a") as file:
                file.write(line)

    def _add_settings(self) -> None:
        for name in ("resolv.conf", "hosts"):
            shutil.copyfile(f"/etc/{name}", self.folder / "etc" / name)
        # What another machine has built is not built again, and Python compiles what is imported,
        # which is little of what is installed.
        lines = {**self.pip, "cache-dir": "/var/cache/pip", "no-compile": "true"}
        text = "".join(f"{name} = {value.replace(chr(10), ' ')}\n" for name, value in lines.items())
        (self.folder / "etc" / "pip.conf").write_text(f"[global]\n{text}")
        cache = FOLDER / "pip-cache"
        cache.mkdir(parents=True, exist_ok=True)
        os.chown(cache, UID, UID)

    def _clone(self) -> None:
        clone = self._inside(self.machine.clone)
        # The checkout may belong to another user, as in a container.
        settings = FOLDER / "gitconfig"
        settings.write_text("[safe]\n\tdirectory = *\n")
        words = ["git", "clone", "--quiet", ROOT.as_uri(), str(clone)]
        subprocess.run(words, check=True, env={**os.environ, "GIT_CONFIG_GLOBAL": str(settings)})
        subprocess.run(["chown", "-R", f"{UID}:{UID}", clone], check=True)

    def _mounts(self) -> list[str]:
        root = shlex.quote(str(self.folder))
        lines = [
            f"mount --bind {root} {root}",
            f"mount -t proc proc {root}/proc",
            f"mount --rbind /dev {root}/dev",
            f"mount --rbind /sys {root}/sys",
        ]
        shared = [(path, path, "ro") for path in local_paths(self.pip)]
        shared.append((FOLDER / "pip-cache", Path("/var/cache/pip"), "rw"))
        for here, there, how in shared:
            target = self._inside(there)
            _reachable(target.parent)
            target.touch() if here.is_file() else target.mkdir(exist_ok=True)
            source, place = shlex.quote(str(here)), shlex.quote(str(target))
            lines += [f"mount --bind {source} {place}", f"mount -o remount,bind,{how} {place}"]
        if self.machine.shm_MB is not None:
            size = f"size={self.machine.shm_MB}m"
            lines.append(f"mount -t tmpfs -o {size} tmpfs {root}/dev/shm")
        if self.machine.read_only_home:
            home = f"{root}/home/{USER}"
            lines += [f"mount --bind {home} {home}", f"mount -o remount,bind,ro {home}"]
        return lines

    def run(self, words: Sequence[str], log: Path | None) -> int:
        """Run a command in the clone, as the user, in an empty environment; return its exit code.

        Args:
            words: of the command.
            log: takes its output; None shows it.
        """
        kept = {name: os.environ[name] for name in NETWORK if name in os.environ}
        stated = {"PATH": PATH, "HOME": f"/home/{USER}", "TERM": "dumb"}
        variables = {**kept, **stated, **self.machine.environment}
        inside = f"cd {shlex.quote(self.machine.clone)} && exec {shlex.join(words)}"
        if self.machine.cores is not None:
            first = sorted(os.sched_getaffinity(0))[: self.machine.cores]
            inside = f"taskset -p -c {','.join(map(str, first))} $$ >/dev/null; {inside}"
        words = [
            *("chroot", f"--userspec={UID}:{UID}", str(self.folder), "/usr/bin/env", "-i"),
            *(f"{name}={value}" for name, value in variables.items()),
            *("sh", "-c", inside),
        ]
        script = "\n".join(["set -e", *self._mounts(), f"exec {shlex.join(words)}"])
        with contextlib.ExitStack() as opened:
            output = opened.enter_context(open(log, "a")) if log else None
            try:
                done = subprocess.run(
                    [*ALONE, "sh", "-c", script],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=subprocess.STDOUT if output else None,
                    timeout=LIMIT_S,
                    check=False,
                )
            except subprocess.TimeoutExpired:
                return 124
        return done.returncode

    def outcome(self, log: Path, *, brief: bool = False) -> Outcome:
        """Run both commands.

        Args:
            log: takes what they print.
            brief: a short search, and tests without the checks of the code.
        """
        chosen = [f"PYTHON={self._python}"] if self._python else []
        search, tests = (BRIEF_SEARCH, BRIEF_TESTS) if brief else ((), (("test",),))
        run_exit = self.run(["make", *chosen, "run", *search], log)
        self.run(["make", *chosen, "install"], log)
        began_s = time.monotonic()
        exits = [self.run(["make", *chosen, *words], log) for words in tests]
        test_exit = next(filter(None, exits), 0)
        everyday_s = time.monotonic() - began_s
        passed, failed, skipped = tests_of(sorted(self.durations.glob("*.xml")))
        return Outcome(run_exit, test_exit, everyday_s, passed, failed, skipped)


def _reachable(folder: Path) -> None:
    """Make a folder of a root, and let its user pass on the way to it."""
    folder.mkdir(parents=True, exist_ok=True)
    for each in (folder, *folder.parents):
        if each == FOLDER:
            break
        each.chmod(each.stat().st_mode | 0o055)


def _apt_settings() -> list[str]:
    """Return how apt reaches the archive here: its proxies, and how old its lists may be."""
    words = ["apt-config", "dump", "--format", '%f "%v";%n', "Acquire"]
    said = subprocess.run(words, capture_output=True, text=True, check=False).stdout
    wanted = ("Acquire::Check-", "Acquire::http::Proxy", "Acquire::https::Proxy", "Acquire::Max-")
    return [line for line in said.splitlines() if line.startswith(wanted)]


@functools.cache
def bare_debian(suite: str, packages: tuple[str, ...]) -> Path:
    """Return the folder of a bare Debian, which is made once.

    Raises:
        CannotBeHadError: without root or mmdebstrap, or where the archive lacks something.
    """
    if os.geteuid() != 0:
        raise CannotBeHadError("only root may change the root folder and mount")
    if shutil.which("mmdebstrap") is None:
        raise CannotBeHadError("no mmdebstrap (Debian: apt-get install mmdebstrap)")
    tried = subprocess.run([*ALONE, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        raise CannotBeHadError(f"no namespaces may be made here: {tried.stderr.strip()}")
    made = FOLDER / "-".join([suite, *packages]).replace("/", "_")
    if made.exists():
        return made
    half = made.with_suffix(".half")
    if half.exists():
        shutil.rmtree(half)
    half.parent.mkdir(parents=True, exist_ok=True)
    included = ",".join((*PACKAGES, *packages))
    words = ["mmdebstrap", "--quiet", "--variant=minbase", f"--include={included}"]
    words += [f"--aptopt={line}" for line in _apt_settings()]
    done = subprocess.run([*words, suite, half], capture_output=True, text=True, check=False)
    if done.returncode:
        raise CannotBeHadError(f"mmdebstrap cannot make {suite}: {done.stderr.strip()[-300:]}")
    half.rename(made)
    return made


def _print_row(name: str, machine: Machine, found: Outcome) -> None:
    print(
        f"{name:20} failed {len(found.failed)}, passed {found.passed}, "
        f"skipped {sum(found.skipped.values())}, make_run_exit {found.make_run_exit}, "
        f"make_test_exit {found.make_test_exit}, everyday_s {found.everyday_s:.0f} "
        f"({machine.what})"
    )
    for each in found.failed:
        print(f"{'':20} failed: {each}")
    for reason, count in Counter(found.skipped).most_common():
        print(f"{'':20} skipped {count}: {reason}", flush=True)


def figures_of(name: str, found: Outcome) -> list[Figure]:
    row = name.replace("-", "_").replace(".", "_")
    return [
        Figure(f"{row}_failed", len(found.failed), "count"),
        Figure(f"{row}_skipped", sum(found.skipped.values()), "count"),
        Figure(f"{row}_make_run_exit", found.make_run_exit, "code"),
        Figure(f"{row}_everyday_s", found.everyday_s, "s"),
    ]


def main() -> None:
    parser = arguments(__doc__, "machines")
    parser.add_argument("machines", nargs="*", metavar="MACHINE", help="(default: all of --list)")
    parser.add_argument("--list", action="store_true", help="name the machines and end")
    parser.add_argument("--brief", action="store_true", help="a short search, fewer tests")
    parser.add_argument("--keep", action="store_true", help="keep the roots, in build/machines")
    at = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    options, command = parser.parse_args(sys.argv[1:at]), sys.argv[at + 1 :]
    if options.list:
        print("\n".join(f"{name:20} {machine.what}" for name, machine in MACHINES.items()))
        return
    unknown = [name for name in options.machines if name not in MACHINES]
    if unknown:
        parser.error(f"unknown machine {unknown[0]!r}; known: {', '.join(MACHINES)}")
    figures: list[Figure] = []
    badly = []
    for name in options.machines or MACHINES:
        machine, folder = MACHINES[name], FOLDER / f"root-{name}"
        passed = FOLDER / f"{name}.xml"
        passed.unlink(missing_ok=True)
        try:
            root = CleanRoot(machine, folder)
        except CannotBeHadError as error:
            print(f"{name:20} was left out: {error}", flush=True)
            continue
        if command:
            badly += [name] if root.run(command, None) else []
        else:
            log = FOLDER / f"{name}.log"
            log.write_text("")
            found = root.outcome(log, brief=options.brief)
            if (ended := root.durations / "everyday-shared.xml").exists():
                shutil.copyfile(ended, passed)
            _print_row(name, machine, found)
            figures += figures_of(name, found)
            if not found.well:
                badly.append(f"{name} (its output: {log})")
                print(*log.read_text(errors="replace").splitlines()[-LAST_LINES:], sep="\n")
        if not options.keep:
            shutil.rmtree(folder)
    publish(figures, options.json)
    if badly:
        sys.exit(f"not well: {', '.join(badly)}")


if __name__ == "__main__":
    main()
