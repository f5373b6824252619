"""A run's study in optuna-dashboard: an extra that brings the command `tuner dashboard`."""

from __future__ import annotations

import argparse
import secrets
import sys
from typing import Any

from tuner.cli.options import OK, add_storage, print_answer
from tuner.cli.parser import Commands, print_latest, take_latest
from tuner.search_spaces.errors import InputError


def _dashboard(args: argparse.Namespace) -> int:
    from tuner.dashboard.server import guarded_url, refresh, serve
    from tuner.problem.run_folder import find_run
    from tuner.search_spaces.safe_files import require_own

    # By URL alone: every study that several users keep in one database.
    url = args.storage
    alone = url is not None and args.run is None
    if args.run is None and not alone:
        take_latest(args)
        print_latest(args)
    folder = None if alone else find_run(args.run, args.runs_dir)
    storage: Any
    if folder is None:
        storage, subject = url, "every study of the storage"
    else:
        if url is None:
            require_own(folder.path)
        storage, subject = url or folder.journal, folder.name
        if url is None and not folder.journal.is_file():
            raise InputError(f"{folder.name} keeps no journal; name its storage with --storage URL")
        refresh(folder, url)
    token = secrets.token_urlsafe(32)
    page = guarded_url(args.host, args.port, token)
    lines = [f"{subject} at {page} (Ctrl-C ends it)"]
    if ".localhost:" in page:
        lines.append("A browser that does not find this host finds it as 127.0.0.1.")
    print_answer(args, {"url": page, "run": subject}, lines)
    sys.stdout.flush()
    serve(storage, token=token, host=args.host, port=args.port)
    return OK


def add(commands: Commands) -> None:
    """Add the command of this module."""
    dashboard = commands.of_run("dashboard", _dashboard, "serve a run's study in optuna-dashboard")
    dashboard.set_defaults(of_run=False)
    add_storage(dashboard, "URL of the database (without RUN, all its studies are served)")
    dashboard.add_argument("--host", default="127.0.0.1", help="address (default: 127.0.0.1)")
    dashboard.add_argument("--port", type=int, default=8080, help="port (default: 8080)")
