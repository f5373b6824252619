"""Access to Ray: the private one that joulefront starts, and the reports on one that it joins."""

from __future__ import annotations

import json
import os
import shutil
import signal
import site
import socket
import subprocess
import sys
import sysconfig
import tempfile
import time
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.commands import finished, write_program

pytest.importorskip("ray")

import ray

from tuner.cluster import joining as ray_cluster
from tuner.cluster import ray_private
from tuner.cluster import security as ray_security
from tuner.cluster.executor import RayExecutor
from tuner.cluster.head import Head
from tuner.cluster.joining import NodeAgent, Survey, join_ray
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.workload.node.host import ends_as_one
from tuner.workload.scripts.installed import extensions_dir

ROOT = Path(__file__).resolve().parents[2]
pytestmark = pytest.mark.ray


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[dict[str, Any]]:
    """What each call of `ray.init` saw; no Ray is started."""
    calls: list[dict[str, Any]] = []

    def init(**options: Any) -> None:
        folder = Path(options.get("_temp_dir", "/nowhere/r")).parent
        calls.append(
            {
                "options": options,
                "environment": dict(os.environ),
                "cwd": Path.cwd(),
                "cwd_holds": sorted(path.name for path in Path.cwd().iterdir()),
                "folder": folder,
                "mode": folder.stat().st_mode & 0o777 if folder.exists() else None,
                "clusters": ray._private.ray_constants.ENABLE_RAY_CLUSTER,
            }
        )

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray_cluster, "_head_of", lambda ray: Head(str, lambda *_: None))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "numpy.py").touch()
    return calls


