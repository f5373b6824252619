"""The study in optuna-dashboard, with our own figures beside its own.

The dashboard has no hypervolume curve, no intervals and no front under constraints, so `publish`
saves ours as study graphs under fixed ids (saving again overwrites) and the choice as the study's
note. Every save is split into attributes of about 2 kB that a journal keeps for ever, so figures
are drawn only when the dashboard is opened (`refresh`).
What a probe measured is in the attributes of its trials (`tuner.study.recorder`).
"""

from __future__ import annotations

import contextlib
import hashlib
import hmac
import html
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from socketserver import ThreadingMixIn
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qs
from wsgiref.simple_server import WSGIRequestHandler, WSGIServer, make_server

from tuner.answer.answer import Answer
from tuner.display.advice import advice_lines
from tuner.display.view import ENERGY, TIME, View
from tuner.formatting import counted, label
from tuner.problem.run_folder import RunFolder
from tuner.search_spaces.errors import InputError, InvalidValue
from tuner.search_spaces.plugins import install_command
from tuner.workload.records.probe import ProbeRecord

# Guard of the dashboard: a WSGI application through which only the holder of a token can read.
#
# optuna-dashboard has no password. Every user of the machine reaches loopback, and a page of
# another site may send a browser there. So each request must name an expected host, show the token,
# and only read.


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


if TYPE_CHECKING:
    from optuna import Study
    from optuna.storages import BaseStorage


def _dashboard() -> Any:
    try:
        import optuna_dashboard
    except ImportError as error:
        raise InputError(
            f"optuna-dashboard is not installed; install it with {install_command('dashboard')}"
        ) from error
    return optuna_dashboard


def _open(storage: BaseStorage | str | Path) -> BaseStorage:
    from optuna.storages import BaseStorage

    if isinstance(storage, BaseStorage):
        return storage
    from tuner.study.recorder import open_storage

    text = str(storage)
    if "://" in text:
        return open_storage(text, Path())
    if not Path(text).is_file():
        raise InputError(f"there is no study at {text!r}; give a journal file or a storage URL")
    return open_storage(None, Path(text))


def application(storage: BaseStorage | str | Path) -> Any:
    """Return the dashboard as a WSGI application, without a guard."""
    return _dashboard().wsgi(_open(storage))


def serve(
    storage: BaseStorage | str | Path,
    *,
    token: str,
    host: str = "127.0.0.1",
    port: int = 8080,
) -> None:
    """Serve the dashboard of every study in `storage` until interrupted.

    Args:
        token: what a browser must show: it is let in at `tuner.dashboard.server.guarded_url`. Every
            user of this machine reaches loopback, so make it with `secrets.token_urlsafe()`.
        host: anything but loopback sends the token and the study over the network as plain text.
    """
    if not 0 < port < 65536:
        raise InvalidValue("port", port, "1 to 65535")
    serve_until_interrupted(guarded(application(storage), token, host=host, port=port), host, port)


class _Requests(WSGIRequestHandler):
    timeout = 10.0  # seconds without a byte after which a connection is closed

    def log_message(self, *_: Any) -> None:
        """Log nothing, because the first address holds the token."""

    def handle(self) -> None:
        with contextlib.suppress(TimeoutError, ConnectionError):
            super().handle()


class _Server(ThreadingMixIn, WSGIServer):
    # A thread for each connection: an idle one delays no other.
    daemon_threads = True

    def __init__(self, address: tuple[str, int], handler: type[WSGIRequestHandler]) -> None:
        self.address_family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
        super().__init__(address, handler)


def serve_until_interrupted(app: Application, host: str, port: int) -> None:
    """Serve a WSGI application until this thread is interrupted."""
    try:
        server = make_server(host, port, app, _Server, _Requests)
    except OSError as error:
        raise InputError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
    with server:
        server.serve_forever()


def publish(study: Study, result: Answer, records: Sequence[ProbeRecord] = ()) -> None:
    """Save our figures and the choice where the dashboard shows them, over earlier ones."""
    from tuner.display.plots import TITLES, figures

    dashboard = _dashboard()
    drawn = figures(replace(result, run_dir=None), records)
    for name, title in TITLES.items():
        if name in drawn:
            figure = drawn[name]
            figure.update_layout(
                title={"text": title, "font": {"size": 15}, "x": 0.02, "xanchor": "left"},
                margin={"t": 60},
                legend={"y": -0.22, "yanchor": "top"},  # above it, the page's buttons stand
            )
            graph = f"joulefront-{name}"  # saved again, it overwrites
            dashboard.save_plotly_graph_object(study, figure, graph_object_id=graph)
    dashboard.save_note(study, note(result))


def refresh(run: RunFolder, storage: str | None = None) -> bool:
    """Publish a run's figures as of now; return False if it has no study or no probe."""
    import optuna

    from tuner.study.load import answer_of_run
    from tuner.study.recorder import open_storage
    from tuner.workload.records.trace import read_trace

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    opened = open_storage(storage, run.journal)
    if run.name not in optuna.get_all_study_names(opened) or not run.trace.is_file():
        return False
    study = optuna.load_study(study_name=run.name, storage=opened)
    publish(study, answer_of_run(run), read_trace(run.trace).records)
    return True


def _literal(text: str) -> str:
    # Markdown that shows the text as it is: no tag, image, link or emphasis in it works.
    return html.escape(re.sub(r"([\\`*_\[\]!~|#])", r"\\\1", " ".join(text.split())))


def note(result: Answer) -> str:
    """Return the choice as Markdown for the study's page; users' words are escaped."""
    view = View(result)
    headline, *details = advice_lines(result) or [result.choice.sentence]
    lines = [f"**{_literal(headline)}**", "", *(_literal(text) for text in details)]
    if view.words.notice:
        lines += [_literal(view.words.notice), ""]
    if (best := result.recommended) is not None:
        configuration = html.escape(best.configuration.short).replace("`", "'")
        energy = f"{ENERGY.text(view, best)}{label(best.meter.mark)}"
        lines += [
            f"- configuration: `{configuration or 'default'}`",
            *filter(None, [view.shown(f"- energy to solution: {energy}")]),
            f"- time to solution: {TIME.text(view, best)}",
            f"- search: {counted(result.spent.probes, 'probe')}, {result.spent.failed} failed"
            + view.shown(f", {view.spent}{view.estimated}"),
            f"- {_literal(view.payback)}",
            f"- how it was chosen: {_literal(result.choice.sentence)}",
        ]
    return "\n".join(lines)
