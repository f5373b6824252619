"""HTTP server of metrics; without a guard, for they are figures that are only read."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from tuner.display.guarded import start_server
from tuner.search_spaces.errors import InputError

CONTENT_TYPE = "application/openmetrics-text; version=1.0.0; charset=utf-8"


@contextmanager
def served_metrics(
    text: Callable[[], str], address: str | None, say: Callable[[str], None]
) -> Iterator[None]:
    """Serve a text as /metrics.

    Args:
        text: returns the latest metrics, in the OpenMetrics text format.
        address: PORT on loopback, or HOST:PORT; port 0 is any free one; None serves nothing.
        say: receives where they are served.

    Raises:
        InputError: the address is none, or cannot be listened on.
    """
    if address is None:
        yield
        return
    host, _, port = address.rpartition(":")
    host = host.strip("[]") or "127.0.0.1"
    if not (port.isascii() and port.isdecimal() and int(port) <= 65535):
        raise InputError(f"--metrics-port {address}: write a port up to 65535, or HOST:PORT")

    def app(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        if environ.get("PATH_INFO") != "/metrics" or environ["REQUEST_METHOD"] != "GET":
            start_response("404 Not Found", [("Content-Type", "text/plain")])
            return [b"GET /metrics\n"]
        start_response("200 OK", [("Content-Type", CONTENT_TYPE)])
        return [text().encode()]

    server, _ = start_server(app, host, int(port))
    try:
        shown = f"[{host}]" if ":" in host else host
        say(f"metrics are at http://{shown}:{server.server_port}/metrics")
        yield
    finally:
        server.shutdown()
        server.server_close()
