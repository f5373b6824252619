"""The attacks of the security review that need no running study.

Each function repeats one group of findings in an empty folder, with the commands, files and sockets
that a user has, and returns the outcome of each attack. Nothing outside the folder is touched.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import http.client
import io
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.security_tools import (
    _TUNER,
    OTHER_UID,
    ROOT,
    SIMULATED,
    Attempt,
    copied,
    environment,
    not_tried,
    study,
    tried,
    tuner,
)
from tuner.testing.commands import finished

ESCAPE = "\x1b]0;owned\x07\x1b[2J"
#: What a server answers that does not let the caller in; a conflict, say, comes after that.
REFUSED = (400, 401, 403, 421)
#: A process may wait this long for what another one does.
PATIENCE_S = 60.0


def process_groups(folder: Path) -> Sequence[Attempt]:
    """Finding 3: the group of a rank that ended, its number taken by another process."""
    what = "close the fork server after a rank's process group number was taken by a stranger"
    if os.geteuid() != 0:
        return [not_tried(what, "only root can choose the next process id")]
    code = "from benchmarks.security_checks import _recycled; _recycled()"
    namespace = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
    done = finished([*namespace, sys.executable, "-P", "-c", code], cwd=folder, env=environment())
    if done.returncode:
        return [not_tried(what, f"it failed: {done.stderr.strip()[-200:]}")]
    return [tried(what, "killed" in done.stdout, f"the stranger {done.stdout.strip()}")]


def _recycled() -> None:
    """In a process id namespace of its own: print "was killed" or "lives"."""
    from tuner.workload.node.rank_server import RankServer, RankSpec, control_socket

    server = RankServer(needs=())
    server._optional = ()  # only torch and DeepSpeed, which nothing here uses
    listener, address, remove = control_socket()
    env = {**server.env, "RANK": "0"}
    spec = RankSpec(("missing.py",), env, "rank.log", str(Path.cwd()), address)
    ranks = server.spawn([spec], listener)
    (pid,) = ranks.pids
    deadline_s = time.monotonic() + PATIENCE_S
    while Path(f"/proc/{pid}").exists() and time.monotonic() < deadline_s:
        server.exits(0.1)
    Path("/proc/sys/kernel/ns_last_pid").write_text(str(pid - 1))
    stranger = subprocess.Popen(["sleep", "60"], start_new_session=True)
    if stranger.pid != pid:
        sys.exit(f"process id {pid} was not given again, but {stranger.pid}")
    server.close()
    time.sleep(0.5)
    print("was killed" if stranger.poll() == -signal.SIGKILL else "lives")
    stranger.kill()
    remove()


def _rewrite(run: Path, old: str, new: str) -> None:
    """Replace text in a run's trace; at least one place must hold it."""
    trace = run / "trace" / "probes.jsonl"
    text = trace.read_text()
    assert old in text, f"{trace} holds no {old}"
    trace.write_text(text.replace(old, new))


def clock_script(folder: Path) -> Sequence[Attempt]:
    """Finding 4: a knob's name or value in the trace that is a line of shell."""
    run, attempts = study(folder, "original"), []
    for number, (what, make) in enumerate(
        {
            "a live knob's name with a line break": lambda line: {f"note\n{line}\n#": 1},
            "a live knob's text value with a line break": lambda line: {"note": f"\n{line}\n#"},
            "a live knob's name with a carriage return": lambda line: {f"note\r\n{line}\n#": 1},
            "a command substitution in a live knob's name": lambda line: {f"$({line})": 1},
        }.items()
    ):
        here = folder / str(number)
        mark, out = here / "mark", here / "files"
        theirs = copied(run, here)
        shutil.rmtree(theirs / "best", ignore_errors=True)
        live = json.dumps(make(f"touch {mark}"))
        _rewrite(theirs, '"live":[{}]', f'"live":[{live}]')
        _rewrite(theirs, '"live":{}', f'"live":{live}')
        done = tuner(["apply", "study", "--out", str(out)], here)
        note = f"tuner apply exits with {done.returncode}"
        for script in sorted(out.glob("*.sh")):
            words = ["bash", str(script), "true"] if script.name == "clocks.sh" else []
            words = words or ["bash", "-n", str(script)]
            subprocess.run(words, check=False, cwd=here, capture_output=True, timeout=PATIENCE_S)
        if mark.exists():
            note += ", and clocks.sh ran the command"
        attempts.append(tried(what, mark.exists(), note))
    return attempts


