"""The attacks of the second security review; its finding N is number 12 + N here.

What an earlier version has under another name, or lacks, is imported where it is used, so that the
same attacks can be tried on that version.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.listeners import watched
from benchmarks.security_checks import _request, _served
from benchmarks.security_study import TRAIN
from benchmarks.security_tools import (
    _TUNER,
    OTHER_UID,
    ROOT,
    Attempt,
    environment,
    not_tried,
    study,
    tried,
    tuner,
)
from tuner.deploy.launch_files import write_launch_files
from tuner.search_spaces.cluster import Cluster, Device
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.testing.commands import finished
from tuner.workload.scripts.command import Script

CPUS = Cluster("cpus", Device("core", "cpu", 2**30, 1e9, 1e9, 2.0, 8.0), 2)
#: Prints what a rendezvous that can be reached keeps for its agents.
KEYS = """
import sys, datetime
from torch.distributed import TCPStore
wait = datetime.timedelta(seconds=5)
port = int(sys.argv[1])
store = TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False, timeout=wait)
print([key for key in store.list_keys() if "torch.rendezvous." in key])
"""


def lines_as_root() -> int:
    """Return the lines that ever run as root where the user is not root: those of the guard."""
    from tuner.workload.clocks import guard

    lines = Path(guard.__file__).read_text(encoding="utf-8").splitlines()
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


@functools.cache
def launch_listeners() -> tuple[tuple[str, ...], str, str]:
    """Return what launch files for one node open beyond loopback, agents' keys, and a failure."""
    failure = ""
    with tempfile.TemporaryDirectory(prefix="joulefront-launch-") as folder:
        configuration = Configuration.of(data_parallel=2, micro_batch=2)
        write_launch_files((configuration, load_job("tiny-gpt"), CPUS), Path(folder))
        asked: list[str] = []
        began = functools.partial(_ask_once, asked)
        env = environment(STEPS="100", PYTHON=sys.executable)
        words = [str(Path(folder, "launch.sh"))]
        seen, code, output = watched(words, env, within_s=120, until=began)
        if not seen:
            failure = f"launch.sh opened no port within 2 minutes ({code}): {output[-200:]} "
        keys = "".join(asked)
        beyond = {f"launch.sh {a}" for a in seen if not a.startswith(("127.", "::1:"))}
    return tuple(sorted(beyond)), keys, failure


def _ask_once(asked: list[str], seen: set[str]) -> bool:
    """Ask each port for the keys of a rendezvous, some seconds after the first was seen."""
    if not seen:
        return False
    if len(asked) == 0:
        asked.append("")
        return False
    time.sleep(5)
    for port in {address.rpartition(":")[2] for address in seen}:
        words = [sys.executable, "-c", KEYS, port]
        asked.append(finished(words).stdout.strip().strip("[]"))
    return True


def launch_script(folder: Path) -> Sequence[Attempt]:
    """Finding 1: what launch files open, and whether code is read from it."""
    beyond, keys, failure = launch_listeners()
    if failure:
        return [Attempt("the launch files", True, failure)]
    return [
        tried("agents of launch.sh unpickle what a stranger writes", bool(keys), keys),
        tried("launch files listen beyond loopback", bool(beyond), ", ".join(beyond)),
    ]


@dataclass(frozen=True)
class RootSeen:
    """What root did in folders of the caller of sudo.

    Attributes:
        opened: files below them that it opened.
        owners: files whose owner it changed.
        cache: what it created and deleted where links in the caller's cache lead.
        told: what code of the caller's wrote: with which rights it ran.
        refused: why nothing can be tried here; "" if something was.
    """

    opened: tuple[str, ...] = ()
    owners: tuple[str, ...] = ()
    cache: tuple[str, ...] = ()
    told: str = ""
    refused: str = ""