def test_a_ray_of_ours_leaves_full_memory_to_the_kernel(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    join_ray(None).leave()
    monkeypatch.setenv("RAY_memory_monitor_refresh_ms", "250")  # the user's own wish is kept
    join_ray(None).leave()
    assert [seen["environment"]["RAY_memory_monitor_refresh_ms"] for seen in started] == [
        "0",
        "250",
    ]


def test_ray_keeps_its_monitor_where_the_kernel_would_end_the_study(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A container of Kubernetes 1.28 or later ends as one when a rank fills its memory."""
    (tmp_path / "self").mkdir()
    (tmp_path / "self" / "cgroup").write_text("0::/\n")
    group = tmp_path / "memory.oom.group"
    for text, kept in (("0\n", "0"), ("1\n", None)):
        group.write_text(text)
        ends = ends_as_one(proc=tmp_path, cgroup=tmp_path)
        monkeypatch.setattr(ray_security, "ends_as_one", lambda ends=ends: ends)
        join_ray(None).leave()
        assert started[-1]["environment"].get("RAY_memory_monitor_refresh_ms") == kept


def test_a_ray_of_ours_is_private(started: list[dict[str, Any]]) -> None:
    environment, cwd = dict(os.environ), Path.cwd()
    link = join_ray(None, cpus=3)
    seen = started[0]
    assert link.started
    assert seen["options"]["address"] == "local"
    assert seen["options"]["num_cpus"] == 3
    assert seen["options"]["include_dashboard"] is False
    # Ray is imported here already: the token must be what its own code reads, not only a variable.
    assert seen["environment"]["RAY_AUTH_MODE"] == "token"
    assert len(seen["environment"]["RAY_AUTH_TOKEN"]) == 64
    assert ray._raylet.get_authentication_mode() == ray._raylet.AuthenticationMode.TOKEN
    assert seen["mode"] == 0o700
    assert seen["cwd"] == ray_security.import_folder()
    assert "numpy.py" not in seen["cwd_holds"]
    assert seen["clusters"] is False
    # Nothing of it remains but Ray itself.
    assert dict(os.environ) == environment
    assert Path.cwd() == cwd
    assert ray._private.ray_constants.ENABLE_RAY_CLUSTER is True
    link.leave()
    link.leave()
    assert not seen["folder"].exists()
    assert join_ray(None).started
    assert started[1]["environment"]["RAY_AUTH_TOKEN"] != seen["environment"]["RAY_AUTH_TOKEN"]


@pytest.mark.parametrize("before", ["default", "ignored", "own"])
def test_sigterm_is_handled_by_python_after_ray_is_started(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, before: str
) -> None:
    """Ray sets a function of its own, and then a handler in C++ in its place."""
    own, rays = (lambda *_: None for _ in range(2))
    handlers = {"default": signal.SIG_DFL, "ignored": signal.SIG_IGN, "own": own}
    handler_in_c: list[bool] = []
    plain = signal.signal

    def init(**options: Any) -> None:
        plain(signal.SIGTERM, rays)
        handler_in_c.append(True)

    def installs(number: int, handler: Any) -> Any:
        handler_in_c.clear()
        return plain(number, handler)

    monkeypatch.setattr(ray, "init", init)
    kept = signal.signal(signal.SIGTERM, handlers[before])
    try:
        monkeypatch.setattr(signal, "signal", installs)
        join_ray(None).leave()
        assert signal.getsignal(signal.SIGTERM) is (
            rays if before == "default" else handlers[before]
        )
        assert not handler_in_c
    finally:
        plain(signal.SIGTERM, kept)


def test_sigterm_while_ray_starts_interrupts_a_program_that_handles_it(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A function of Ray's exits with the signal's number at that time."""

    def init(**options: Any) -> None:
        sys.exit(signal.SIGTERM)

    monkeypatch.setattr(ray, "init", init)
    kept = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with pytest.raises(KeyboardInterrupt):
            join_ray(None)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        with pytest.raises(SystemExit):
            join_ray(None)
    finally:
        signal.signal(signal.SIGTERM, kept)


def test_the_users_own_token_is_put_aside_and_comes_back(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RAY_AUTH_TOKEN", "mine")
    monkeypatch.setenv("RAY_AUTH_TOKEN_PATH", "/mine")
    monkeypatch.setenv("RAY_AUTH_MODE", "disabled")
    monkeypatch.setenv("PYTHONPATH", f"relative{os.pathsep}{os.pathsep}/absolute")
    environment = dict(os.environ)
    join_ray(None).leave()
    seen = started[0]["environment"]
    assert seen["RAY_AUTH_MODE"] == "token"
    assert len(seen["RAY_AUTH_TOKEN"]) == 64
    assert "RAY_AUTH_TOKEN_PATH" not in seen
    # An empty entry would be the current folder.
    paths = seen["PYTHONPATH"].split(os.pathsep)
    assert paths[-2:] == [os.path.abspath("relative"), "/absolute"]
    assert os.getcwd() not in paths
    assert dict(os.environ) == environment


def test_a_ray_without_tokens_is_not_started(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(ray, "__version__", "2.51.1")
        patch.delattr(ray._raylet, "AuthenticationTokenLoader")
        with pytest.raises(InputError, match=r"Ray 2\.51\.1 has no token .* install ray>=2\.52"):
            join_ray(None)
    assert not started


def test_a_ray_whose_parts_have_other_names_is_one_sentence(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = dict(os.environ)
    with monkeypatch.context() as patch:
        patch.delattr(ray._raylet, "Config")
        with pytest.raises(InputError, match=r"Ray .* cannot be started: .*Config.*inline"):
            join_ray(None)
    assert not started
    assert dict(os.environ) == environment
    assert ray._private.ray_constants.ENABLE_RAY_CLUSTER is True


@pytest.mark.parametrize("kind", [RuntimeError, Exception])  # Exception: it started too slowly
def test_a_ray_that_does_not_start_leaves_nothing_behind(
    kind: type[Exception],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    environment, folders = dict(os.environ), []

    def init(**options: Any) -> None:
        folders.append(Path(options["_temp_dir"]).parent)
        raise kind("no memory\nmore words")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(InputError, match=r"Ray .* cannot be started: no memory; try again"):
        join_ray(None)
    assert dict(os.environ) == environment
    assert not folders[0].exists()


def test_a_joined_ray_does_not_import_from_the_current_folder(
    started: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    cwd = Path.cwd()
    monkeypatch.setattr(ray_cluster, "require_node_here", lambda address: None)
    with socket.create_server(("127.0.0.1", 0)) as head:
        assert not join_ray(f"127.0.0.1:{head.getsockname()[1]}").started
        assert started[0]["cwd"] == ray_security.PACKAGES_FOLDER  # this is a checkout
        monkeypatch.setattr(site, "getsitepackages", lambda: [str(ray_security.PACKAGES_FOLDER)])
        assert not join_ray(f"127.0.0.1:{head.getsockname()[1]}").started
    assert not [name for name in started[1]["cwd_holds"] if name.endswith((".py", ".so"))]
    assert Path.cwd() == cwd


def test_sockets_fit_below_the_private_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    long = tmp_path / ("x" * 40)
    long.mkdir()
    monkeypatch.setenv("RAY_TMPDIR", str(long))
    with ray_security.private_folder() as made:
        folder = made.path
        names = "r/session_2026-11-21_23-04-46_265481_4194304/sockets/plasma_store"
        assert len(os.fsencode(f"{folder}/{names}")) <= 107
        assert Path(folder).stat().st_mode & 0o777 == 0o700
    monkeypatch.setattr(ray_security, "_LONGEST_PARENT_BYTES", 999)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "missing"))
    with pytest.raises(InputError, match=r"no folder for Ray's files can be made in .*missing"):
        ray_security.private_folder()


@pytest.mark.parametrize(
    ("variables", "mode", "words"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, 0o600, ["requires no token", "RAY_AUTH_MODE=token"]),
        ({"RAY_AUTH_MODE": "token"}, 0o600, []),
        ({"RAY_AUTH_MODE": "token"}, 0o644, ["(mode 0644)", "chmod 600"]),
        ({"RAY_AUTH_MODE": "token"}, 0o640, ["(mode 0640)", "chmod 600"]),
        ({"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "ab" * 32}, 0o644, []),
    ],
)
def test_what_lets_others_in_is_told(
    variables: dict[str, str],
    mode: int,
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    token = tmp_path / ".ray" / "auth_token"
    token.parent.mkdir()
    token.write_text("ab" * 32)
    token.chmod(mode)
    with monkeypatch.context() as patch:
        patch.setenv("HOME", str(tmp_path))
        for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
            patch.delenv(name, raising=False)
        for name, value in variables.items():
            patch.setenv(name, value)
        ray_private.reload_authentication()
        seen = ray_security.exposures()
        ray_security.strip_token()
        assert not [name for name in os.environ if name.startswith("RAY_AUTH")]
    ray_private.reload_authentication()
    assert len(seen) == bool(words)
    assert all(word in seen[0] for word in words)


def test_doctor_and_a_study_warn_of_them(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Survey((), None, exposures=("the door is open",))
    assert seen.lines()[-1] == "warning: the door is open"
    assert seen.to_json()["exposures"] == ["the door is open"]
    said: list[str] = []
    monkeypatch.setattr(ray, "init", lambda **options: None)
    monkeypatch.setattr(ray_cluster, "_head_of", lambda ray: Head(str, lambda *_: None))
    monkeypatch.setattr(ray, "nodes", lambda: [])
    monkeypatch.setattr("tuner.cluster.head.NodeDemand.meet", lambda self: None)
    monkeypatch.setattr("tuner.cluster.executor.exposures", lambda: ("the door is open",) * 2)
    with pytest.raises(InputError, match="no node of the Ray cluster has"):
        RayExecutor(
            load_job(), load_cluster("h200-8"), run_dir=".", address="auto", announce=said.append
        )
    assert said.count("warning: the door is open") == 1


def test_an_agent_that_imports_other_packages_is_refused(tmp_path: Path) -> None:
    assert ray_security.foreign_package() == ""
    agent = NodeAgent(str(tmp_path), str(tmp_path))
    entered = agent.enter(load_job(), load_cluster("h200-8"), None)
    assert "is not used: it would import 'tuner' from" in entered.refused[0]
    assert entered.facts.refusals() == entered.refused
    assert agent.inspect().refused == entered.refused


# ---- for real

#: One study's Ray, looked at from inside and from outside.
INSIDE = """
import json, os, stat, subprocess, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tuner.search_spaces.job import load_job
from tuner.cluster.executor import RayExecutor
from tuner.cluster.head import Head
from tuner.workload.node.platforms import detect_cluster

INTRUDER = '''
import os, sys, ray
from ray._private import ray_constants
ray_constants.ENABLE_RAY_CLUSTER = False  # or Ray would look for the address of another interface
ray.init(address=sys.argv[1], log_to_driver=False, _temp_dir=sys.argv[2])
print("entered")
'''

def processes():
    found, children = {}, {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            fields = (folder / "stat").read_text().rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(folder.name))
        except OSError:
            pass
    queue = [os.getpid()]
    while queue:
        pid = queue.pop()
        queue += children.get(pid, [])
        try:
            found[pid] = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\\0", b" ").decode()
        except OSError:
            pass
    return found

def listening(pids):
    inodes = {}
    for pid in pids:
        for fd in Path(f"/proc/{pid}/fd").glob("*"):
            try:
                inodes[os.readlink(fd)] = pid
            except OSError:
                pass
    rows = []
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            words = line.split()
            if words[3] == "0A" and f"socket:[{words[9]}]" in inodes:
                rows.append([pids[inodes[f"socket:[{words[9]}]"]], words[1].partition(":")[0]])
    return rows

def environment(pid):
    pairs = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\\0")
    return dict(pair.split("=", 1) for pair in pairs if "=" in pair)

def enters(limit_s, variables):
    clean = {k: v for k, v in os.environ.items() if not k.startswith("RAY_")}
    try:
        done = subprocess.run(
            [sys.executable, "-c", INTRUDER, address, str(folder / "r")], text=True,
            env={**clean, **variables}, capture_output=True, timeout=limit_s)
    except subprocess.TimeoutExpired:
        return False
    return "entered" in done.stdout

answers = {}
executor = RayExecutor(load_job(), detect_cluster(), run_dir=sys.argv[1])
executor.prepare()
import ray
address = ray.get_runtime_context().gcs_address
folder = Path(ray._private.worker._global_node.get_session_dir_path()).parent.parent
found = processes()
answers["listening"] = listening(found)
answers["mode"] = stat.S_IMODE(folder.stat().st_mode)
gcs = next(pid for pid, words in found.items() if words.split()[0].endswith("/gcs_server"))
server = next(p for p, words in found.items() if "fork_server" in words and p != os.getpid())
token = environment(gcs)["RAY_AUTH_TOKEN"]
answers["in_words"] = [words for words in found.values() if token in words]
answers["at_ranks"] = [name for name in environment(server) if name.startswith("RAY_AUTH")]
answers["here"] = [name for name in os.environ if name.startswith("RAY_AUTH")]
tried = {
    "with it": (150, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": token}),
    "without": (40, {"RAY_AUTH_MODE": "disabled"}),
    "another": (40, {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}),
}
with ThreadPoolExecutor() as together:
    answers["enters"] = dict(zip(tried, together.map(enters, *zip(*tried.values()))))
executor.close()
answers["left"] = folder.exists()
answers["home"] = sorted(path.name for path in Path.home().glob(".ray/*"))
print("ANSWERS " + json.dumps(answers))
"""


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_nobody_else_can_enter_a_ray_of_ours(tmp_path: Path) -> None:
    inherited = {name: value for name, value in os.environ.items() if "RAY_" not in name}
    done = subprocess.run(
        [sys.executable, "-c", INSIDE, str(tmp_path)],
        # As older Rays had it: protection must not depend on what Ray's default is.
        env={
            **inherited,
            "HOME": str(tmp_path),
            "PYTHONPATH": str(ROOT),
            "RAY_AUTH_MODE": "disabled",
        },
        capture_output=True,
        text=True,
        check=False,
        timeout=500,
    )
    lines = [line for line in done.stdout.splitlines() if line.startswith("ANSWERS ")]
    assert lines, done.stdout[-2000:] + done.stderr[-4000:]
    answers = json.loads(lines[0].removeprefix("ANSWERS "))
    loopback = {"0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000"}
    assert {"gcs_server", "raylet", "NodeAgent"} <= {
        name
        for words, _ in answers["listening"]
        for name in ("gcs_server", "raylet", "NodeAgent")
        if name in words
    }
    assert [row for row in answers["listening"] if row[1] not in loopback] == []
    assert answers["mode"] == 0o700
    assert answers["in_words"] == answers["at_ranks"] == answers["home"] == []
    assert answers["here"] == ["RAY_AUTH_MODE"]  # the user's own
    assert answers["enters"] == {"with it": True, "without": False, "another": False}
    assert answers["left"] is False


@pytest.mark.slow
def test_a_program_that_ends_without_leaving_removes_its_files() -> None:
    with tempfile.TemporaryDirectory(prefix="jf") as parent:
        words = (
            "from tuner.cluster.joining import join_ray\n"
            "join_ray(None, cpus=1)\nraise SystemExit(3)"
        )
        done = subprocess.run(
            [sys.executable, "-c", words],
            env={**os.environ, "PYTHONPATH": str(ROOT), "RAY_TMPDIR": parent},
            timeout=120,
            check=False,
        )
        assert done.returncode == 3
        assert os.listdir(parent) == []


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the package as `pip install` copies it, not as an editable install."""
    folder = tmp_path_factory.mktemp("installed")
    venv.create(folder, symlinks=True)
    packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
    shutil.copytree(ROOT / "tuner", packages / "tuner")  # what the links point to is copied
    # Its own .pth files, and with them that of an editable install, are not read through this.
    (packages / "others.pth").write_text(sysconfig.get_path("purelib") + "\n")
    write_program(
        folder / "bin" / "tuner",
        f"#!{folder}/bin/python\nimport sys\nfrom tuner.cli.main import main\nsys.exit(main())\n",
    )
    return folder


@pytest.fixture
def planted(tmp_path: Path) -> Path:
    """A folder full of modules with our names and others', which leave a mark when imported."""
    folder = tmp_path / "planted"
    for name in ("models", "search_spaces", "tuner", "workload", "numpy", "torch", "optuna"):
        (folder / name).mkdir(parents=True)
        (folder / name / "__init__.py").write_text(
            f"open({str(tmp_path / 'marker')!r}, 'a').write(__name__ + '\\n')\n"
        )
    for name in ("search_spaces.py", "sitecustomize.py", "deepspeed.py"):
        (folder / name).write_text((folder / "models" / "__init__.py").read_text())
    return folder


def _clean_environment(home: Path) -> dict[str, str]:
    dropped = ("PYTHON", "RAY_")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
    # The ops that this machine has compiled before need not be compiled for that home again.
    return {**kept, "HOME": str(home), "TORCH_EXTENSIONS_DIR": extensions_dir()}


def _optimize(installed: Path, folder: Path, *words: str, **variables: str) -> Any:
    command = [str(installed / "bin" / "tuner"), "optimize", "tiny-gpt", "--max-probes", "1"]
    return finished(
        [*command, "--no-verify", "--plain", *words],
        cwd=folder,
        env=_clean_environment(folder.parent) | variables,
        timeout=560,
    )


@pytest.mark.real
@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_study_imports_nothing_from_the_folder_it_is_started_in(
    installed: Path, planted: Path
) -> None:
    done = _optimize(installed, planted, "--executor", "ray")
    marker = planted.parent / "marker"
    assert not marker.exists(), marker.read_text()
    assert done.returncode == 0, done.stderr[-4000:]
    assert "starting Ray" in done.stderr


@pytest.fixture
def open_ray(installed: Path, tmp_path: Path) -> Iterator[str]:
    """The address of a Ray that requires no token; on the loopback interface, to be harmless."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    home = tmp_path / "elsewhere"
    home.mkdir()
    with tempfile.TemporaryDirectory(prefix="jf", ignore_cleanup_errors=True) as folder:
        words = ["start", "--head", "--block", f"--port={port}", f"--temp-dir={folder}/r"]
        words += ["--include-dashboard=false", "--num-cpus=2", "--object-store-memory=80000000"]
        process = subprocess.Popen(
            [str(installed / "bin" / "python"), "-P", "-m", "ray.scripts.scripts", *words],
            env=_clean_environment(home)
            | {"RAY_AUTH_MODE": "disabled", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
            cwd=home,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        try:
            until_s = time.monotonic() + 60
            while not list(Path(folder).glob("r/session_latest/sockets/raylet*")):
                assert process.poll() is None
                assert time.monotonic() < until_s
                time.sleep(0.2)
            yield f"127.0.0.1:{port}"
        finally:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(timeout=60)
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)


@pytest.mark.real
@pytest.mark.long
@pytest.mark.timeout(600)
def test_nor_on_a_joined_cluster_which_is_reported_as_open(
    installed: Path, planted: Path, open_ray: str
) -> None:
    done = _optimize(installed, planted, "--ray", open_ray, RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER="0")
    marker = planted.parent / "marker"
    assert not marker.exists(), marker.read_text()
    assert done.returncode == 0, done.stderr[-4000:]
    assert done.stderr.count("warning: the Ray cluster requires no token") == 1
    doctor = finished(
        [str(installed / "bin" / "tuner"), "doctor", "--ray", open_ray],
        cwd=planted,
        env=_clean_environment(planted.parent) | {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0"},
        timeout=200,
    )
    assert "warning: the Ray cluster requires no token" in doctor.stdout