def links(folder: Path) -> Sequence[Attempt]:
    """Finding 5: files of a run that are links, and a run of another user."""
    original = study(folder, "original")
    assert tuner(["show", "--html", "original"], folder).returncode == 0
    files = [path for path in original.rglob("*") if path.is_file()]
    attempts = []
    for words in (
        ["apply", "study"],
        ["show", "--html", "study"],
        [*SIMULATED, "--max-probes", "4", "--name", "study"],
    ):
        # One command with hard links is enough: both are written through by the same calls.
        for kind in ("symbolic", "hard") if words[0] == "apply" else ("symbolic",):
            here = folder / f"{words[0]}-{kind}"
            run, overwritten = copied(original, here), []
            canaries = {}
            for path in files:
                name = path.relative_to(original)
                canary = here / "canaries" / "-".join(name.parts)
                canary.parent.mkdir(exist_ok=True)
                # What is read for the command's sake must hold what it held.
                canary.write_bytes(path.read_bytes() or b"a private file of the victim\n")
                canary.chmod(0o600)
                (run / name).unlink(missing_ok=True)
                if kind == "hard":
                    (run / name).hardlink_to(canary)
                else:
                    (run / name).symlink_to(canary)
                canaries[canary] = canary.read_bytes()
            done = tuner(words, here)
            for canary, text in canaries.items():
                state = canary.stat()
                if canary.read_bytes() != text or state.st_mode & 0o777 != 0o600:
                    overwritten.append(canary.name)
            attempts.append(
                tried(
                    f"tuner {words[0]} in a run whose files are {kind} links",
                    bool(overwritten),
                    f"exit code {done.returncode}"
                    + (f"; written through: {', '.join(overwritten)}" if overwritten else ""),
                )
            )
    return [*attempts, *_foreign_run(original, folder)]


def _foreign_run(original: Path, folder: Path) -> Iterator[Attempt]:
    what = "a run that belongs to another user is written to without a word"
    if os.geteuid() != 0:
        yield not_tried(what, "only root can give a folder to another user")
        return
    for command in ("apply",):
        here = folder / f"foreign-{command}"
        run = copied(original, here)
        for path in (run, *run.rglob("*")):
            os.chown(path, OTHER_UID, OTHER_UID)
        done = tuner([command, "study"], here)
        error = done.stderr.decode(errors="replace").strip()
        told = re.search(r"\bown(s|ed|er)?\b|belongs to", error) is not None
        note = f"tuner {command} exits with {done.returncode}: {error[-120:]!r}"
        yield tried(f"tuner {command}: {what}", not told, note)


def _table(folder: Path, *values: str) -> Path:
    folder.mkdir(parents=True)
    rows = [
        ["shape", "speed", "t", "p"],
        ["one", 1, 20, 50],
        ["two", 1, 15, 60],
    ]
    text = io.StringIO()
    csv.writer(text).writerows(rows)
    (folder / "table.csv").write_text(text.getvalue())
    (folder / "table.toml").write_text(
        'name = "made-up"\nlaunch_knobs = ["shape"]\nlive_knobs = ["speed"]\nunit_of_work = "lap"\n'
        'time_s = "t"\npower_W = "p"\nenergy_scope = "gpu"\n[cost]\nlaunch_s = 10.0\n'
        "launch_power = 0.5\nsettle_s = 1.0\nwindow_s = 4.0\n"
    )
    return folder


