"""The guard in front of the dashboard, which itself asks for no password.

An address of loopback is open to every user of the machine, and a page of another site may send the
browser there. So each request must show a token, name an expected host, and, unless writing is
allowed, only read.
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import socket
import threading
from collections.abc import Callable, Iterable
from socketserver import ThreadingMixIn
from typing import Any
from urllib.parse import parse_qs, urlsplit
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from tuner.search_spaces.errors import InputError

#: Sent with every answer: types are taken as stated, other sites learn no address
#: and frame nothing.
_HEADERS = [
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Content-Security-Policy", "frame-ancestors 'self'; base-uri 'none'; form-action 'self'"),
]
_LOOPBACK = ("127.0.0.1", "localhost", "::1")
#: Seconds that a connection may stay silent.
_SILENCE_S = 10.0
#: The page that keeps the token: not a redirect, after which a browser that came by a link on
#: another site would hold back the cookie (SameSite=Strict).
_WELCOME = (
    b'<!DOCTYPE html><meta charset="utf-8"><title>joulefront</title>'
    b'<meta http-equiv="refresh" content="0; url=/dashboard"><a href="/dashboard">Dashboard</a>\n'
)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _own_name(token: str) -> str:
    """Return a name of loopback that only the holder of the token knows (RFC 6761, section 6.3).

    Cookies know no ports: one for 127.0.0.1 is sent to each server of every user there.
    """
    return f"joulefront-{hashlib.sha256(token.encode()).hexdigest()[:24]}.localhost"


def guarded_url(host: str, port: int, token: str) -> str:
    """Return the address by which a browser is let in; on loopback it has a name of its own."""
    name = _own_name(token) if host in _LOOPBACK else _in_url(host)
    return f"http://{name}:{port}/?token={token}"


class Guarded:
    """A WSGI application that lets only the holder of a token reach another one.

    `guarded_url` exchanges the token for a cookie. A request without it, for another host, or by a
    method other than GET and HEAD is answered with 403 and a sentence.

    Args:
        token: what a request must show; text for a URL, as `secrets.token_urlsafe` makes.
        host: the address that is listened on; requests may also name loopback, and for an address
            that stands for all of them (0.0.0.0, ::) this machine's name.
        writable: whether other methods than GET and HEAD are let through.
    """

    def __init__(
        self,
        app: Callable[..., Iterable[bytes]],
        token: str,
        *,
        host: str = "127.0.0.1",
        port: int = 8080,
        writable: bool = False,
    ) -> None:
        self._app, self._token, self._writable = app, token.encode(), writable
        names = {*_LOOPBACK, host.lower()}
        if host in ("", "0.0.0.0", "::"):
            names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
        self._hosts = {f"{_in_url(name)}:{port}" for name in names}
        if port == 80:  # which browsers leave out
            self._hosts |= {_in_url(name) for name in names}
        self._own_host = f"{_own_name(token)}:{port}"
        # Two dashboards of one host need two names.
        self._cookie = f"joulefront-{port}"

    def __call__(
        self, environ: dict[str, Any], start_response: Callable[..., Any]
    ) -> Iterable[bytes]:
        method, path = environ["REQUEST_METHOD"], environ.get("PATH_INFO", "")
        host = environ.get("HTTP_HOST", "").lower()
        if host not in (*self._hosts, self._own_host):  # the last is not told to strangers
            return self._refuse(
                start_response,
                f"This dashboard answers as {', '.join(sorted(self._hosts))} only. Through a "
                "tunnel, forward the same port number.",
            )
        given = parse_qs(environ.get("QUERY_STRING", "")).get("token", [""])[0]
        if method == "GET" and path in ("", "/") and self._is_token(given):
            cookie = f"{self._cookie}={given}; HttpOnly; SameSite=Strict; Path=/"
            headers = [("Content-Type", "text/html; charset=utf-8"), ("Set-Cookie", cookie)]
            start_response("200 OK", [*headers, ("Cache-Control", "no-store"), *_HEADERS])
            return [_WELCOME]
        if not self._is_token(self._kept(environ.get("HTTP_COOKIE", ""))):
            return self._refuse(
                start_response, "Open the address that `tuner dashboard` printed: it holds a token."
            )
        if method not in ("GET", "HEAD"):
            if not self._writable:
                return self._refuse(
                    start_response,
                    "This dashboard only shows. Start `tuner dashboard --writable` to change "
                    "notes and studies.",
                )
            # Pages on other ports of this host count as the same site, so the cookie comes along.
            origin = environ.get("HTTP_ORIGIN", "")
            if origin and urlsplit(origin).netloc.lower() != host:
                return self._refuse(start_response, "A page of another address cannot write here.")

        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            added = [*_HEADERS]
            if not path.startswith("/static/"):
                added.append(("Cache-Control", "no-store"))
            return start_response(status, [*headers, *added], *more)

        return self._app(environ, start)

    def _is_token(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(errors="replace"), self._token)

    def _kept(self, cookies: str) -> str:
        pairs = (pair.strip().partition("=") for pair in cookies.split(";"))
        return next((value for name, _, value in pairs if name == self._cookie), "")

    def _refuse(self, start_response: Callable[..., Any], sentence: str) -> list[bytes]:
        headers = [("Content-Type", "text/plain; charset=utf-8"), ("Cache-Control", "no-store")]
        start_response("403 Forbidden", [*headers, *_HEADERS])
        return [f"{sentence}\n".encode()]


class _Silent(WSGIRequestHandler):
    """Handler without a log, which would hold the token, and without look-ups of host names."""

    timeout = _SILENCE_S

    def log_message(self, *_: Any) -> None:
        """Log nothing."""

    def address_string(self) -> str:
        """Return the address of the one who asks."""
        return str(self.client_address[0])

    def handle(self) -> None:
        """Answer a request, unless its sender falls silent or goes."""
        with contextlib.suppress(TimeoutError, ConnectionError):
            super().handle()


class _Threads(ThreadingMixIn, WSGIServer):
    """Server with a thread for each connection: a silent one keeps nobody waiting."""

    daemon_threads = True
    block_on_close = False


class _OverIPv6(_Threads):
    address_family = socket.AF_INET6


def start_server(
    app: Callable[..., Any], host: str, port: int
) -> tuple[WSGIServer, threading.Thread]:
    """Serve a WSGI application in a thread, and return the server and the thread."""
    kind = _OverIPv6 if ":" in host else _Threads
    try:
        server = make_server(host, port, app, kind, _Silent)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    serving = threading.Thread(target=server.serve_forever, daemon=True)
    serving.start()
    return server, serving


def serve_until_interrupted(app: Callable[..., Any], host: str, port: int) -> None:
    """Serve a WSGI application until this thread is interrupted.

    Requests are answered in a thread of their own: wsgiref swallows every exception in a request,
    and with it a Ctrl-C that arrives while a page is being made.
    """
    server, serving = start_server(app, host, port)
    with server:
        serving.join()  # not ended in an orderly way, which would wait for the page
