"""What a study opens and sends, by `benchmarks.security`."""

import socket
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from benchmarks import security
from benchmarks.held import Fault
from benchmarks.security import lines_as_root, listening, open_findings, study_figures


@pytest.mark.slow
@pytest.mark.real
def test_a_study_listens_on_loopback_alone_and_sends_nothing_to_other_machines() -> None:
    figures = study_figures()
    if not figures:
        pytest.skip("no study can be watched here")
    assert {figure.name: figure.value for figure in figures} == {
        "connections_outside": 0,
        "listening_beyond_loopback": 0,
    }


@pytest.mark.parametrize(
    ("address", "reached"),
    [
        ("0.0.0.0", True),
        ("::", True),
        ("::ffff:0.0.0.0", True),
        ("127.0.0.1", False),
        ("127.1.2.3", False),
        ("::1", False),
        ("::ffff:127.0.0.1", False),
    ],
)
def test_a_socket_that_other_machines_reach_is_named(address: str, reached: bool) -> None:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    with socket.socket(family) as server:
        server.bind((address, 0))
        server.listen()
        own = f"*:{server.getsockname()[1]}"
        found = {own: "?"} if reached else {}  # its process may not have been seen at first
        listening(found)
        assert (own in found) == reached
        if reached:
            assert found[own] == psutil.Process().name()


def test_a_connection_is_no_listening_socket(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [
        SimpleNamespace(laddr=SimpleNamespace(ip="192.0.2.1", port=port), status=status, pid=None)
        for port, status in ((80, "LISTEN"), (5000, "ESTABLISHED"))
    ]
    monkeypatch.setattr(psutil, "net_connections", lambda kind: rows)
    found: dict[str, str] = {}
    listening(found)
    assert found == {"192.0.2.1:80": "?"}


def test_little_runs_as_root() -> None:
    assert lines_as_root() <= 217


def test_a_finding_whose_test_is_missing_or_fails_is_open(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "test_x.py").write_text(
        "import pytest\ndef test_right():\n    pass\n"
        "@pytest.mark.parametrize('n', [0, 1])\ndef test_wrong(n):\n    assert not n\n"
    )
    names = ("test_right", "test_wrong", "test_absent")
    found = [Fault("security review 9", name, (name,)) for name in names]
    known = {name: [f"{tmp_path / 'test_x.py'}::{name}"] for name in names[:2]}
    monkeypatch.setattr(security, "faults", lambda: [*found, Fault("another", "", ())])
    monkeypatch.setattr(security, "functions_of_tests", lambda: known)
    assert [finding.what for finding in open_findings()] == ["test_wrong", "test_absent"]