#: The caller of sudo, known in a mount namespace alone.
MALLORY = 64999
#: Lets another user reach the interpreter, gives the caller an entry and a home, runs a command.
NAMESPACE = """
mkdir "$1/kept" && mount --bind "$2" "$1/kept" && mount --bind "$1/passwd" /etc/passwd
above="/$(cut -d/ -f2 <<< "$2")"
if [ "$above" = /root ]; then mount -t tmpfs -o mode=755 none /root; mkdir -p "$2"; fi
mount --bind "$1/kept" "$2"
shift 2; cd "$1"; shift; exec "$@"
"""
#: `tuner`, which notes what this process opens, creates, removes and gives away.
NOTED = """
import json, os, sys
notes = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_CREAT | os.O_APPEND)
def note(event, args):
    if event in ("open", "os.chown", "os.remove", "os.mkdir", "os.rename") and args:
        path = args[0]
        if isinstance(path, int):
            try: path = os.readlink(f"/proc/self/fd/{path}")
            except OSError: return
        path = os.fsdecode(path)
        if os.path.isabs(path):
            os.write(notes, (json.dumps([event, path, os.geteuid()]) + "\\n").encode())
sys.addaudithook(note)
from tuner.cli.main import main
sys.exit(main())
"""


@functools.cache
def root_seen() -> RootSeen:
    """Start `tuner` as sudo does, in a folder of the caller's, and return what root did there."""
    if os.geteuid() != 0:
        return RootSeen(refused="only root can start tuner as sudo does")
    if finished(["unshare", "--mount", "true"]).returncode:
        return RootSeen(refused="no mount namespace")
    from tuner.workload.node.ops import build_kind

    with tempfile.TemporaryDirectory(prefix="joulefront-sudo-") as name:
        folder = Path(name)
        folder.chmod(0o711)
        home, away = folder / "home", folder / "away"
        own, told, notes = home / "project", home / "told", folder / "notes"
        cache = home / ".cache" / "joulefront" / "torch_extensions" / build_kind()
        for path in (own, cache, away):
            path.mkdir(parents=True)
        (away / "lock").touch()
        os.utime(away / "lock", (1, 1))
        (cache / "joulefront.lock").symlink_to(away / "nologin")
        (cache / "x").symlink_to(away)
        says = f"import os\nopen({str(told)!r}, 'a').write(f'uid {{os.geteuid()}} ')\n"
        (own / "sitecustomize.py").write_text(says)
        (own / "script.py").write_text(TRAIN)
        for path in (home, *home.rglob("*")):
            os.chown(path, MALLORY, MALLORY, follow_symlinks=False)
        entry = f"mallory:x:{MALLORY}:{MALLORY}::{home}:/bin/sh\n"
        (folder / "passwd").write_text(Path("/etc/passwd").read_text() + entry)
        env = environment(SUDO_UID=str(MALLORY), SUDO_GID=str(MALLORY), SUDO_USER="mallory")
        for name in ("XDG_CACHE_HOME", "TORCH_EXTENSIONS_DIR"):
            env.pop(name, None)
        pasted = [f"PYTHONPATH={own}", "torchrun", "--nproc-per-node", "1", "script.py"]
        for words in (
            ["optimize", "--dry-run", "--", *pasted],
            ["dev", "probe", "--script", "script.py", "--steps", "9", "--global-batch", "2"],
        ):
            start = [sys.executable, "-P", "-c", NOTED, str(notes), *words]
            base = str(Path(sys.base_prefix).resolve())
            inside = ["bash", "-euc", NAMESPACE, "-", str(folder), base, str(own), *start]
            _ended(["unshare", "--mount", *inside], env, within_s=150)
            (folder / "kept").rmdir()
        events = [json.loads(line) for line in notes.read_text().splitlines()]
        mine = [(e, p) for e, p, uid in events if uid == 0 and p.startswith(str(home))]
        left = {path.name for path in away.iterdir()}
        return RootSeen(
            tuple(sorted({Path(p).name for e, p in mine if e == "open" and Path(p) != own})),
            tuple(sorted({Path(p).name for e, p in mine if e == "os.chown"})),
            (
                *(["nologin created"] * ("nologin" in left)),
                *(["lock deleted"] * ("lock" not in left)),
            ),
            told.read_text() if told.exists() else "",
        )


