"""What the commands print of others' words: no control character reaches the terminal."""

from __future__ import annotations

import contextlib
import fcntl
import io
import json
import logging
import os
import pty
import re
import struct
import subprocess
import sys
import termios
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.support.commands import finished
from tests.support.studies import TOML, record, write_table
from tuner.cli import main as cli
from tuner.cli.main import main
from tuner.cli.options import fitted
from tuner.deploy import train
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Settings
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import load_job
from tuner.search_spaces.safe_files import write_text
from tuner.terminal import VisibleStream, raw_stream, visible
from tuner.workload.records.probe import Failure, ProbeRequest
from tuner.workload.records.trace import TraceWriter

#: A window title ended by BEL, a cleared screen, a colour by the C1 introducer, a link, a new line
#: over the old one.
HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31m\x1b]8;;mailto:a\x1b\\click\x1b]8;;\x1b\\ \rX\x08"


def assert_clean(*texts: str) -> None:
    for text in texts:
        assert not re.search("[\x00-\x08\x0b-\x1f\x80-\x9f]", text), repr(text)


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch) -> Command:
    """Run a command in this process: (exit code, standard output, standard error)."""

    def run(*words: str) -> tuple[int, str, str]:
        out, err = io.BytesIO(), io.BytesIO()
        with monkeypatch.context() as patch:
            # Bytes that are no UTF-8 come through, as in the C locale.
            for name, stream in (("stdout", out), ("stderr", err)):
                coded = io.TextIOWrapper(stream, "utf-8", errors="surrogateescape")
                patch.setattr(sys, name, coded)
            patch.setattr(sys, "excepthook", sys.excepthook)
            try:
                code = main(list(words))
            except SystemExit as ended:
                code = int(ended.code or 0)
            sys.stdout.flush()
            sys.stderr.flush()
            return code, *(s.getvalue().decode(errors="surrogateescape") for s in (out, err))

    return run


def test_each_control_is_shown_and_nothing_else_is_changed() -> None:
    assert visible("a\tb\nµ €") == "a\tb\nµ €"
    assert visible("\x1b[2J\x07\r\x9b\x00") == r"\x1b[2J\x07\x0d\x9b\x00"
    assert visible("\udc9b\ud800") == r"\x9b\ud800"
    every = "".join(map(chr, [*range(0x20), *range(0x80, 0xA0)]))
    assert_clean(visible(every))


@pytest.mark.parametrize("more", [(), ("--json",)])
def test_a_table_whose_name_holds_controls(
    command: Command, tmp_path: Path, more: tuple[str, ...]
) -> None:
    table = write_table(tmp_path / "table", toml=TOML.replace('"made-up"', json.dumps(HOSTILE)))
    runs = ["--runs-dir", str(tmp_path / "runs")]
    code, out, err = command("replay", str(table), "--name", "r", "--max-probes", "3", *runs, *more)
    assert code == 2
    assert r"\x1b" in err
    assert_clean(out, err)


