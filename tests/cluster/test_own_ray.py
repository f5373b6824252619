"""What a Ray of the benchmarks started ends with it."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import psutil

from tests.cluster.own_ray import OwnRay


def test_the_server_of_clients_and_what_is_being_started_are_killed_too(tmp_path: Path) -> None:
    ray = OwnRay(tmp_path)
    starts = "while :; do sleep 61.5 & sleep 0.01; done"
    address = f"--address=192.0.2.2:{ray.address.rpartition(':')[2]}"
    node = subprocess.Popen(["sh", "-c", starts, str(tmp_path)])
    clients = subprocess.Popen([sys.executable, "-c", "input()", address], stdin=subprocess.PIPE)
    time.sleep(0.2)
    ray.kill()
    assert node.poll() is not None
    assert clients.poll() is not None
    commands = [each.info["cmdline"] for each in psutil.process_iter(["cmdline"])]
    assert ["sleep", "61.5"] not in commands