def _controls(done: subprocess.CompletedProcess[bytes]) -> str:
    """Return the control characters in both streams, as text; newline and tab are allowed."""
    text = (done.stdout + done.stderr).decode(errors="replace")
    found = {c for c in text if (ord(c) < 32 and c not in "\n\t") or 127 <= ord(c) < 160}
    return " ".join(sorted(f"U+{ord(c):04X}" for c in found))


def terminal(folder: Path) -> Sequence[Attempt]:
    """Finding 6: control characters of others on the terminal, formulas in CSV."""
    attempts = []
    table = _table(folder / "escapes", f"a{ESCAPE}\x9b2Jb")
    columns = [str(table / "table.csv"), "--time-column", "t", "--power-column", "p"]
    columns += ["--knobs", "shape,speed"]
    for words in (
        ["dev", "replay", str(table), "--max-probes", "3", "--name", "escapes"],
        ["show", "escapes"],
        ["import", *columns],
        ["dev", "replay", str(folder / f"no{ESCAPE}such")],
    ):
        done = tuner(words, folder)
        found = _controls(done)
        what = f"escape sequences of a table through tuner {words[0]}"
        attempts.append(tried(what, bool(found), found or f"exit code {done.returncode}"))
    script = folder / "raises.py"
    script.write_text(f"raise RuntimeError({ESCAPE!r} + 'text')\n")
    done = tuner(
        ["dev", "probe", "--script", str(script), "--steps", "9", "--global-batch", "2"], folder
    )
    found = _controls(done)
    what = "escape sequences of a script's exception through tuner dev probe"
    if b"text" not in done.stdout + done.stderr:
        attempts.append(not_tried(what, f"the exception was not shown: {done.stderr[-200:]!r}"))
    else:
        attempts.append(tried(what, bool(found), found))

    formulas = ('=HYPERLINK("http://x")', "+1+1", "-1+1", "@SUM(1)")
    table, out = _table(folder / "formulas", *formulas), folder / "formulas.csv"
    tuner(
        ["dev", "replay", str(table), "--max-probes", "6", "--name", "formulas", "--quiet"], folder
    )
    done = tuner(["export", "formulas", "--to", "csv", "--out", str(out)], folder)
    cells = [cell for row in csv.reader(out.open()) for cell in row] if out.exists() else []
    found = [formula for formula in formulas if formula in cells]
    note = f"{len(cells)} cells, exit code {done.returncode}; as they were: {found}"
    return [*attempts, tried("formulas of a table through tuner export to CSV", bool(found), note)]


@contextlib.contextmanager
def _served(words: Sequence[str], folder: Path, port: int) -> Iterator[str]:
    """Start tuner dashboard and give what it printed until it answered."""
    printed = folder / "printed"
    with printed.open("wb") as file:
        process = subprocess.Popen(
            [*_TUNER, "dashboard", *words, "--port", str(port)],
            cwd=folder,
            env=environment(PYTHONUNBUFFERED="1"),
            stdin=subprocess.DEVNULL,
            stdout=file,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
    try:
        deadline_s = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline_s and process.poll() is None:
            with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
                break
            time.sleep(0.2)
        time.sleep(0.5)  # the address may be printed after the socket listens
        yield printed.read_text(errors="replace")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=PATIENCE_S)


def _request(
    port: int, method: str, path: str, *, body: str | None = None, **headers: str
) -> tuple[int, str, str]:
    """Return status, the cookies it set and the body of one request to the dashboard."""
    link = http.client.HTTPConnection("127.0.0.1", port, timeout=PATIENCE_S)
    try:
        link.request(method, path, body=body, headers=headers)
        answer = link.getresponse()
        cookies = "; ".join(c.split(";")[0] for c in answer.headers.get_all("Set-Cookie") or ())
        return answer.status, cookies, answer.read().decode(errors="replace")
    finally:
        link.close()


