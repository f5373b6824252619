"""Wrong states of a cluster, and the words with which joining it must describe each.

Each state is made on a real Ray of this machine, and a program joins it as `tuner` does. What is
said must hold the words that are true of the state, be one line, and come within a minute.
"""

from __future__ import annotations

import http.server
import socket
import socketserver
import threading
import time

from tests.cluster.own_ray import OwnRay

#: Joins a cluster. With JF_ELSEWHERE no node has an address of this machine, as on a login node.
JOINS = """
import os
from tuner.cluster import head as ray_head
from tuner.cluster.joining import join_ray
from tuner.search_spaces.errors import InputError
if os.environ.get("JF_ELSEWHERE"):
    ray_head._is_here = lambda address: False
try:
    join_ray(os.environ["JF_ADDRESS"])
    print("ANSWER joined")
except InputError as error:
    print("ANSWER", error)
"""
LONGEST_S = 60.0


def states(ray: OwnRay, server: str, closed: str) -> dict[str, tuple[str, dict[str, str]]]:
    """Return by name what must be said, and the variables of the program that joins."""
    here = f"this machine is not a node of the Ray cluster at {ray.address!r}"
    return {
        "nothing is wrong": ("joined", {}),
        "another token": ("refuses the token of this user", {"RAY_AUTH_TOKEN": "b" * 64}),
        "no token": ("refuses the token of this user", {"RAY_AUTH_MODE": "disabled"}),
        "a login node": (here, {"JF_ELSEWHERE": "1"}),
        "another server": (f"what listens at {server!r} is not the head", {"JF_ADDRESS": server}),
        "a closed port": (f"no Ray cluster answers at {closed!r}", {"JF_ADDRESS": closed}),
        "Ray Client": ("is not an address of a Ray cluster", {"JF_ADDRESS": "ray://head:10001"}),
        "RAY_ADDRESS of Ray Client": (
            "'ray://head:10001' is not an address of a Ray cluster",
            {"JF_ADDRESS": "auto", "RAY_ADDRESS": "ray://head:10001"},
        ),
        "no port": ("must be auto, or HOST:PORT", {"JF_ADDRESS": "127.0.0.1"}),
        "no host": ("no Ray cluster answers at", {"JF_ADDRESS": "nowhere.invalid:6379"}),
    }


def false_sentences() -> list[str]:
    """Return the states about which something else is said, with what it is."""
    found = []
    with OwnRay.started() as ray, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        handler = http.server.SimpleHTTPRequestHandler
        with socketserver.TCPServer(("127.0.0.1", 0), handler) as http_server:
            threading.Thread(target=http_server.serve_forever, daemon=True).start()
            addresses = (http_server.server_address[1], unused.getsockname()[1])
            named = states(ray, *(f"127.0.0.1:{port}" for port in addresses))
            for name, (words, variables) in named.items():
                begin_s = time.monotonic()
                out, _ = ray.python(JOINS, **variables).communicate(timeout=300)
                took_s, told = time.monotonic() - begin_s, out.partition("ANSWER ")[2].strip()
                if words not in told or "\n" in told or took_s > LONGEST_S:
                    found.append(f"{name}: {told!r} after {took_s:.0f} s")
            http_server.shutdown()
    return found
