"""The command that installs an extra names what joulefront was installed from."""

from __future__ import annotations

import json
from importlib.metadata import PackageNotFoundError

import pytest

from tuner.search_spaces import plugins

FOLDER = json.dumps({"url": "file:///home/ada/my%20clone", "dir_info": {"editable": True}})
ARCHIVE = json.dumps({"url": "https://example.org/joulefront.zip", "archive_info": {}})
WHEEL = json.dumps({"url": "file:///tmp/joulefront-0.1.0-py3-none-any.whl", "archive_info": {}})


class Distribution:
    def __init__(self, text: str | None) -> None:
        self._text = text

    def read_text(self, name: str) -> str | None:
        assert name == "direct_url.json"
        return self._text


@pytest.mark.parametrize(
    ("direct_url", "source"),
    [
        (FOLDER, "/home/ada/my clone"),
        (ARCHIVE, "joulefront"),
        (WHEEL, "joulefront"),
        (None, "joulefront"),
    ],
)
def test_an_extra_is_installed_from_where_joulefront_was(
    direct_url: str | None, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(plugins, "distribution", lambda name: Distribution(direct_url))
    assert plugins.install_command("dashboard") == f"pip install '{source}[dashboard]'"


def test_a_source_tree_that_is_not_installed_names_the_package(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def absent(name: str) -> Distribution:
        raise PackageNotFoundError(name)

    monkeypatch.setattr(plugins, "distribution", absent)
    assert plugins.install_command("train") == "pip install 'joulefront[train]'"