def _ended(words: Sequence[str], env: dict[str, str], *, within_s: float) -> None:
    """Run a command to its end, or kill it and its group."""
    quiet = subprocess.DEVNULL
    process = subprocess.Popen(
        words, env=env, stdin=quiet, stdout=quiet, stderr=quiet, start_new_session=True
    )
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(within_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _by_root(what: str, found: str) -> list[Attempt]:
    refused = root_seen().refused
    return [not_tried(what, refused) if refused else tried(what, bool(found), found)]


def root_reads(folder: Path) -> Sequence[Attempt]:
    """Finding 2: files below the caller's folder, which the caller can exchange by links."""
    what = "root opens files where the caller of sudo can make links"
    return _by_root(what, _some(root_seen().opened))


def root_gives(folder: Path) -> Sequence[Attempt]:
    """Finding 3: owners that root changes below a path of the caller's."""
    return _by_root("root gives files to the caller of sudo", _some(root_seen().owners))


def root_in_cache(folder: Path) -> Sequence[Attempt]:
    """Finding 4: links in the caller's cache."""
    return _by_root("root creates and deletes by links in a cache", _some(root_seen().cache))


def root_parses(folder: Path) -> Sequence[Attempt]:
    """Finding 6: code of the caller's that the parser of a pasted command imports."""
    told = root_seen().told
    return _by_root("the caller's code runs as root in a parser", told * ("uid 0 " in told))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:6]) + (f" and {len(names) - 6} more" if len(names) > 6 else "")


def secrets(folder: Path) -> Sequence[Attempt]:
    """Finding 7: variables and arguments of a pasted command, in all that is written."""
    from tuner.evidence.redact import Redactor
    from tuner.workload.scripts.inspection import blank_job

    (folder / "train.py").write_text("import torch\n")
    given = {"PGPASSWORD": "hunter2", "MYSQL_PWD": "hunter3", "OPENAI_KEY": "hunter4"}
    words = [f"{name}={value}" for name, value in given.items()]
    pasted = [*words, "torchrun", "--nproc-per-node", "2", "train.py", "--wandb-key", "hunter7"]
    done = tuner(["optimize", "--dry-run", "--json", "--", *pasted], folder)
    job = blank_job(Script(" ".join(pasted), cwd=folder), CPUS)
    write_launch_files((job.baseline, job, CPUS), folder / "files")
    launch = folder / "files" / "launch.sh"
    recorded = {"assigned": given | {"RUN": "hunter9"}, "words": ["train.py", "--pw", "hunter8"]}
    places = {
        "a dry run": done.stdout.decode() + done.stderr.decode(),
        "study.toml": json.dumps(job.to_json()),
        "launch.sh": launch.read_text(),
        "a redacted bundle": json.dumps(Redactor().value({"launcher": json.dumps(recorded)})),
    }
    attempts = [
        tried(f"{place} holds values of secrets", "hunter" in text, _some(_hunters(text)))
        for place, text in places.items()
    ]
    readable = bool(launch.stat().st_mode & 0o077)
    return [*attempts, tried("others can read launch.sh", readable)]


def _hunters(text: str) -> list[str]:
    return sorted(set(re.findall(r"hunter\d", text)))


def linked_bundle(folder: Path) -> Sequence[Attempt]:
    """Finding 8: a run whose folder leads to private keys."""
    run, home = study(folder), folder / "home"
    home.mkdir()
    (home / "id_rsa").write_text("PRIVATE")
    shutil.rmtree(run / "best", ignore_errors=True)
    (run / "best").symlink_to(home)
    done = tuner(["export", str(run), "--to", "bundle", "--out", "out.zip"], folder)
    out = folder / "out.zip"
    held = out.exists() and b"id_rsa" in out.read_bytes()
    return [tried("a bundle holds what a linked folder does", held, done.stderr.decode())]


@contextlib.contextmanager
def _storage() -> Iterator[None]:
    os.environ["JOULEFRONT_STORAGE"] = "postgresql://u:secret@h/d"
    try:
        yield
    finally:
        del os.environ["JOULEFRONT_STORAGE"]


