"""The lines of docs/clusters.md that start a Ray cluster, typed on hosts of their own.

Each host is a network namespace with an address, a name in /etc/hosts, a home folder and a folder
of Ray's. `ssh` and `scp` are stand-ins that enter the namespace of the host that they are given.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.needs import require
from tests.support.commands import finished, write_program

ROOT = Path(__file__).resolve().parents[2]
HOSTS = ("n1", "n2", "n3")

pytestmark = [pytest.mark.real, pytest.mark.ray, pytest.mark.slow, pytest.mark.timeout(600)]

SSH = """#!/bin/bash
host=$1; shift
home="{top}/$host"
exec ip netns exec "{prefix}$host" env -u RAY_AUTH_MODE HOME="$home" RAY_TMPDIR="$home" \\
    bash -c "cd; $*"
"""
SCP = """#!/bin/bash
[ "$1" = -p ] && shift
cp -p "$1" "{top}/${{2%%:*}}/${{2#*:}}"
"""


def lines_of_page() -> list[str]:
    """Return the lines of shell by which docs/clusters.md starts a cluster."""
    page = (ROOT / "docs" / "clusters.md").read_text()
    section = page.partition("## Start a Ray cluster")[2]
    return re.findall(r"```text\n(.*?)```", section, re.DOTALL)[0].splitlines()


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, timeout=30)


@pytest.fixture
def hosts() -> Iterator[tuple[str, Path]]:
    """Three hosts on a bridge: the prefix of their namespaces, and the folder of their homes."""
    require("namespaces")
    number = os.getpid() % 10000
    prefix, bridge = f"jfp{number}", f"jfb{number}"
    top = Path(tempfile.mkdtemp(prefix="jf", dir="/tmp"))  # short, for names of sockets
    names = "".join(f"10.213.78.{n} {host}\n" for n, host in enumerate(HOSTS, 1))
    try:
        try:
            ip("link", "add", bridge, "type", "bridge")
        except subprocess.CalledProcessError as error:
            pytest.skip(f"network namespaces may not be made here: {error.stderr.decode()!r}")
        ip("link", "set", bridge, "up")
        for n, host in enumerate(HOSTS, 1):
            namespace, cable = f"{prefix}{host}", (f"jf{number}{n}a", f"jf{number}{n}b")
            etc = Path("/etc/netns", namespace)
            etc.mkdir(parents=True)
            (etc / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            ip("netns", "add", namespace)
            ip("link", "add", cable[0], "type", "veth", "peer", "name", cable[1])
            ip("link", "set", cable[0], "master", bridge, "up")
            ip("link", "set", cable[1], "netns", namespace)
            ip("-n", namespace, "addr", "add", f"10.213.78.{n}/24", "dev", cable[1])
            ip("-n", namespace, "link", "set", "lo", "up")
            ip("-n", namespace, "link", "set", cable[1], "up")
            ip("-n", namespace, "route", "add", "default", "dev", cable[1])
            (top / host).mkdir()
        yield prefix, top
    finally:
        for host in HOSTS:
            namespace = f"{prefix}{host}"
            asked = ["ip", "netns", "pids", namespace]
            named = finished(asked)
            for pid in map(int, named.stdout.split()):
                os.kill(pid, signal.SIGKILL)
            subprocess.run(["ip", "netns", "del", namespace], capture_output=True, check=False)
            shutil.rmtree(Path("/etc/netns", namespace), ignore_errors=True)
        subprocess.run(["ip", "link", "del", bridge], capture_output=True, check=False)
        shutil.rmtree(top, ignore_errors=True)


def test_five_lines_lead_from_nothing_to_the_first_answer(hosts: tuple[str, Path]) -> None:
    prefix, top = hosts
    lines = lines_of_page()
    assert len(lines) == 5
    tools = top / "bin"
    tools.mkdir()
    for name, text in (("ssh", SSH), ("scp", SCP)):
        write_program(tools / name, text.format(prefix=prefix, top=top))
    # A proxy of this machine cannot be reached from inside, and gRPC would ask it.
    own = {k: v for k, v in os.environ.items() if not re.search("^RAY_|proxy", k, re.IGNORECASE)}
    environment = {
        **own,
        "PATH": f"{tools}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "HOME": str(top / "n1"),
        "RAY_TMPDIR": str(top / "n1"),
        "RAY_USAGE_STATS_ENABLED": "0",
        "PYTHONPATH": str(ROOT),
    }
    with (top / "out").open("w") as out:  # a pipe would stay open as long as Ray runs
        subprocess.run(
            ["ip", "netns", "exec", f"{prefix}n1", "bash", "-c", "\n".join(lines)],
            cwd=top / "n1",
            env=environment,
            stdout=out,
            stderr=out,
            check=False,
            timeout=400,
        )
    answer = (top / "out").read_text()
    assert len(re.findall(r"^node .*\(10\.213\.78\.[123]\): .*: ready$", answer, re.M)) == 3, answer
    assert re.search(r"^3 nodes with \d+ x cpu-core can be used", answer, re.M)
    token = (top / "n1" / ".ray" / "auth_token").read_text().strip()
    assert token
    assert token not in answer
    assert "no token" not in answer
    for host in HOSTS[1:]:
        copied = top / host / ".ray" / "auth_token"
        assert copied.read_text().strip() == token
        assert copied.stat().st_mode & 0o077 == 0