def dashboard(folder: Path) -> Sequence[Attempt]:
    """Finding 8: another user of the machine, and a web page, at the dashboard."""
    run = study(folder)
    hostile = '![x](http://192.0.2.9/x.png) <img src="x" onerror="alert(1)">'
    failed = json.loads((run / "trace" / "probes.jsonl").read_text().splitlines()[-1])
    failed["request"]["probe_id"] = "p0099"
    failed |= {"measurements": [], "failure": {"kind": "crash", "message": hostile}}
    with (run / "trace" / "probes.jsonl").open("a") as trace:
        trace.write(json.dumps(failed) + "\n")
    for journal in run.glob("study.journal*"):
        journal.unlink()
    again = tuner([*SIMULATED, "--max-probes", "4", "--name", "study"], folder)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    attempts = []
    with _served(["study"], folder, port) as printed:
        found = re.search(rf"https?://[^\s/]+:{port}(/\S*)", printed)
        path = found[1] if found else "/"
        status, cookie, _ = _request(port, "GET", path)
        more = {"Cookie": cookie} if cookie else {}
        owner = _request(port, "GET", "/api/studies", **more)
        what = "the owner is let in by the address that was printed"
        if owner[0] != 200:
            return [*attempts, Attempt(what, True, f"HTTP {status}, then {owner[0]}: {printed!r}")]
        status = _request(port, "GET", "/api/studies", Host="evil.example", **more)[0]
        what = "a foreign Host header with the owner's cookie (DNS rebinding)"
        attempts.append(tried(what, status not in REFUSED, f"HTTP {status}"))
        refusal = again.stderr.decode(errors="replace").strip()[-100:]
        if again.returncode:
            attempts.append(tried(_NOTES, False, f"tuner optimize refuses the trace: {refusal}"))
        else:
            attempts.append(_notes(port, json.loads(owner[2])["study_summaries"], more))
        for what, method, path, body in (
            ("read the studies without a token", "GET", "/api/studies", None),
            ("read the page without a token", "GET", "/dashboard", None),
            ("write a note without a token", "PUT", "/api/studies/0/note", _NOTE),
            ("delete the study without a token", "DELETE", "/api/studies/0", "{}"),
        ):
            content = {"Content-Type": "application/json"}
            status = _request(port, method, path, body=body, **content)[0]
            attempts.append(tried(what, status not in REFUSED, f"HTTP {status}"))
    return attempts


def _notes(port: int, studies: Sequence[dict[str, Any]], headers: dict[str, str]) -> Attempt:
    notes = ""
    for study_id in [one["study_id"] for one in studies]:
        path = f"/api/studies/{study_id}?after=0"
        detail = json.loads(_request(port, "GET", path, **headers)[2])
        notes += detail.get("note", {}).get("body", "")
        notes += "".join(t.get("note", {}).get("body", "") for t in detail["trials"])
    shown = re.sub(r"(`+)[^`].*?\1", "", notes)  # Markdown shows a code span as it is
    raw = [part for part in ("![x](http", "<img src") if part in shown]
    if not notes:
        return not_tried(_NOTES, "there are no notes")
    return tried(_NOTES, bool(raw), f"raw: {raw}" if raw else f"{len(notes)} characters of notes")


_NOTES = "stored notes hold the picture or the HTML of a trace as it is"
_NOTE = json.dumps({"body": "overwritten", "version": 99})