def smaller(folder: Path) -> Sequence[Attempt]:
    """Finding 17: ranks' environment, a textual clock, unpinned builds, an unnamed file."""
    from tuner.workload.node.rank_server import RankServer

    with _storage():
        ranks = RankServer().env
    run = study(folder)
    trace = run / "trace" / "probes.jsonl"
    clock = re.compile(r'("live":\[?\{"clock_MHz":)[\d.]+')
    trace.write_text(clock.sub(r'\1"900$(id)"', trace.read_text()))
    (run / "study.journal").unlink(missing_ok=True)
    done = tuner(["apply", "study"], folder)
    traceback = b"Traceback" in done.stderr
    attempts = [
        tried("ranks get the storage's password", "JOULEFRONT_STORAGE" in ranks),
        tried("a textual clock ends in a traceback", traceback, done.stderr.decode()[-200:]),
    ]
    if not (ROOT / ".ci" / "run").exists():
        return attempts
    make = (ROOT / "Makefile").read_text()
    report = (ROOT / "tests" / "display" / "test_report.py").read_text()
    advice = (ROOT / "SECURITY.md").read_text()
    return [
        *attempts,
        tried("make install builds with any release of setuptools", "PIP_CONSTRAINT" not in make),
        tried("nothing knows the bytes of plotly.js", "sha256" not in report),
        tried("a foreign run is said to be read by report", "`report`, `compare`" in advice),
        tried("what a stranger in the rendezvous can do is played down", "unpickles" not in advice),
    ]


def shown_commands(folder: Path) -> Sequence[Attempt]:
    """Finding 10: what a knobs file and a driver start."""
    knob = '[{}knobs.library]\nvalues = ["/y.so"]\nhow = "env:LD_PRELOAD"\n'
    (folder / "knobs.toml").write_text(knob.format(""))
    (folder / "train.py").write_text("import torch\n")
    driver = 'framework = "x"\n[recognise]\nimports = ["torch"]\n[probe.env]\n'
    (folder / "driver.toml").write_text(f'{driver}LD_PRELOAD = "/x.so"\n')
    (folder / "plugin.toml").write_text(f'{driver}NCCL_NET_PLUGIN = "/x.so"\n')
    checked = tuner(["dev", "frameworks", "check", "driver.toml"], folder)
    preloads = checked.returncode != 2 or b"LD_PRELOAD in [probe.env]" not in checked.stderr
    attempts = [tried("a driver loads a library into the ranks", preloads)]
    for what, words, shown in (
        ("a knobs file", ["tiny-gpt", "--knobs", "knobs.toml"], "LD_PRELOAD=/y.so"),
        ("a driver", ["--framework", "plugin.toml", "--", "train.py"], "NCCL_NET_PLUGIN=/x.so"),
    ):
        dry = tuner(["optimize", "--dry-run", *words], folder)
        hidden = shown not in (dry.stdout + dry.stderr).decode()
        attempts.append(tried(f"a dry run hides what {what} starts", hidden, _last(dry) * hidden))
        real = ["optimize", "--executor", "inline", "--max-probes", "1", *words]
        done = tuner(real, folder, timeout_s=60)
        unasked = done.returncode != 2 or b"--trust" not in done.stderr
        attempts.append(tried(f"what {what} names starts unasked", unasked, _last(done) * unasked))
    return attempts


def _last(done: subprocess.CompletedProcess[bytes]) -> str:
    return (done.stdout + done.stderr).decode(errors="replace")[-200:]


def large_trace(folder: Path) -> Sequence[Attempt]:
    """Finding 12: a sparse trace, and a line of very many lists, within 4 GiB of memory."""
    attempts = []
    for what in ("a trace of 20 GB is read", "a line of 120 MB is read"):
        run = study(folder, what.replace(" ", "-"))
        with (run / "trace" / "probes.jsonl").open("ab") as file:
            if "20 GB" in what:
                file.truncate(20 * 10**9)
            else:
                file.write(b"[" + b"[]," * 40_000_000 + b"[]]\n")
        limited = ["bash", "-c", 'ulimit -v 4194304; exec "$@"', "-", *_TUNER, "show", str(run)]
        done = finished(limited, cwd=folder, env=environment())
        refused = done.returncode == 2 and "larger than any" in done.stderr
        attempts.append(tried(what, not refused, done.stderr[-200:]))
    return attempts


