"""The attacks of the second security review; its finding N is number 12 + N here."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.security_tools import (
    OTHER_UID,
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
from tuner.workload.clocks import guard
from tuner.workload.clocks.elsewhere import connected
from tuner.workload.clocks.guard_client import EarlierCommand
from tuner.workload.declared_knobs import export_words
from tuner.workload.node.rank_server import RankServer
from tuner.workload.scripts.folder_copy import packed, unpacked

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
    lines = Path(guard.__file__).read_text(encoding="utf-8").splitlines()
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


def launch_script(folder: Path) -> Sequence[Attempt]:
    """Finding 1: what launch.sh opens, and whether code is read from it."""
    configuration = Configuration.of(data_parallel=2, micro_batch=2)
    write_launch_files((configuration, load_job("tiny-gpt"), CPUS), folder)
    env = environment(STEPS="100", PYTHON=sys.executable)
    process = subprocess.Popen(
        [folder / "launch.sh"],
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        end_s, ports = time.monotonic() + 60, set[str]()
        while not ports and process.poll() is None and time.monotonic() < end_s:
            time.sleep(0.5)
            table = subprocess.run(["ss", "-ltnpH"], capture_output=True, text=True, check=True)
            ours = [line for line in table.stdout.splitlines() if f"pid={process.pid}," in line]
            ports = {line.split()[3].rpartition(":")[2] for line in ours}
        time.sleep(3)
        keys = ""
        for port in ports:
            asked = subprocess.run(
                [sys.executable, "-c", KEYS, port], capture_output=True, text=True, check=False
            )
            keys += asked.stdout.strip().strip("[]")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    if not ports:
        return [Attempt("launch.sh", True, "it opened no port within a minute")]
    return [tried("agents of launch.sh unpickle what a stranger writes", bool(keys), keys)]


def copies(folder: Path) -> Sequence[Attempt]:
    """Finding 5: a list of a stranger's, and a folder of another user's."""
    source, copy, notes = folder / "a", folder / "node", folder / "notes"
    source.mkdir()
    (source / "train.py").write_text("")
    notes.write_text("mine")
    unpacked(packed(source), copy)
    (copy / ".joulefront-copy").write_text(f"../notes\n{notes}\n")
    unpacked(packed(source), copy)
    attempts = [tried("a file in a folder says what --sync deletes", not notes.exists())]
    what = "--sync writes to a folder of another user"
    if os.geteuid() != 0:
        return [*attempts, not_tried(what, "only root can give a folder away")]
    (folder / "theirs").mkdir()
    os.chown(folder / "theirs", OTHER_UID, OTHER_UID)
    unpacked(packed(source), folder / "theirs")
    return [*attempts, tried(what, any((folder / "theirs").iterdir()))]


def copied_secrets(folder: Path) -> Sequence[Attempt]:
    """Finding 11: what is copied, and who can read it there."""
    source, copy, outside = folder / "a", folder / "node", folder / "outside"
    source.mkdir(mode=0o700)
    for name in ("train.py", ".env", "deploy.pem"):
        (source / name).write_text("secret")
    unpacked(packed(source), copy)
    found = [path.name for path in copy.iterdir() if path.name in (".env", "deploy.pem")]
    outside.write_text("secret")
    (source / "link").symlink_to(outside)
    try:
        packed(source)
        followed = True
    except InputError:
        followed = False
    return [
        tried("--sync copies secrets", bool(found), ", ".join(found)),
        tried("--sync follows a link out of the folder", followed),
        tried("others can enter the copy of a closed folder", bool(copy.stat().st_mode & 0o077)),
    ]


def secrets(folder: Path) -> Sequence[Attempt]:
    """Finding 7: variables before a pasted command, in the run folder and in a bundle."""
    (folder / "train.py").write_text("import torch\n")
    given = {"PGPASSWORD": "hunter2", "MYSQL_PWD": "hunter3", "OPENAI_KEY": "hunter4"}
    words = [f"{name}={value}" for name, value in given.items()]
    pasted = ["--", *words, "torchrun", "--nproc-per-node", "1", "train.py"]
    done = tuner(["optimize", "--dry-run", "--json", *pasted], folder)
    shown = [value for value in given.values() if value.encode() in done.stdout + done.stderr]
    return [tried("values of variables are shown or stored", bool(shown), ", ".join(shown))]


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


def inherited(folder: Path) -> Sequence[Attempt]:
    """Findings 9 and 17: the password of the storage, in ranks and commands of live knobs."""
    os.environ["JOULEFRONT_STORAGE"] = "postgresql://u:secret@h/d"
    try:
        said = EarlierCommand(("env",), str(folder)).run().stdout
        ranks = RankServer().env
    finally:
        del os.environ["JOULEFRONT_STORAGE"]
    return [
        tried("commands of live knobs get the storage's password", "u:secret" in said),
        tried("ranks get the storage's password", "JOULEFRONT_STORAGE" in ranks),
    ]


def shown_commands(folder: Path) -> Sequence[Attempt]:
    """Finding 10: what a knobs file starts, in a dry run."""
    (folder / "knobs.toml").write_text(
        '[knobs.governor]\nvalues = ["powersave", "performance"]\nlive = true\n'
        'baseline = "powersave"\nset = ["sh", "-c", "id > told # {value}"]\n'
    )
    (folder / "driver.toml").write_text(
        'framework = "x"\n[recognise]\nimports = ["torch"]\n[probe.env]\nLD_PRELOAD = "/x.so"\n'
    )
    checked = tuner(["frameworks", "check", "driver.toml"], folder)
    preloads = checked.returncode != 2 or b"LD_PRELOAD in [probe.env]" not in checked.stderr
    words = ["optimize", "tiny-gpt", "--dry-run", "--knobs", "knobs.toml"]
    done = tuner(words, folder)
    said = (done.stdout + done.stderr).decode()
    hidden = "id > told" not in said
    return [
        tried("a dry run hides the commands of a knobs file", hidden, said[-300:] * hidden),
        tried("a dry run starts them", (folder / "told").exists()),
        tried("a driver loads a library into the ranks", preloads),
        Attempt("a run from an opened bundle starts its command unasked", True, "not mended"),
    ]


def large_trace(folder: Path) -> Sequence[Attempt]:
    """Finding 12: a sparse trace in the list of runs."""
    run = study(folder)
    with (run / "trace" / "probes.jsonl").open("ab") as file:
        file.truncate(20 * 10**9)
    done = tuner(["front", str(run)], folder, timeout_s=60)
    refused = done.returncode == 2 and b"larger than any" in done.stderr
    return [tried("a trace of 20 GB is read", not refused, done.stderr.decode()[-200:])]


def exported_names(folder: Path) -> Sequence[Attempt]:
    """Finding 13: a variable whose name is a command."""
    try:
        export_words({"X=1; touch pwned; Y": "z"})
    except InputError:
        return [tried("names of variables reach launch.sh unquoted", False)]
    return [tried("names of variables reach launch.sh unquoted", True)]


def driver_patterns(folder: Path) -> Sequence[Attempt]:
    """Finding 14: files that a driver names."""
    attempts = []
    for pattern in ("../../../../../../etc/passw*", "/etc/*", "**/../../**/*.py"):
        text = 'framework = "x"\n[recognise]\nimports = ["torch"]\n[[keys]]\nkind = "texts"\n'
        (folder / "driver.toml").write_text(f'{text}file = "{pattern}"\n')
        done = tuner(["frameworks", "check", "driver.toml"], folder, timeout_s=30)
        worked = done.returncode != 2 or b"Traceback" in done.stderr
        attempts.append(tried(f"a driver names {pattern}", worked, done.stderr.decode()[-200:]))
    return attempts


def idle_connection(folder: Path) -> Sequence[Attempt]:
    """Finding 15."""
    return [Attempt("an idle connection stops the dashboard", True, "not mended, not re-enacted")]


def foreign_listener(folder: Path) -> Sequence[Attempt]:
    """Finding 16: what is sent to a socket at which another user listens."""
    what, path = "another user's zeusd is sent the token", folder / "zeusd.sock"
    if os.geteuid() != 0:
        return [not_tried(what, "only root can become another user")]
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        os.seteuid(OTHER_UID)
        try:
            listener.listen()  # the kernel notes who listens
        finally:
            os.seteuid(0)
        try:
            connected(str(path), 2.0).close()
        except PermissionError:
            return [tried(what, False)]
    return [tried(what, True)]
