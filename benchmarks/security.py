"""What a local study sends to other machines, the lines that run as root, and open findings.

The study runs in a network namespace of its own, where its listening sockets are sampled. The
namespace has a loopback interface and one more with a default route, so that a packet to any other
machine has somewhere to go and is counted there. `--inside FOLDER` is what runs inside it. The
tests that hold findings of security reviews (`benchmarks.held`) are run.
"""

from __future__ import annotations

import contextlib
import ipaddress
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
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

import psutil

from benchmarks.figures import ROOT, Figure, arguments, publish
from benchmarks.held import Fault, failed_tests, faults, functions_of_tests, without_a_test
from tests.support.commands import finished
from tuner.workload.node.clocks import guard

#: The machine's own address in the namespace, and one that is another machine's (RFC 5737).
HERE, ELSEWHERE = "192.0.2.1", "198.51.100.7"
STUDY_S = 240.0
#: `tuner` as installed: no folder of the caller on the import path, unlike `python -c`.
#: Its windows are short: what it opens and sends does not depend on them.
TUNER = (
    "import sys; from tests.support.windows import shorten; shorten(); "
    "from tuner.cli.main import main; sys.exit(main())"
)
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


@dataclass
class ObservedStudy:
    """What was seen during the study.

    Attributes:
        code: exit code of `tuner optimize`.
        error: last lines of its standard error.
        outside: protocol and destination of packets to other machines.
        counted: packets to another machine are counted (one was sent before the study).
        listening: "process address:port" of TCP sockets that other machines reach.
    """

    code: int | None = None
    error: str = ""
    outside: list[str] = field(default_factory=list)
    counted: bool = False
    listening: list[str] = field(default_factory=list)


def _unshare() -> list[str]:
    return ["unshare", "--net", *([] if os.geteuid() == 0 else ["--map-root-user"])]


def unavailable() -> str:
    """Return why no study can be watched here, empty if one can."""
    for name in ("unshare", "ip"):
        if shutil.which(name) is None:
            return f"there is no {name} command"
    trial = finished([*_unshare(), "true"])
    return "" if trial.returncode == 0 else f"no network namespace: {trial.stderr.strip()}"


def watch(folder: Path) -> ObservedStudy:
    """Run the study in a namespace of its own and return what was seen.

    Raises:
        RuntimeError: it could not be watched.
    """
    words = [sys.executable, "-P", "-m", "benchmarks.security", "--inside", str(folder)]
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', os.defpath)}"
    environment = {**os.environ, "PATH": path, "PYTHONPATH": str(ROOT)}
    done = finished([*_unshare(), *words], env=environment)
    if done.returncode:
        raise RuntimeError(f"the study was not watched: {done.stderr[-2000:]}")
    return ObservedStudy(**json.loads((folder / "seen.json").read_text()))


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


def listening(named: dict[str, str]) -> None:
    """Add TCP sockets beyond loopback: "address:port" -> name of the process, or "?"."""
    for each in psutil.net_connections("tcp"):
        address = ipaddress.ip_address(each.laddr.ip)
        address = getattr(address, "ipv4_mapped", None) or address
        if each.status == psutil.CONN_LISTEN and not address.is_loopback:
            place = f"{'*' if address.is_unspecified else address}:{each.laddr.port}"
            if named.get(place, "?") == "?":
                named[place] = _process(each.pid)


def _process(pid: int | None) -> str:
    """Return what a process is called here."""
    if pid is None:
        return "?"
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        words = " ".join(process.cmdline())
        names = ("tuner.cli.main", "driver"), ("fork_server", "rank")
        return next((name for part, name in names if part in words), process.name())
    return "?"


def watch_inside(folder: Path) -> None:
    """Run and watch the study in this namespace; write what was seen to FOLDER/seen.json."""
    _interfaces()
    seen, outside, reached = ObservedStudy(), set[str](), dict[str, str]()
    threading.Thread(target=_capture, args=(outside,), daemon=True).start()
    time.sleep(0.3)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as trial:
        trial.sendto(b"x", (ELSEWHERE, 9))
    time.sleep(0.3)
    seen.counted = f"udp {ELSEWHERE}:9" in outside
    outside.clear()

    here, home = folder / "here", folder / "home"
    for path in (here, home):
        path.mkdir()
    (here / "train.py").write_text(TRAIN)
    env = {key: value for key, value in os.environ.items() if not key.startswith("RAY_")}
    env |= {"HOME": str(home), "XDG_CACHE_HOME": str(home / "cache")}
    words = ["optimize", "--steps", "100", "--global-batch", "8", "--max-probes", "1"]
    words += ["--no-verify", "--quiet", "--knob", "pause=1,2", "--"]  # something to turn
    words += ["torchrun", "--nproc-per-node", "2", "train.py", "--pause", "{pause=1}"]
    with tempfile.TemporaryFile("w+") as error:
        began_s = time.monotonic()
        command = subprocess.Popen(
            [sys.executable, "-P", "-c", TUNER, *words],
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
                listening(reached)
                time.sleep(0.1)
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(command.pid, signal.SIGKILL)
            command.wait()
        seen.code = command.returncode
        error.seek(0)
        seen.error = error.read()[-1000:].strip()
    seen.outside = sorted(outside)
    seen.listening = sorted(f"{name} {place}" for place, name in reached.items())
    (folder / "seen.json").write_text(json.dumps(asdict(seen)))


def lines_as_root() -> int:
    """Return the lines that ever run as root where the user is not root: those of the guard."""
    lines = Path(guard.__file__).read_text(encoding="utf-8").splitlines()
    return sum(bool(line.strip()) and not line.strip().startswith("#") for line in lines)


def open_findings() -> list[Fault]:
    """Run the tests that hold the findings of security reviews; return those that do not hold."""
    found = [fault for fault in faults() if fault.found.startswith("security review")]
    known = functions_of_tests()
    missing = without_a_test(found, known)
    listed = {name for fault in found for name in fault.tests if name in known}
    failed = failed_tests(address for name in listed for address in known[name])
    return [fault for fault in found if fault in missing or failed & {*fault.tests}]


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
    parser = arguments(__doc__, "security")
    parser.add_argument(
        "--inside", type=Path, metavar="FOLDER", help="of the study; it runs in this namespace"
    )
    options = parser.parse_args(argv)
    if options.inside:
        watch_inside(options.inside)
        return
    findings = open_findings()
    for finding in findings:
        print(f"open: {finding.what} ({finding.found}; {', '.join(finding.tests)})")
    figures = [
        Figure("findings_open", len(findings), "count"),
        Figure("lines_as_root", lines_as_root(), "lines"),
        *study_figures(),
    ]
    publish(figures, options.json)


if __name__ == "__main__":
    main()
