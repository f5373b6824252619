"""The command that installs an extra of joulefront the way joulefront itself was installed."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError, distribution
from urllib.parse import unquote, urlsplit


def install_command(extra: str) -> str:
    """Return "pip install 'joulefront[dashboard]'", or the folder it was installed from in place
    of the name (PEP 610, direct_url.json)."""
    return f"pip install '{_installed_from() or 'joulefront'}[{extra}]'"


def _installed_from() -> str:
    try:
        text = distribution("joulefront").read_text("direct_url.json")
    except PackageNotFoundError:  # a source tree on PYTHONPATH
        return ""
    if not text:
        return ""
    found = json.loads(text)
    url = urlsplit(str(found.get("url", "")))
    return unquote(url.path) if url.scheme == "file" and "dir_info" in found else ""
