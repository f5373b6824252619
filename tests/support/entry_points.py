"""Distributions with one plug-in, installed for a test as pip writes them, and extras left out."""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

import pytest

from tuner.search_spaces import plugins


def install_plugin(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    group: str,
    name: str,
    source: str,
    *,
    attribute: str = "",
) -> None:
    """Install a module of this source; an entry point of the group names it, or its attribute."""
    module = f"plugin_{folder.name.replace('-', '_')}"
    (folder / f"{module}.py").write_text(source)
    colon = ":" if attribute else ""
    info = folder / f"{module}-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {module}\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {module}{colon}{attribute}\n")
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, module, raising=False)
    # What was found before is found again after the test.
    found = cache(lambda socket: plugins.plugins_of(socket, tuple(socket.shipped)))
    monkeypatch.setattr(plugins.Socket, "plugins", property(found))


def require_parts(*modules: str) -> None:
    """Skip the test that runs if this checkout leaves out one of these modules of extras."""
    for module in modules:
        if plugins.shipped_module(module) is None:
            pytest.skip(f"this checkout has no {module}")
