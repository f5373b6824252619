"""HTTP servers of this process: the dashboard behind a guard, and metrics, which need none.

The dashboard itself asks for no password. An address of loopback is open to every user of the
machine, and a page of another site may send the browser there. So each request must show a token,
name an expected host, and only read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from tuner.search_spaces.errors import InputError

Application = Callable[..., Iterable[bytes]]

#: Sent with every answer: types are taken as stated, other sites learn no address
#: and frame nothing.
_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Content-Security-Policy", "frame-ancestors 'self'; base-uri 'none'; form-action 'self'"),
]
_NOT_KEPT = ("Cache-Control", "no-store")
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: The page that keeps the token: not a redirect, after which a browser that came by a link on
#: another site would hold back the cookie (SameSite=Strict).
_WELCOME = (
    b'<!DOCTYPE html><meta charset="utf-8"><title>joulefront</title>'
    b'<meta http-equiv="refresh" content="0; url=/dashboard"><a href="/dashboard">Dashboard</a>\n'
)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _own_name(token: str) -> str:
    # A name of loopback that only the holder of the token knows (RFC 6761, section 6.3). Cookies
    # know no ports: one for 127.0.0.1 is sent to each server of every user there.
    return f"joulefront-{hashlib.sha256(token.encode()).hexdigest()[:24]}.localhost"


def guarded_url(host: str, port: int, token: str) -> str:
    """Return the address by which a browser is let in; on loopback it has a name of its own."""
    name = _own_name(token) if host in _LOOPBACK else _in_url(host)
    return f"http://{name}:{port}/?token={token}"


def guarded(app: Application, token: str, *, host: str, port: int) -> Application:
    """Return a WSGI application that lets only the holder of a token reach another one.

    `guarded_url` exchanges the token for a cookie. A request without it, for another host, or by a
    method other than GET and HEAD is answered with 403 and a sentence.

    Args:
        token: text for a URL, as `secrets.token_urlsafe` makes.
        host: the address that is listened on; requests may also name loopback, and for an address
            that stands for all of them (0.0.0.0, ::) this machine's name.
    """
    names = {*_LOOPBACK, host.lower()}
    if host in ("", "0.0.0.0", "::"):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    hosts = {f"{_in_url(name)}:{port}" for name in names}
    if port == 80:  # which browsers leave out
        hosts |= {_in_url(name) for name in names}
    own_host = f"{_own_name(token)}:{port}"  # not told to strangers
    cookie = f"joulefront-{port}"  # two dashboards of one host need two names

    def is_token(given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), token.encode())

    def refusal(environ: dict[str, Any], asked: str) -> str:
        if asked not in (*hosts, own_host):
            return (
                f"This dashboard answers as {', '.join(sorted(hosts))} only. Through a tunnel, "
                "forward the same port number."
            )
        pairs = (p.strip().partition("=") for p in environ.get("HTTP_COOKIE", "").split(";"))
        if not is_token(next((value for name, _, value in pairs if name == cookie), "")):
            return "Open the address that `tuner dashboard` printed: it holds a token."
        if environ["REQUEST_METHOD"] in ("GET", "HEAD"):
            return ""
        return "This dashboard only shows; optuna-dashboard itself changes notes and studies."

    def guard(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        path, asked = environ.get("PATH_INFO", ""), environ.get("HTTP_HOST", "").lower()
        given = parse_qs(environ.get("QUERY_STRING", "")).get("token", [""])[0]
        enters = environ["REQUEST_METHOD"] == "GET" and path in ("", "/") and is_token(given)
        if enters and asked in (*hosts, own_host):
            kept = ("Set-Cookie", f"{cookie}={given}; HttpOnly; SameSite=Strict; Path=/")
            page = ("Content-Type", "text/html; charset=utf-8")
            start_response("200 OK", [page, kept, _NOT_KEPT, *_HEADERS])
            return [_WELCOME]
        if sentence := refusal(environ, asked):
            text = ("Content-Type", "text/plain; charset=utf-8")
            start_response("403 Forbidden", [text, _NOT_KEPT, *_HEADERS])
            return [f"{sentence}\n".encode()]

        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            added = [*_HEADERS, *([] if path.startswith("/static/") else [_NOT_KEPT])]
            return start_response(status, [*headers, *added], *more)

        return app(environ, start)

    return guard


class _Silent(WSGIRequestHandler):
    # Without a log, which would hold the token.
    timeout = 10.0  # seconds that a connection may stay silent

    def log_message(self, *_: Any) -> None:
        pass

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError):  # its sender fell silent, or went
            super().handle()


class _Threads(ThreadingMixIn, WSGIServer):
    # A thread for each connection: a silent one keeps nobody waiting.
    daemon_threads = True
    block_on_close = False


class _OverIPv6(_Threads):
    address_family = socket.AF_INET6


def _start_server(app: Application, host: str, port: int) -> tuple[WSGIServer, threading.Thread]:
    kind = _OverIPv6 if ":" in host else _Threads
    try:
        server = make_server(host, port, app, kind, _Silent)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    return server, serving


def serve_until_interrupted(app: Application, host: str, port: int) -> None:
    """Serve a WSGI application until this thread is interrupted.

    Requests are answered in a thread of their own: wsgiref swallows every exception in a request,
    and with it a Ctrl-C that arrives while a page is being made.
    """
    server, serving = _start_server(app, host, port)
    with server:
        serving.join()  # not ended in an orderly way, which would wait for the page


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

    server, _ = _start_server(app, host, int(port))
    try:
        say(f"metrics are at http://{_in_url(host)}:{server.server_port}/metrics")
        yield
    finally:
        server.shutdown()
        server.server_close()