def test_a_failure_in_a_trace_and_a_knobs_value(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "runs" / "r" / "trace" / "probes.jsonl"
    with TraceWriter(path) as writer:
        writer.append(record("p0000", measurements=(), failure=Failure("crash", HOSTILE)))
        launch = Settings(data_parallel=2, micro_batch=4, note=HOSTILE)
        asked = ProbeRequest("p0001", launch, (Settings(),))
        writer.append(record("p0001", request=asked))
    monkeypatch.chdir(tmp_path)
    for words in (
        ("show", "r"),
        ("compare", "r"),
        ("replay", str(path), "--max-probes", "2"),
    ):
        _, out, err = command(*words)
        assert out + err
        assert_clean(out, err)


@pytest.mark.slow  # two processes import torch and DeepSpeed
@pytest.mark.real
def test_a_scripts_exception(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    script = tmp_path / "train.py"
    script.write_text(f"import torch, torch.distributed\nraise RuntimeError({HOSTILE!r})\n")
    code, out, err = command(
        "dev", "probe", "--script", str(script), "--steps", "5", "--global-batch", "4"
    )
    assert code in (1, 2)
    assert "RuntimeError: " in err
    assert "owned" not in out + err  # the title of a window is no part of a cause
    assert_clean(out, err)


@pytest.mark.parametrize(
    "words", [("optimize", f"{HOSTILE}.toml"), ("show", "--x" + HOSTILE.replace(" ", ""))]
)
def test_names_of_files_and_arguments(tmp_path: Path, words: tuple[str, ...]) -> None:
    """In a process of its own, as the others could be."""
    (tmp_path / f"{HOSTILE}.toml").write_text("steps = ")
    done = subprocess.run(
        [sys.executable, "-m", "tuner.cli.main", *words], capture_output=True, cwd=tmp_path
    )
    assert done.returncode == 2
    assert_clean(done.stdout.decode(), done.stderr.decode())


def test_a_file_name_that_is_not_utf8(
    command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    table = write_table(tmp_path / "table", shapes=(1, 2))
    runs = os.fsdecode(b"\x9b31mred")
    code, out, err = command(
        "replay", str(table), "--max-probes", "2", "--quiet", "--runs-dir", runs
    )
    assert code == 0, err
    assert r"\x9b31mred" in out
    assert_clean(out, err)
    assert "\udc9b" not in out + err


def test_warnings_logs_and_tracebacks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)  # put back at the end

    def fault(argv: object) -> int:
        handler = logging.StreamHandler()
        logging.getLogger("joulefront.test").addHandler(handler)
        logging.getLogger("joulefront.test").warning(HOSTILE)
        logging.getLogger("joulefront.test").removeHandler(handler)
        with warnings.catch_warnings(record=False):
            warnings.simplefilter("always")
            sys.stderr.write(warnings.formatwarning(HOSTILE, UserWarning, "x.py", 1))
        print(HOSTILE)
        raise ZeroDivisionError(HOSTILE)

    monkeypatch.setattr(cli, "_main", fault)
    streams = sys.stdout, sys.stderr
    with pytest.raises(ZeroDivisionError) as caught:
        main([])
    assert (sys.stdout, sys.stderr) == streams
    sys.excepthook(caught.type, caught.value, caught.tb)
    out, err = capsys.readouterr()
    assert out.count(r"\x1b[2J") == 1
    assert err.count(r"\x1b[2J") >= 3
    assert_clean(out, err)


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize(("stream", "raw"), [(io.StringIO, True), (_Terminal, False)])
def test_training_output_is_changed_at_a_terminal_only(
    stream: type[io.StringIO], raw: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    got: list[Any] = []

    class Enough(Exception):
        pass

    def taken(*_: Any, output: Any, **__: Any) -> None:
        got.append(output)
        raise Enough

    monkeypatch.setattr(train, "train", taken)
    monkeypatch.setattr("tuner.api.load_result", lambda *_, **__: SimpleNamespace(job=None))
    monkeypatch.setattr(sys, "stdout", stream())
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "study.toml").touch()
    with pytest.raises(Enough):
        main(["run", "some", "--runs-dir", str(tmp_path)])
    (output,) = got
    assert isinstance(output, VisibleStream) is not raw
    assert raw_stream(output) is sys.stdout


@pytest.mark.slow
def test_an_answer_fits_into_a_terminal_of_80_columns(tmp_path: Path) -> None:
    table, runs = write_table(tmp_path / "t"), str(tmp_path / "runs")
    lead, follow = pty.openpty()
    fcntl.ioctl(follow, termios.TIOCSWINSZ, struct.pack("HHHH", 24, 80, 0, 0))
    words = ["replay", str(table), "--name", "r", "--max-probes", "6", "--runs-dir", runs]
    code = f"from tuner.cli.main import main; raise SystemExit(main({[*words, '--quiet']!r}))"
    env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
    done = subprocess.Popen([sys.executable, "-c", code], stdout=follow, env=env)
    os.close(follow)
    text = b""
    with contextlib.suppress(OSError):  # the end of a pty
        while part := os.read(lead, 4096):
            text += part
    assert done.wait() == 0
    plain = re.sub(r"\x1b\[[\d;]*m", "", text.decode())
    lines = plain.splitlines()
    assert [x for x in lines if len(x) > 80 and "report.html" not in x] == []
    assert "\x1b[1;32m> recommended" in text.decode()
    assert f"\n{' ' * 46}" not in plain  # no row of the table is broken
    assert "…" not in text.decode()
    assert len(lines) <= 20


def test_what_is_fitted_into_a_terminal_loses_nothing() -> None:
    failed = "Failed: p0003: crash: RuntimeError:  expected  scalar type Half  but found Float in x"
    parts = fitted(failed, 40)
    assert max(map(len, parts)) <= 40
    assert " ".join(parts).split() == failed.split()
    assert fitted("  a row  of a table", 80) == ["  a row  of a table"]
    assert fitted("> a row  10 s  dp2 mb16 zero1", 26) == [
        "> a row  10 s  dp2 mb16",
        " " * 15 + "zero1",
    ]


ROOT = Path(__file__).resolve().parents[2]
TUNER = f"{sys.executable} -c 'import sys, tuner.cli.main as m; sys.exit(m.main(sys.argv[1:]))'"


@pytest.mark.parametrize("words", ["list knobs", "list jobs --json", "--version"])
@pytest.mark.parametrize(
    ("to", "code", "error"),
    [
        ("> /dev/full", 1, "tuner: the output cannot be written: No space left on device\n"),
        (">&-", 0, ""),
        (">&- 2>&-", 0, ""),
    ],
)
def test_a_full_or_closed_output_is_one_sentence(
    words: str, to: str, code: int, error: str, tmp_path: Path
) -> None:
    done = finished(["sh", "-c", f"{TUNER} {words} {to}"], cwd=tmp_path, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (code, "", error)


#: Commands and their exit codes: an answer, one that is not a success, and bad input.
CODES = {
    "list knobs": 0,
    "list knobs --json": 0,
    "--help": 0,
    "fit qwen2.5-7b dp8 mb2 zero1 --cluster a100-40gb-8": 3,
    "list nonsense": 2,
    "show nowhere": 2,
    "nonsense": 2,
}


@pytest.mark.parametrize(
    ("words", "code", "gone"),
    [
        *((words, code, (1, 2)) for words, code in CODES.items()),
        ("list knobs", 0, (1,)),
        ("nonsense", 2, (2,)),
    ],
)
def test_a_reader_that_is_gone_changes_no_exit_code(
    words: str, code: int, gone: tuple[int, ...], tmp_path: Path
) -> None:
    reads, writes = os.pipe()
    os.close(reads)
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    streams |= {{1: "stdout", 2: "stderr"}[number]: writes for number in gone}
    env = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    done = subprocess.run(
        [sys.executable, "-m", "tuner.cli", *words.split()],
        cwd=tmp_path,
        env={**env, "PYTHONPATH": str(ROOT)},
        text=True,
        check=False,
        **streams,
    )
    os.close(writes)
    assert done.returncode == code
    assert "Traceback" not in (done.stderr or "")
    assert "Exception ignored" not in (done.stderr or "")
    assert not (code == 2 and done.stderr == "")


def test_full_standard_error_changes_no_exit_code(tmp_path: Path) -> None:
    done = subprocess.run(["sh", "-c", f"{TUNER} nonsense 2>/dev/full"], cwd=tmp_path, check=False)
    assert done.returncode == 2


def test_files_get_no_number_of_a_closed_stream(tmp_path: Path) -> None:
    code = (
        "import os; from tuner.terminal import visible_streams\n"
        "with visible_streams(): file = open('kept', 'w'); os.write(2, b'of a library')\n"
    )
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    line = f'{sys.executable} -c "{code}" <&- >&- 2>&-'
    subprocess.run(["sh", "-c", line], cwd=tmp_path, env=env, check=True)
    assert (tmp_path / "kept").read_text() == ""


def test_a_folder_as_the_file_of_an_export_is_one_sentence(tmp_path: Path) -> None:
    for place in (".", "/", str(tmp_path)):
        with pytest.raises(IsADirectoryError, match="name a file in it"):
            write_text(place, "x")


@pytest.mark.parametrize("character", ["\\u001b]0;x\\u0007", "\\n#SBATCH --x", "\\u202e"])
def test_a_name_for_scripts_is_plain_text(character: str, tmp_path: Path) -> None:
    """A name stands in launch.sh, job.sbatch and README.txt, which people read by `cat`."""
    job, cluster = tmp_path / "job.toml", tmp_path / "cluster.toml"
    job.write_text(
        f'name = "a{character}"\nsequence_length = 64\nglobal_batch = 8\nsteps = 100\n'
        '[model]\nconfig = "tiny-gpt"\n'
    )
    cluster.write_text(f'name = "a{character}"\ndevice = "A100-SXM-80GB"\n')
    for load, path in ((load_job, job), (load_cluster, cluster)):
        with pytest.raises(InputError, match="without line breaks, control or direction"):
            load(str(path))
