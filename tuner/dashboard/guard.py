"""Guard of the dashboard: a WSGI application through which only the holder of a token can read.

optuna-dashboard has no password. Every user of the machine reaches loopback, and a page of another
site may send a browser there. So each request must name an expected host, show the token, and only
read.
"""

from __future__ import annotations

import hashlib
import hmac
import socket
from collections.abc import Callable, Iterable
from typing import Any
from urllib.parse import parse_qs

Application = Callable[..., Iterable[bytes]]

#: Sent with every answer: browsers keep no copy, frame nothing, and send no address to other sites.
_HEADERS = [
    ("Cache-Control", "no-store"),
    ("X-Content-Type-Options", "nosniff"),
    ("Referrer-Policy", "no-referrer"),
    ("Content-Security-Policy", "frame-ancestors 'self'; base-uri 'none'; form-action 'self'"),
]
#: Not a redirect: after one from a link on another site, a browser would hold back the cookie.
_ENTRY = b'<!DOCTYPE html><meta http-equiv="refresh" content="0; url=/dashboard">\n'


def _host_in_url(host: str, token: str) -> str:
    if host in ("127.0.0.1", "localhost", "::1"):
        # A name of loopback (RFC 6761, section 6.3) that only the holder of the token knows. A
        # cookie of 127.0.0.1 has no port, so a browser sends it to the servers of other users.
        return f"joulefront-{hashlib.sha256(token.encode()).hexdigest()[:24]}.localhost"
    return f"[{host}]" if ":" in host else host


def guarded_url(host: str, port: int, token: str) -> str:
    """Return the address that gives a browser the cookie."""
    return f"http://{_host_in_url(host, token)}:{port}/?token={token}"


def guarded(app: Application, token: str, *, host: str, port: int) -> Application:
    """Return a WSGI application that passes requests of the token's holder on to another one.

    Args:
        token: text for a URL, as `secrets.token_urlsafe` makes.
        host: address of the server; requests may also name loopback, and this machine's name if
            the address stands for all of them (0.0.0.0, ::).
    """
    names = {"127.0.0.1", "localhost", "[::1]", _host_in_url(host.lower(), token), host.lower()}
    if host in ("", "0.0.0.0", "::"):
        names |= {socket.gethostname().lower(), socket.getfqdn().lower()}
    hosts = {f"{name}:{port}" for name in names} | (names if port == 80 else set())
    cookie = f"joulefront-{port}"  # two dashboards of one host need two names

    def is_token(text: str) -> bool:
        return hmac.compare_digest(text.encode(errors="replace"), token.encode())

    def refusal(environ: dict[str, Any], shown: str) -> str:
        if environ.get("HTTP_HOST", "").lower() not in hosts:
            return (
                f"This dashboard answers as {host}:{port} and localhost:{port} only. Through a "
                "tunnel, forward the same port number."
            )
        if not is_token(shown):
            return "Open the address that `tuner dashboard` printed: it holds a token."
        if environ["REQUEST_METHOD"] not in ("GET", "HEAD"):
            return "This dashboard only shows; optuna-dashboard itself changes notes and studies."
        return ""

    def guard(environ: dict[str, Any], start_response: Callable[..., Any]) -> Iterable[bytes]:
        def start(status: str, headers: list[tuple[str, str]], *more: Any) -> Any:
            return start_response(status, [*headers, *_HEADERS], *more)

        pairs = (p.strip().partition("=") for p in environ.get("HTTP_COOKIE", "").split(";"))
        kept = next((value for name, _, value in pairs if name == cookie), "")
        given = parse_qs(environ.get("QUERY_STRING", "")).get("token", [""])[0]
        enters = environ.get("PATH_INFO", "") in ("", "/") and is_token(given)
        if sentence := refusal(environ, given if enters else kept):
            start("403 Forbidden", [("Content-Type", "text/plain; charset=utf-8")])
            return [f"{sentence}\n".encode()]
        if not enters:
            return app(environ, start)
        keep = ("Set-Cookie", f"{cookie}={token}; HttpOnly; SameSite=Strict; Path=/")
        start("200 OK", [("Content-Type", "text/html; charset=utf-8"), keep])
        return [_ENTRY]

    return guard
