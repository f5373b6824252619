"""The command: exit codes, one sentence for bad input, and what it prints."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.support.commands import finished
from tests.support.in_process import answered as run
from tests.support.studies import record, run_replay, write_table
from tuner.cli.parser import GROUPS
from tuner.workload.records.trace import TraceWriter, read_trace

pytestmark = pytest.mark.usefixtures("next_candidates")


@pytest.fixture(autouse=True)
def own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def table(tmp_path):
    return str(write_table(tmp_path / "table"))


def python(code: str, **more) -> subprocess.CompletedProcess:
    script = textwrap.dedent(code)
    return finished([sys.executable, "-c", script], **more)


# Bad input: one sentence, exit code 2, nothing lost.


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["optimize", "--frobnicate"], "frobnicate"),
        (["frobnicate"], "frobnicate"),
        (["optimize", "--max-probes", "many"], "max-probes"),
        (["optimize", "tiny-gpt", "--executor", "cloud"], "inline"),
        (["optimize", "tiny-gpt", "--name", "a/b"], "letters"),
        (["optimize", "tiny-gpt", "--cluster", "cpu-2", "--storage", "nonsense"], "URL"),
        (["dev", "probe", "frobnicate=1"], "data_parallel"),
        (["dev", "probe", "--cluster", "cpu-2", "data_parallel=4"], "2"),
        (["dev", "probe", "--cluster", "cpu-2", "micro_batch=large"], "integer"),
        (["dev", "probe", "one", "two"], "second job"),
        (["replay", "nowhere"], "table.toml"),
        (["dashboard", "nowhere"], "unknown run"),
    ],
)
def test_bad_input_is_one_sentence_and_exit_code_2(capsys, tmp_path, words, told):
    code, out, err = run(capsys, *words)
    assert code == 2
    assert out == ""
    (line,) = err.strip().splitlines()
    assert line.startswith("tuner")
    assert told in line
    assert not list(tmp_path.rglob("probes.jsonl"))


@pytest.mark.usefixtures("no_report")
def test_a_truncated_trace_is_replayed_and_said(capsys, tmp_path):
    path = tmp_path / "probes.jsonl"
    with TraceWriter(path) as writer:
        writer.append(record("p0000"))
        writer.append(record("p0001"))
    path.write_bytes(path.read_bytes()[:-40])
    before = path.read_bytes()
    code, _, err = run(capsys, "replay", path)
    assert code == 0
    assert "truncated" in err
    assert path.read_bytes() == before


def test_a_broken_trace_names_its_line(capsys, tmp_path):
    path = tmp_path / "probes.jsonl"
    with TraceWriter(path) as writer:
        writer.append(record())
    path.write_bytes(b"{broken\n" + path.read_bytes())
    code, _, err = run(capsys, "replay", path)
    assert code == 2
    assert "line 1" in err


# Answers.


@pytest.mark.searches
@pytest.mark.usefixtures("no_report")
def test_replay_tells_progress_on_stderr_and_the_answer_on_stdout(capsys, table):
    code, out, err = run(
        *(capsys, "replay", table, "--max-probes", 5, "--budget", "9kJ", "--name", "r"),
        *("--log-file", "search.log"),
    )
    assert code == 0
    probes = [line for line in err.splitlines() if re.match(r"\d\d:\d\d:\d\d p00", line)]
    assert len(probes) == 5
    for line in probes:
        assert re.search(r"  shape=\d .*/step  .*/step  .*  \d/5  front \d", line)
    steps = ("probing shape=", "measured at speed=", "kJ spent", "front so far")
    assert not any(part in err for part in steps)
    log = Path("search.log").read_text()
    assert all(part in log and " INFO " in log for part in steps)
    _, _, told = run(capsys, "replay", table, "--max-probes", 2, "--name", "v", "-v")
    assert all(part in told for part in steps)
    assert run(capsys, "replay", table, "--max-probes", 2, "--name", "q", "-q")[2] == ""
    assert run(capsys, "replay", table, "--log-file", "no/where.log")[0] == 2
    for part in ("today", "recommended", "Spent:", "Next: tuner show r", "runs/r/report.html"):
        assert part in out
    assert len(out.strip().splitlines()) <= 14
    _, out, _ = run(capsys, "show", "r")
    for part in ("Front of r", "Choice: Fastest within", "Spent:", "Today:"):
        assert part in out
    assert Path("runs/r/report.html").is_file()


@pytest.mark.usefixtures("no_report")
def test_quiet_tells_only_the_answer(capsys, table):
    code, out, err = run(capsys, "replay", table, "--max-probes", 3, "--quiet")
    assert (code, err) == (0, "")
    assert "Next: the same command with --name replay-made-up" in out


@pytest.mark.usefixtures("no_report")
def test_json_is_the_whole_answer(capsys, table):
    code, out, _ = run(capsys, "replay", table, "--max-probes", 4, "--json", "--name", "r")
    assert code == 0
    answer = json.loads(out)
    assert answer["choice"]["rule"] == "better-in-both"
    assert answer["front"]
    assert answer["spent"]["probes"] == 4
    code, out, _ = run(capsys, "show", "r", "--json")
    assert json.loads(out)["front"][0]["configuration"] == answer["front"][0]["configuration"]


def test_front_report_and_apply_answer_from_the_folder(capsys, two_runs, tmp_path, monkeypatch):
    monkeypatch.chdir(two_runs.parent)
    code, out, _ = run(capsys, "show")
    assert code == 0
    assert "Front of r2" in out
    code, out, _ = run(capsys, "show", "--html", "r", "--out", tmp_path / "page.html")
    assert code == 0
    assert (tmp_path / "page.html").stat().st_size > 1000
    keys = [p["configuration"] for p in json.loads(run(capsys, "show", "r", "--json")[1])["points"]]
    key = " | ".join(
        " ".join(f"{name}={value}" for name, value in half.items()) for half in keys[0].values()
    )
    code, out, _ = run(capsys, "compare", "r", key, "best")
    assert code == 0
    assert out.startswith(f"from  {key.replace(' | ', ' ')}\nto    ")
    assert "step time: " in out
    assert run(capsys, "compare", "r", "nothing")[0] == 2
    code, _, err = run(capsys, "apply", "r")
    assert code == 2  # a recorded table has no job to start
    assert "job" in err


@pytest.mark.usefixtures("no_report")
def test_estimated_figures_say_so(capsys, tmp_path):
    with TraceWriter(tmp_path / "probes.jsonl") as writer:
        for i in range(3):
            writer.append(record(f"p{i:04d}"))
    _, out, err = run(capsys, "replay", tmp_path / "probes.jsonl")
    for line in (out + err).splitlines():
        if " W" in line and "fitted" not in line and "|" not in line:
            table = line.lstrip().startswith(("front", "time")) or line.startswith("    ")
            assert "estimated" in line or table or "%" in line or "to solution" in line, line
    assert "energy, estimated" in out


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["list"], ["tuner list jobs"]),
        (["list", "jobs"], ["tiny-gpt"]),
        (["list", "clusters"], ["cpu-2"]),
        (["list", "jobs", "opt-350m"], ["sequence_length  2048", "precision        bf16"]),
        (["list", "spaces", "default"], ["name   default"]),
        (["list", "knobs", "nccl"], ["nccl: ", "  NCCL_ALGO "]),
        (["list", "frameworks", "torchtitan"], ["torchtitan"]),
    ],
)
def test_a_kind_or_one_of_it_is_listed(capsys, words, lines):
    code, out, _ = run(capsys, *words)
    assert code == 0
    for line in lines:
        assert f"\n{line}" in f"\n{out}"
    assert "\ndeepspeed-buckets: " not in out


def test_the_help_of_all_commands_has_seventeen_in_five_groups(capsys):
    code, out, _ = run(capsys)
    assert code == 0
    assert run(capsys, "--help")[:2] == (0, out)
    assert sum(line.startswith("  ") for line in out.partition("options:")[0].splitlines()) == 17
    for title, names in GROUPS.items():
        assert f"\n{title}:\n  {names[0]} " in out
    assert max(map(len, out.partition("exit codes:")[0].splitlines())) <= 100
    assert run(capsys, "dev")[1] == run(capsys, "dev", "--help")[1]


@pytest.fixture(scope="module")
def two_runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("two")
    for name, probes in (("r", 4), ("r2", 3)):
        table = write_table(folder / f"table-{name}")
        options = {"runs_dir": folder / "runs", "report": False, "progress": False}
        run_replay(table, name=name, max_probes=probes, **options)
    return folder / "runs"


def test_two_points_or_two_runs_are_compared(capsys, two_runs):
    def compared(*words):
        return run(capsys, "compare", *words, "--runs-dir", two_runs)

    assert "to    r2: " in compared("r", "r2")[1]
    found = json.loads(compared("r", "r2", "--json")[1])
    assert (found["a"][:3], found["b"][:4]) == ("r: ", "r2: ")
    assert compared("r", "today", "1") == compared("r", "1")
    both = compared("1", "2")  # points of the latest run
    assert both[0] == 0
    assert "no run is named; the latest in " in both[2]
    assert both[1] == compared("r2", "1", "2")[1]
    for words, told in (
        (("r", "1", "2", "3"), "two runs, or a run and at most two of its points"),
        (("r", "r3"), "unknown measured point 'r3'"),
        (("rr",), "unknown measured point 'rr'"),
    ):
        code, out, err = compared(*words)
        assert (code, out) == (2, "")
        assert told in err


def test_a_word_that_is_a_run_and_a_point_is_refused(capsys, two_runs, tmp_path):
    runs = tmp_path / "runs"
    shutil.copytree(two_runs, runs)
    (runs / "r2").rename(runs / "today")
    code, _, err = run(capsys, "compare", "r", "today", "--runs-dir", runs)
    assert code == 2
    assert f"'today' is a run and a point of run 'r': write {runs}/today for the run, or" in err
    assert "from  r: " in run(capsys, "compare", "r", runs / "today", "--runs-dir", runs)[1]
    assert run(capsys, "compare", "r", "today", "1", "--runs-dir", runs)[0] == 0


# Light feet.


def test_a_probe_needs_neither_ray_nor_optuna(tmp_path):
    code = """
        import sys
        for name in ("ray", "optuna", "sklearn", "plotly"):
            sys.modules[name] = None
        import tuner.workload.node.runner
        from tests.support.studies import record
        class Fake:
            def __init__(self, job, cluster, **more): self.meter = record().meter
            def run(self, asked): return record(request=asked)
            def prepare(self): pass
            def close(self): pass
        tuner.workload.node.runner.LocalRunner = Fake
        from tuner.cli.main import main
        words = "dev probe --cluster cpu-2 data_parallel=2 micro_batch=4 --json"
        sys.exit(main(words.split()))
    """
    # study_tools models with the analytic model, which is NumPy alone.
    root = str(Path(__file__).parents[2])
    ended = python(code, cwd=tmp_path, env={**os.environ, "PYTHONPATH": root})
    assert ended.returncode == 0, ended.stderr
    answer = json.loads(ended.stdout)
    assert {"data_parallel": 2, "micro_batch": 4}.items() <= answer["request"]["launch"].items()
    assert answer["meter"]["estimated"] is True
    (trace,) = tmp_path.rglob("probes.jsonl")
    assert len(read_trace(trace).records) == 1


def test_a_failed_probe_is_exit_code_1_with_its_log(capsys, monkeypatch):
    import tuner.workload.node.runner
    from tuner.workload.records.probe import Failure

    class Fake:
        meter = record().meter

        def __init__(self, *arguments, **more):
            pass

        def prepare(self):
            pass

        def run(self, asked):
            failure = Failure("out_of_memory", "rank 1 ran out of memory", "line one\nKilled")
            return record(request=asked, measurements=(), failure=failure)

        def close(self):
            pass

    monkeypatch.setattr(tuner.workload.node.runner, "LocalRunner", Fake)
    code, out, _ = run(capsys, "dev", "probe", "--cluster", "cpu-2", "micro_batch=1")
    assert code == 1
    assert "failed: out of memory: rank 1 ran out of memory" in out
    assert "| Killed" in out


@pytest.mark.usefixtures("no_report")
@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_an_interrupt_is_exit_code_130_and_says_how_to_go_on(
    capsys, monkeypatch, tmp_path, table, how
):
    from tuner.recordings.table import TableRunner

    trace = tmp_path / "runs" / "cut" / "trace" / "probes.jsonl"
    answer = TableRunner.run

    def interrupted(self, request):
        if request.probe_id == "p0002":
            signal.raise_signal(how)
        return answer(self, request)

    monkeypatch.setattr(TableRunner, "run", interrupted)
    code, _, err = run(capsys, "replay", table, "--name", "cut")
    assert code == 130
    assert "--name cut" in err.strip().splitlines()[-1]
    assert len(read_trace(trace).records) == 2
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    words = "--name cut --max-probes 3 --json --quiet"
    code, out, _ = run(capsys, "replay", table, *words.split())
    assert code == 0
    assert json.loads(out)["spent"]["probes"] == 3
