"""Nothing is sent anywhere: commands run where no other machine can be reached, and try nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.commands import finished

ROOT = Path(__file__).resolve().parent.parent

#: Writes each use of the network by any Python process to a file; Unix sockets are not the network.
WATCH = """
import os, socket, sys
def watch(event, args):
    if event in ("socket.connect", "socket.bind", "socket.sendto"):
        if args[0].family == socket.AF_UNIX:
            return
    elif event not in ("socket.getaddrinfo", "socket.gethostbyname", "urllib.Request"):
        return
    with open(os.environ["NETWORK_LOG"], "a") as log:
        log.write(f"{event} {args[1:]}\\n")
sys.addaudithook(watch)
"""
COMMANDS = (
    ("plan", "opt-350m", "--cluster", "h200-8", "--name", "planned"),
    (
        *("optimize", "opt-350m", "--cluster", "h200-8", "--executor", "simulated"),
        *("--max-probes", "2", "--no-verify", "--name", "plan"),
    ),
    ("show", "plan"),
    ("export", "plan", "--to", "csv", "--redact"),
    ("export", "plan", "--to", "zip", "--out", "b.zip"),
    ("doctor", "--brief"),
    ("fit", "--cluster", "a100-8"),
)
RUN = f"""
from tuner.cli.main import main
for words in {COMMANDS!r}:
    assert main(words) == 0, words
"""


@pytest.mark.slow
def test_commands_use_no_network(tmp_path: Path) -> None:
    watch = tmp_path / "watch"
    watch.mkdir()
    (watch / "sitecustomize.py").write_text(WATCH)
    log = tmp_path / "network.log"
    environment = {
        **os.environ,
        "PYTHONPATH": f"{watch}{os.pathsep}{ROOT}",
        "NETWORK_LOG": str(log),
    }
    command = [sys.executable, "-c", RUN]
    # A network namespace of its own has no interface that is up, and no routes.
    alone = ["unshare", "--net"]
    if os.geteuid() == 0 and shutil.which("unshare"):
        tried = subprocess.run([*alone, "true"], capture_output=True, check=False)
        command = [*alone, *command] if tried.returncode == 0 else command
    done = finished(command, cwd=tmp_path, env=environment)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    assert not log.exists(), log.read_text()


@pytest.mark.parametrize("used", ["socket.create_connection(('127.0.0.1', 9), 1)", "bound()"])
def test_the_watch_notices(tmp_path: Path, used: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(WATCH)
    log = tmp_path / "network.log"
    code = (
        "import socket\n"
        "def bound():\n    s = socket.socket(); s.bind(('127.0.0.1', 0))\n"
        f"try:\n    {used}\nexcept OSError:\n    pass\n"
    )
    environment = {**os.environ, "PYTHONPATH": str(tmp_path), "NETWORK_LOG": str(log)}
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    assert "127.0.0.1" in log.read_text()


def test_nothing_evaluates_or_unpickles_what_a_file_says() -> None:
    """By what the sources call: no eval, exec, pickle, marshal or shell in the packages.

    YAML is only parsed, or loaded and written as plain data. The contract test of a route, which
    the tests of a plug-in inherit, pickles a job of its own making and reads that back.
    """
    import ast

    root = Path(__file__).parents[1]
    banned = {"eval", "exec", "compile"}
    modules = {"pickle", "marshal", "shelve", "dill", "cloudpickle"}
    plain = {"parse", "compose", "safe_load", "SafeLoader", "safe_dump", "YAMLError"}
    for package in ("search_spaces", "workload", "models", "tuner"):
        for path in (root / package).rglob("*.py"):
            if path == root / "tuner/testing/routes.py":
                continue
            for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                    assert node.func.id not in banned, f"{path}:{node.lineno}"
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
                    assert node.func.attr not in ("popen", "system"), f"{path}:{node.lineno}"
                if isinstance(node, ast.Attribute) and getattr(node.value, "id", "") == "yaml":
                    assert node.attr in plain or node.attr.endswith(("Node", "Event")), path
                if isinstance(node, ast.ImportFrom):
                    assert node.module != "yaml", path
                if isinstance(node, ast.keyword) and node.arg == "shell":
                    assert getattr(node.value, "value", None) is False, (
                        f"{path}:{node.value.lineno}"
                    )
                if isinstance(node, ast.Import | ast.ImportFrom):
                    names = [alias.name for alias in node.names]
                    names.append(getattr(node, "module", None) or "")
                    assert not modules & {name.split(".")[0] for name in names}, path
