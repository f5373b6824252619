"""A local study in a network namespace of its own, watched and attacked while it runs.

The namespace has a loopback interface and one more with a default route, so that a packet to any
other machine has somewhere to go and is counted there. `python -m benchmarks.security_study FOLDER`
runs inside it; `watch` starts that and returns what it saw. The package is copied, as a
wheel would install it, because an editable install finds its modules in another way.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import struct
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path

from benchmarks.security_tools import (
    _TUNER,
    ROOT,
    as_other_user,
    environment,
    writable_by_others,
)
from tuner.testing.commands import finished

#: The machine's own address in the namespace, and one that is another machine's (RFC 5737).
HERE, ELSEWHERE = "192.0.2.1", "198.51.100.7"
STUDY_S = 240.0
#: Modules that the study imports under these names, planted where it is started.
PLANTED = ("search_spaces.py", "numpy.py", "models/__init__.py", "workload/__init__.py")
#: Leaves a mark and then makes way for the module that was meant, so that the study continues.
PLANT = """
import importlib, os, sys
with open({marks!r}, "a") as file:
    file.write(f"{{__name__}} imported by uid {{os.getuid()}}\\n")
sys.path[:] = [path for path in sys.path if os.path.realpath(path or ".") != {folder!r}]
sys.modules.pop(__name__)
importlib.invalidate_caches()
importlib.import_module(__name__)
"""
TRAIN = """
import torch
torch.distributed.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(8, 8))
optimizer = torch.optim.SGD(model.parameters(), 1e-3)
for _ in range(10_000_000):
    model(torch.randn(4, 8)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
"""
#: Joins the Ray of a study as a stranger would, and runs a task there.
JOIN = """
import sys, ray
ray.init(address=sys.argv[1], log_to_driver=False, logging_level="CRITICAL")
task = ray.remote(num_cpus=0)(lambda path: open(path, "w").close())
ray.get(task.remote(sys.argv[2]), timeout=20)
"""


@dataclass
class Seen:
    """What was seen during the study.

    Attributes:
        code: exit code of `tuner optimize`.
        error: last lines of its standard error.
        outside: protocol and destination of packets to other machines.
        counted: packets to another machine are counted (one was sent before the study).
        listening: "process address:port" of TCP sockets that other machines reach.
        planted: modules imported from the folder of the study.
        ray: a Ray was seen.
        own_token: its token is the study's own, by RAY_AUTH_TOKEN, and not one from HOME.
        joined: a process without the token ran a task there; None if it was not tried.
        join_error: last line of what that process printed.
        token_shown: the token is in an argument of a process.
        token_file: mode of the token file in HOME, 0 without one.
        session: folder of Ray's session.
        renamed: another user renamed a folder of the session.
    """

    code: int | None = None
    error: str = ""
    outside: list[str] = field(default_factory=list)
    counted: bool = False
    listening: list[str] = field(default_factory=list)
    planted: list[str] = field(default_factory=list)
    ray: bool = False
    own_token: bool = False
    joined: bool | None = None
    join_error: str = ""
    token_shown: bool = False
    token_file: int = 0
    session: str = ""
    renamed: bool = False


def _unshare() -> list[str]:
    return ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]


def unavailable() -> str:
    """Return why no study can be watched here, empty if one can."""
    for name in ("unshare", "ip"):
        if shutil.which(name) is None:
            return f"there is no {name} command"
    trial = finished([*_unshare(), "true"])
    return "" if trial.returncode == 0 else f"no network namespace: {trial.stderr.strip()}"


def watch(folder: Path) -> Seen:
    """Run the study in a namespace of its own and return what was seen.

    Raises:
        RuntimeError: it could not be watched.
    """
    words = [sys.executable, "-P", "-m", "benchmarks.security_study", str(folder)]
    done = finished([*_unshare(), *words], env=environment())
    if done.returncode:
        raise RuntimeError(f"the study was not watched: {done.stderr[-2000:]}")
    return Seen(**json.loads((folder / "seen.json").read_text()))


def _interfaces() -> None:
    """Bring up loopback, and an interface with a default route that leads nowhere."""
    for line in (
        "link set lo up",
        "link add outside type veth peer name nowhere",
        f"address add {HERE}/24 dev outside",
        "link set outside arp off",  # packets leave although no machine answers
        "link set outside addrgenmode none",  # no IPv6 address, so none is announced either
        "link set nowhere addrgenmode none",
        "link set nowhere up",
        "link set outside up",
        "route add default dev outside",
    ):
        subprocess.run(["ip", *line.split()], check=True)


def _capture(found: set[str]) -> None:
    """Note protocol and destination of every packet on the outside interface."""
    with socket.socket(socket.AF_PACKET, socket.SOCK_DGRAM, socket.htons(3)) as packets:
        packets.bind(("outside", 0))
        while True:
            data, (_, protocol, *_) = packets.recvfrom(65535)
            if protocol == 0x0800 and len(data) >= 24:  # IPv4
                start = 4 * (data[0] & 15)
                name = {6: "tcp", 17: "udp"}.get(data[9], f"protocol {data[9]}")
                port = struct.unpack_from("!H", data, start + 2)[0]
                asked = f" for {_query(data[start + 8 :])}" if (name, port) == ("udp", 53) else ""
                found.add(f"{name} {socket.inet_ntoa(data[16:20])}:{port}{asked}")
            else:
                found.add(f"ethertype {protocol:#06x}")


def _query(message: bytes) -> str:
    """Return the name that a DNS message asks for (RFC 1035, section 4.1.2)."""
    labels, at = [], 12
    while at < len(message) and message[at]:
        labels.append(message[at + 1 : at + 1 + message[at]].decode(errors="replace"))
        at += 1 + message[at]
    return ".".join(labels)


def _processes() -> list[Path]:
    """Return /proc/PID of every process in this network namespace."""
    ours, found = os.readlink("/proc/self/ns/net"), []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if os.readlink(path / "ns/net") == ours:
                found.append(path)
    return found


def _words(process: Path) -> list[str]:
    with contextlib.suppress(OSError):
        return (process / "cmdline").read_bytes().decode(errors="replace").split("\0")
    return []


def _variables(process: Path) -> dict[str, str]:
    with contextlib.suppress(OSError):
        text = (process / "environ").read_bytes().decode(errors="replace")
        return dict(entry.split("=", 1) for entry in text.split("\0") if "=" in entry)
    return {}


def _listening(named: dict[str, str]) -> None:
    """Add listening TCP sockets beyond loopback: inode -> "process address:port"."""
    new = {}
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        for line in Path(table).read_text().splitlines()[1:]:
            columns = line.split()
            host, port = columns[1].split(":")
            loopback = host.endswith("7F") if len(host) == 8 else host in _LOOPBACK_6
            if len(host) == 32 and host.startswith("0" * 16 + "FFFF0000") and host.endswith("7F"):
                loopback = True  # ::ffff:127.x.y.z
            if columns[3] == "0A" and not loopback and columns[9] not in named:
                new[columns[9]] = f"{_shown(host)}:{int(port, 16)}"
    if not new:
        return
    for process in _processes():
        for link in process.glob("fd/*"):
            with contextlib.suppress(OSError):
                inode = os.readlink(link).removeprefix("socket:[").removesuffix("]")
                if inode in new:
                    name = (process / "comm").read_text().strip()
                    words = " ".join(_words(process))
                    if name.startswith("python"):
                        names = ("tuner.cli.main", "driver"), ("fork_server", "rank")
                        name = next((n for part, n in names if part in words), words[-60:])
                    named[inode] = f"{name} {new.pop(inode)}"
    named.update({inode: f"? {address}" for inode, address in new.items()})


_LOOPBACK_6 = ("00000000000000000000000001000000",)


def _shown(host: str) -> str:
    if not int(host, 16):
        return "*"
    data = b"".join(bytes.fromhex(host[i : i + 8])[::-1] for i in range(0, len(host), 8))
    return socket.inet_ntop(socket.AF_INET if len(data) == 4 else socket.AF_INET6, data)


def _look_at_ray(seen: Seen, folder: Path) -> subprocess.Popen[str] | None:
    """Note how Ray runs; attack its session folder and return a stranger that joins it."""
    for process in _processes():
        words = _words(process)
        if not words or Path(words[0]).name != "raylet":
            continue
        options = dict(w.lstrip("-").split("=", 1) for w in words if w.startswith("-") and "=" in w)
        session = (
            options.get("session_dir")
            or options.get("raylet_socket_name", "").split("/sockets/")[0]
        )
        address = options.get("gcs-address") or options.get("gcs_address", "")
        if not session or not address or not Path(session, "logs").is_dir():
            return None
        seen.ray, seen.session = True, session
        variables = _variables(process)
        token = variables.get("RAY_AUTH_TOKEN", "")
        seen.own_token = bool(token)
        seen.token_shown = seen.own_token and any(
            token in word for other in _processes() for word in _words(other)
        )

        other = as_other_user(partial(_rename_logs, Path(session)))
        seen.renamed = writable_by_others(Path(session)) if other is None else other
        home = folder / "stranger"
        home.mkdir()
        env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
        env |= {"HOME": str(home), "RAY_USAGE_STATS_ENABLED": "0"}
        return subprocess.Popen(
            [sys.executable, "-P", "-c", JOIN, address, str(folder / "joined")],
            env=env,
            cwd=home,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
    return None


def _rename_logs(session: Path) -> bool:
    (session / "logs").rename(session / "moved")
    (session / "moved").rename(session / "logs")
    return True


def _end(process: subprocess.Popen[str]) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def main(folder: Path) -> None:
    """Run, watch and attack the study; write what was seen to FOLDER/seen.json."""
    _interfaces()
    seen, outside, listening = Seen(), set[str](), dict[str, str]()
    threading.Thread(target=_capture, args=(outside,), daemon=True).start()
    time.sleep(0.3)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        trial.sendto(b"x", (ELSEWHERE, 9))
    time.sleep(0.3)
    seen.counted = f"udp {ELSEWHERE}:9" in outside
    outside.clear()

    site, here, home, script = (folder / n for n in ("site", "here", "home", "script"))
    shutil.copytree(ROOT / "tuner", site / "tuner", ignore=shutil.ignore_patterns("__pycache__"))
    marks = folder / "marks"
    for name in PLANTED:
        (here / name).parent.mkdir(parents=True, exist_ok=True)
        (here / name).write_text(PLANT.format(marks=str(marks), folder=str(here)))
    for path in (home, script):
        path.mkdir()
    home.chmod(0o755)
    (script / "train.py").write_text(TRAIN)
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {"PYTHONPATH": str(site), "HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    words = ["optimize", "--steps", "100", "--global-batch", "8", "--max-probes", "1"]
    words += ["--no-verify", "--quiet", "--knob", "pause=1,2", "--"]  # something to turn
    words += ["torchrun", "--nproc-per-node", "2", f"{script / 'train.py'}", "--pause", "{pause=1}"]
    with tempfile.TemporaryFile("w+") as error:
        began_s, stranger = time.monotonic(), None
        command = subprocess.Popen(
            [*_TUNER, *words],
            cwd=here,
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=error,
            text=True,
            start_new_session=True,
        )
        try:
            while command.poll() is None and time.monotonic() - began_s < STUDY_S:
                known = set(listening)
                _listening(listening)
                for inode in set(listening) - known:  # the stranger's own do not count
                    if stranger is not None and _owns(stranger.pid, inode):
                        listening[inode] = ""
                if stranger is None and time.monotonic() - began_s > 1:
                    stranger = _look_at_ray(seen, folder)
                time.sleep(0.1)
            if stranger is not None:
                seen.joined = (folder / "joined").exists()
                seen.join_error = "the study ended before it was refused"
                if stranger.poll() is not None and stranger.stderr is not None:
                    seen.join_error = ([*stranger.stderr.read().split("\n"), ""][-2:])[0][:200]
        finally:
            for process in filter(None, (command, stranger)):
                _end(process)
        seen.code = command.returncode
        error.seek(0)
        seen.error = error.read()[-1000:].strip()
    seen.outside, seen.listening = sorted(outside), sorted(filter(None, listening.values()))
    seen.planted = sorted(set(marks.read_text().splitlines())) if marks.exists() else []
    token_file = home / ".ray" / "auth_token"
    seen.token_file = token_file.stat().st_mode & 0o777 if token_file.exists() else 0
    (folder / "seen.json").write_text(json.dumps(asdict(seen)))


def _owns(pid: int, inode: str) -> bool:
    with contextlib.suppress(OSError):
        return any(
            os.readlink(link) == f"socket:[{inode}]" for link in Path(f"/proc/{pid}/fd").iterdir()
        )
    return False


if __name__ == "__main__":
    main(Path(sys.argv[1]))