def command_line(folder: Path) -> Sequence[Attempt]:
    """Finding 9: secrets where every user of the machine can read them."""
    attempts = []
    secret = "hf_notARealToken"
    from tuner.workload.node.rank_server import RankServer, RankSpec, control_socket

    script = folder / "waits.py"
    script.write_text("import time\ntime.sleep(60)\n")
    server = RankServer(needs=())
    server._optional = ()
    listener, address, remove = control_socket()
    try:
        env = {**server.env, "RANK": "0", "HF_TOKEN": secret}
        log = str(folder / "rank.log")
        spec = RankSpec((str(script),), env, log, str(folder), address, fresh=True)
        (pid,) = server.spawn([spec], listener).pids
        words, deadline_s = b"", time.monotonic() + 20
        while b"rank\0" not in words and time.monotonic() < deadline_s:
            with contextlib.suppress(OSError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes()
            time.sleep(0.01)
        what = "a token of the environment in the arguments of a fresh rank"
        if b"rank\0" in words:
            attempts.append(tried(what, secret.encode() in words))
        else:
            attempts.append(not_tried(what, f"no fresh rank was seen: {words!r}"))
    finally:
        server.close()
        remove()

    url = f"sqlite:///{folder}/with-a-password.db"
    env = environment(JOULEFRONT_STORAGE=url)
    done = tuner([*SIMULATED, "--max-probes", "2"], folder, env=env)
    used = Path(folder, "with-a-password.db").exists()
    attempts.append(
        tried(
            "the storage's URL can be given by --storage alone, which every user sees in ps",
            not used,
            f"JOULEFRONT_STORAGE is {'used' if used else 'ignored'}; exit code {done.returncode}",
        )
    )
    modes = {}
    for run in (folder / "runs").iterdir():
        for path in (run / "study.toml", run / "trace" / "probes.jsonl"):
            above = all(p.stat().st_mode & 0o005 == 0o005 for p in (run, path.parent))
            modes[path.name] = bool(above and path.stat().st_mode & 0o004)
    what = "others can read the words of --script in study.toml and the trace"
    return [*attempts, tried(what, any(modes.values()))]


def power_samples(folder: Path) -> Sequence[Attempt]:
    """Finding 10: a small file of power samples that inflates to very many rows."""
    run = study(folder)
    path = run / "trace" / "power" / "p0000.csv.gz"
    path.parent.mkdir(parents=True)
    rows = b"".join(b"%.4f,250.000\n" % (n / 10) for n in range(4000))
    with gzip.open(path, "wb", compresslevel=6) as file:
        file.write(b"time_s,power_W\n")
        for _ in range(1000):  # 4 million rows
            file.write(rows)
    probes = [json.loads(s) for s in (run / "trace" / "probes.jsonl").read_text().splitlines()]
    for probe in probes[1:]:
        name = f"{probe['request']['probe_id']}.csv.gz"
        path.with_name(name).write_bytes(path.read_bytes())
    attempts = []
    for words in (["show", "--html", "study"], ["show", "study"]):
        began_s = time.monotonic()
        process = subprocess.Popen(
            [*_TUNER, *words],
            cwd=folder,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        peak_bytes, wall_s = 0, 0.0
        while wall_s < 40 and peak_bytes < 2**30:
            done, _, used = os.wait4(process.pid, os.WNOHANG)
            wall_s = time.monotonic() - began_s
            if done:
                process.returncode = 0
                peak_bytes = used.ru_maxrss * 1024
                break
            with contextlib.suppress(OSError, IndexError):
                status = Path(f"/proc/{process.pid}/status").read_text()
                peak_bytes = int(status.split("VmHWM:")[1].split()[0]) * 1024
            time.sleep(0.1)
        else:
            process.kill()
            process.wait()
        worked = peak_bytes >= 2**30 or wall_s >= 40
        note = f"{peak_bytes / 2**20:,.0f} MiB in {wall_s:.0f} s"
        what = f"tuner {words[0]} of a run with 4 million power samples a probe"
        attempts.append(tried(what, worked, note + (", ended then" if worked else "")))
    return attempts


def other_users_rights(folder: Path) -> Sequence[Attempt]:
    """Finding 11: the training script with root's rights, and advice that opens counters to all."""
    attempts = [*root_for_another(folder)]
    advice = [
        path.relative_to(ROOT)
        for package in ("workload", "tuner", "docs")
        for path in (ROOT / package).rglob("*")
        if path.suffix in (".py", ".md") and re.search(r"chmod -R a\+r", path.read_text())
    ]
    what = "users are advised to open /sys/class/powercap to everyone"
    return [*attempts, tried(what, bool(advice), ", ".join(map(str, advice)))]


def root_for_another(folder: Path) -> Sequence[Attempt]:
    """Findings 2, 3, 4 and 6 of the second review: what root does for the caller of sudo."""
    what = "under sudo, root starts, makes or gives away something for the caller"
    if os.geteuid() != 0:
        return [not_tried(what, "only root can start tuner as sudo does")]
    told, own = folder / "told", folder / "own"
    own.mkdir()
    (own / "script.py").write_text(f"open({str(told)!r}, 'a').write('the script ran; ')\n")
    (own / "sitecustomize.py").write_text(f"open({str(told)!r}, 'a').write('a parser ran; ')\n")
    for path in (own, *own.iterdir()):
        os.chown(path, OTHER_UID, OTHER_UID)
    before = {path: path.stat().st_uid for path in own.rglob("*")}
    env = environment(SUDO_UID=str(OTHER_UID), SUDO_GID=str(OTHER_UID), SUDO_USER="nobody")
    pasted = [f"PYTHONPATH={own}", "torchrun", "--nproc-per-node", "1", "script.py"]
    for words in (
        ["dev", "probe", "--script", "script.py", "--steps", "9", "--global-batch", "2"],
        ["optimize", "--dry-run", "--", *pasted],
    ):
        tuner(words, own, env=env)
    after = {path: path.stat().st_uid for path in own.rglob("*")}
    seen = told.read_text() if told.exists() else ""
    changed = {path.name for path, owner in after.items() if before.get(path) != owner}
    return [tried(what, bool(seen or changed), seen + ", ".join(sorted(changed)))]


def slurm_token(folder: Path) -> Sequence[Attempt]:
    """Finding 2: the token that docs/tune.sbatch makes, or fails to make."""
    made = _submit(folder / "token", "mkdir -p ~/.ray; echo secret > ~/.ray/auth_token")
    token = folder / "token" / "home" / ".ray" / "auth_token"
    mode = token.stat().st_mode & 0o777 if token.exists() else 0
    started = any(c.startswith("ray start") for c in made)
    what = "tune.sbatch leaves a token that others can read"
    note = f"mode {mode:o}"
    first = tried(what, bool(mode & 0o077), note) if started else not_tried(what, "no Ray started")
    started = any(c.startswith("ray start") for c in _submit(folder / "none", "exit 2"))
    return [first, tried("tune.sbatch starts a Ray although no token could be made", started)]


def slurm_script(folder: Path) -> Sequence[Attempt]:
    """Finding 12: docs/tune.sbatch in a folder with a module called ray, beside another Ray."""
    made = _submit(folder / "slurm", "mkdir -p ~/.ray; echo secret > ~/.ray/auth_token")
    imported = (folder / "slurm" / "mark").exists()
    stops = [call for call in made if call == "ray stop"]
    return [
        tried("tune.sbatch imports ray from the folder it was submitted in", imported),
        tried("tune.sbatch ends every Ray of its user on the node (ray stop)", bool(stops)),
    ]


def _submit(here: Path, make_token: str) -> list[str]:
    """Run docs/tune.sbatch with stand-ins for Slurm and Ray; return the commands it called."""
    programs, home, calls = here / "bin", here / "home", here / "calls"
    programs.mkdir(parents=True)
    home.mkdir(mode=0o755)
    # The installed Ray, which would wait for a cluster that is not there.
    (here / "site").mkdir()
    (here / "site" / "ray.py").write_text(
        "def init(**settings): pass\ndef nodes(): return [{'Alive': True}]\n"
    )
    fakes = {
        "scontrol": "echo n1",
        "srun": 'while [[ $1 == --* ]]; do shift; done; exec "$@"',
        "hostname": "echo 127.0.0.1",
        "ray": f"[[ $1 == get-auth-token ]] && {{ {make_token}; exit; }}\n"
        '[[ " $* " == *" --block "* ]] && exec sleep 3; exit 0',
        "tuner": "exit 0",
        "python": f'exec {sys.executable} "$@"',
    }
    for program, body in fakes.items():
        line = f'echo "{program} $*" | head -1 >> {calls}'
        (programs / program).write_text(f"#!/bin/bash\n{line}\n{body}\n")
        (programs / program).chmod(0o755)
    planted = f"open({str(here / 'mark')!r}, 'w').close()\nprint(1)\nraise SystemExit(0)\n"
    (here / "ray.py").write_text(planted)
    env = {"PATH": f"{programs}:{os.environ['PATH']}", "HOME": str(home), "RAY_WAIT_S": "0.01"}
    env["PYTHONPATH"] = str(here / "site")
    env |= {"SLURM_JOB_NODELIST": "n1", "SLURM_JOB_NAME": "night", "SLURM_JOB_ID": str(os.getpid())}
    process = subprocess.Popen(
        ["bash", "-c", f"umask 022; exec bash '{ROOT / 'docs' / 'tune.sbatch'}' tiny-gpt"],
        cwd=here,
        env=env,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        process.wait(timeout=PATIENCE_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    return calls.read_text().splitlines() if calls.exists() else []


def smaller(folder: Path) -> Sequence[Attempt]:
    """Finding 12, the parts that neither the study nor the Slurm script shows."""
    run = study(folder)
    (folder / "study" / "trace").mkdir(parents=True)
    for name in ("study.toml", "trace/probes.jsonl"):
        text = (run / name).read_text().replace("qwen2.5-7b", "qwen2.5-7b-of-another")
        (folder / "study" / name).write_text(text)
    done = tuner(["show", "study", "--json"], folder)
    error = done.stderr.decode(errors="replace")
    other = b"of-another" in done.stdout or (done.returncode != 0 and "runs/study" not in error)
    what = "./NAME is taken for the run NAME in place of runs/NAME, without a word"
    attempts = [tried(what, other and "runs" not in error, f"exit code {done.returncode}")]

    foreign = folder / "extensions" / "py311_cpu" / "theirs" / "lock"
    foreign.parent.mkdir(parents=True)
    foreign.touch()
    code = (
        "from tuner.workload.node.rank_server import RankServer, ServerError\n"
        "server = RankServer(needs=())\nserver._optional = ()\n"
        "try: server.load_ops(['NoSuchOpBuilder'])\nexcept ServerError: pass\n"
        "finally: server.close()\n"
    )
    subprocess.run(
        [sys.executable, "-P", "-c", code],
        check=False,
        env=environment(TORCH_EXTENSIONS_DIR=str(folder / "extensions")),
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    what = "the lock of another build below the user's own TORCH_EXTENSIONS_DIR is deleted"
    attempts.append(tried(what, not foreign.exists()))

    attempts.append(
        not_tried("a neighbour takes the port that was free for rank 0", "a race of microseconds")
    )
    attempts.append(
        not_tried("clocks.sh waits on a process id that was given again", "read in the script")
    )
    return [*attempts, *_installing()]


def _installing() -> Iterator[Attempt]:
    what = "CI installs files whose hashes are not checked"
    if not (ROOT / ".ci" / "run").exists():
        yield not_tried(what, "this is no checkout of the repository")
        return
    done = finished(
        ["make", "--dry-run", "--always-make", "CI=true", "install"],
        cwd=ROOT,
        env={k: v for k, v in os.environ.items() if not k.startswith("MAKE")},
    )
    lines = [line for line in done.stdout.splitlines() if "pip install" in line]
    checked = [line for line in lines if "--require-hashes" in line]
    bare = [line for line in lines if "--require-hashes" not in line and "--no-deps" not in line]
    yield tried(what, not checked or bool(bare), f"{len(lines)} calls of pip")
    isolated = [line for line in lines if "--no-build-isolation" not in line and "-e" in line]
    what = "the build backend is whatever release is newest"
    pinned = "setuptools==" in (ROOT / "constraints.txt").read_text()
    yield tried(what, bool(isolated) or not pinned)


def ray_floor() -> Attempt:
    """Finding 2c: a Ray that knows no token is allowed."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    (wanted,) = [w for w in project["optional-dependencies"]["ray"] if w.startswith("ray")]
    found = re.search(r">=\s*(\d+)\.(\d+)", wanted)
    old = found is None or tuple(map(int, found.groups())) < (2, 52)
    return tried("a Ray older than 2.52, which knows no token, is allowed", old, wanted)