def exported_names(folder: Path) -> Sequence[Attempt]:
    """Finding 13: a variable whose name is a command."""
    from tuner.workload.declared_knobs import export_words

    what = "names of variables reach launch.sh unquoted"
    try:
        words = export_words({"X=1; touch pwned; Y": "z"})
    except InputError:
        return [tried(what, False)]
    return [tried(what, True, " ".join(words))]


def driver_patterns(folder: Path) -> Sequence[Attempt]:
    """Finding 14: files that a driver names."""
    attempts = []
    for pattern in ("../../../../../../etc/passw*", "/etc/*", "**/../../**/*.py", "**/*.py"):
        text = 'framework = "x"\n[recognise]\nimports = ["torch"]\n[[keys]]\nkind = "texts"\n'
        (folder / "driver.toml").write_text(f'{text}file = "{pattern}"\n')
        done = tuner(["dev", "frameworks", "check", "driver.toml"], folder, timeout_s=30)
        worked = done.returncode != 2 or b"Traceback" in done.stderr
        attempts.append(tried(f"a driver names {pattern}", worked, done.stderr.decode()[-200:]))
    return attempts


def idle_connection(folder: Path) -> Sequence[Attempt]:
    """Finding 15: an idle connection, and a cookie that is sent to every port of its host."""
    study(folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with _served(["study"], folder, port) as printed:
        found = re.search(rf"https?://([^\s/]+):{port}(/\S*)", printed)
        if found is None:
            return [Attempt("the dashboard", True, f"it printed {printed!r}")]
        cookie = {"Cookie": _request(port, "GET", found[2])[1]}
        _request(port, "GET", "/api/studies", **cookie)  # the first one imports
        with socket.create_connection(("127.0.0.1", port)):
            time.sleep(0.5)
            began_s, answered = time.monotonic(), threading.Event()

            def ask() -> None:
                with contextlib.suppress(OSError):
                    _request(port, "GET", "/api/studies", **cookie)
                    answered.set()

            threading.Thread(target=ask, daemon=True).start()
            answered.wait(5)
            waited_s = time.monotonic() - began_s
    shared = found[1] in ("127.0.0.1", "localhost", "[::1]")
    return [
        tried("an idle connection stops the dashboard", waited_s >= 5, f"{waited_s:.1f} s"),
        tried("its cookie is sent to every port of 127.0.0.1", shared, found[1]),
    ]


class _Nvml:
    """What the client of zeusd needs of NVML where nothing is set."""

    NVML_ERROR_UNKNOWN = NVML_ERROR_NO_PERMISSION = 1

    class NVMLError(Exception):
        """NVML's error."""


def foreign_listener(folder: Path) -> Sequence[Attempt]:
    """Finding 16: what is sent to a socket at which another user listens."""
    from tuner.workload.clocks.ways import ZeusdNvml

    what, path = "another user's zeusd is sent the token", folder / "zeusd.sock"
    if os.geteuid() != 0:
        return [not_tried(what, "only root can become another user")]
    heard: list[bytes] = []
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        os.seteuid(OTHER_UID)
        try:
            listener.listen()  # the kernel notes who listens
        finally:
            os.seteuid(0)

        def hear() -> None:
            connection, _ = listener.accept()
            with connection:
                heard.append(connection.recv(4096))

        thread = threading.Thread(target=hear, daemon=True)
        thread.start()
        with contextlib.suppress(_Nvml.NVMLError):
            ZeusdNvml(_Nvml, str(path), token="SECRET-TOKEN")._request("GET", "/discover")
        thread.join(5)
    return [tried(what, b"SECRET-TOKEN" in b"".join(heard))]
