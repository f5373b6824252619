"""Generated scripts: whatever names, values and paths hold, nothing of it is executed."""

from __future__ import annotations

import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from tests.support.commands import finished, write_program
from tests.support.scripts import CPU, GPU
from tests.support.studies import TOML, modelled_study, request, write_table
from tuner.cli.main import main
from tuner.deploy.launch_files import clocks_sh, write_launch_files
from tuner.problem.run_folder import STUDY_SCHEMA, RunFolder
from tuner.recordings.table import load_table
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError, InvalidValue, UnknownName
from tuner.search_spaces.job import load_job
from tuner.workload.records.probe import ProbeRequest
from tuner.workload.scripts.script_facts import ScriptFacts
from tuner.workload.scripts.script_job import ScriptJob

#: Pieces that leave a comment, a word or a quotation, and then make a file.
PIECES = (
    "\ntouch pwned\n",
    "\r\ntouch pwned\r\n",
    "\u2028touch pwned\u2029",
    "\x0btouch pwned\x85",
    "$(touch pwned)",
    "`touch pwned`",
    "${x:=$(touch pwned)}",
    "'; touch pwned; '",
    '"; touch pwned; "',
    '")); touch pwned; ((',
    '}"; touch pwned; #',
    ") ; touch pwned ; x=(",
    "; touch pwned;",
    "& touch pwned &",
    "| touch pwned",
    "> pwned",
    "-x",
    "--",
    "-",
    "\\",
    "'",
    '"',
    "$'\\n'",
    "#",
    "!!",
    "*",
    "~",
    " ",
    "\t",
    "\x1b[2J",
    "@CLOCKS@",
    "é",
    "\u202e",
)
hostile = st.lists(st.sampled_from(PIECES) | st.text("abc $`'\"\\\n;&|<>(){}=-", max_size=8)).map(
    "".join
)
any_word = hostile | st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"))
#: A folder's name: never empty, "." or "..", and short enough for a file system.
folder_names = hostile.map(lambda text: text[:50] + "x")

#: An example starts a dozen processes, so a failing one is shown as it was found.
NO_SHRINK = (Phase.explicit, Phase.reuse, Phase.generate)

STUBS = {
    "python": 'printf \'%s\\0\' "$@" > "$SHOWN"\n',
    "scontrol": "echo node1\n",
    "srun": 'printf \'%s\\0\' "$PWD" > "$SHOWN"\n',
    "nvidia-smi": 'case "$*" in *index*) seq 0 7;; *power.limit*) echo 400;; esac\n',
}


class Sandbox:
    """A folder with stand-ins for what the scripts start, to look for the canary in."""

    def __init__(self, top: Path) -> None:
        self.top, self.bin, self.shown = top, top / "bin", top / "shown"
        self.bin.mkdir()
        for name, text in STUBS.items():
            write_program(self.bin / name, "#!/bin/sh\n" + text)
        self.env = {
            "PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}",
            "HOME": str(top),
            "PYTHON": str(self.bin / "python"),
            "SHOWN": str(self.shown),
            "HEAD": "node1",
            "NODE_RANK": "0",
            "HOSTFILE": "hosts",
            "SLURM_JOB_NODELIST": "node1",
            "SLURM_CPUS_ON_NODE": "96",
        }

    def run(self, script: Path, *words: str) -> list[str]:
        """Parse and run a script; what it started was given these words."""
        # An absolute path, as a leading dash of a relative one would be an option of bash.
        parsed = finished(["bash", "-n", script])
        assert (parsed.returncode, parsed.stderr) == (0, ""), script.read_text()
        self.shown.unlink(missing_ok=True)
        done = finished(["bash", script, *words], cwd=self.top, env=self.env, timeout=60)
        assert not list(self.top.rglob("pwned*")), script.read_text()
        assert done.returncode == 0, done.stderr
        return self.shown.read_bytes().decode().split("\0")[:-1] if self.shown.exists() else []


def only_comments_before_set(text: str) -> bool:
    lines = text.split("\n")
    return all(line.startswith("#") for line in lines[: lines.index("set -euo pipefail")])


@pytest.mark.parametrize("cluster", [CPU, GPU], ids=["cpu", "gpu"])
@settings(max_examples=6, deadline=None, phases=NO_SHRINK)
@given(name=hostile, knob=hostile, value=hostile, word=any_word, out=folder_names, cache=hostile)
def test_scripts_of_a_job(
    cluster: Cluster, name: str, knob: str, value: str, word: str, out: str, cache: str
) -> None:
    launch = {"data_parallel": 2, knob or "k": value}
    live = {"clock_MHz": 1200} if cluster is GPU else {}
    configuration = Configuration(Settings(launch), Settings(live))
    job = replace(load_job("tiny-gpt"), name=name)
    with tempfile.TemporaryDirectory() as top, pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", f"{top}/{cache}")
        patch.delenv("TORCH_EXTENSIONS_DIR", raising=False)
        sandbox = Sandbox(Path(top))
        folder = Path(top) / out
        write_launch_files((configuration, job, cluster), folder, script=["my train.py", word])
        words = sandbox.run(folder / "launch.sh")
        start = words.index("my train.py")
        assert words[start + 1 :] == [word, "--deepspeed_config", "ds_config.json"]
        assert only_comments_before_set((folder / "launch.sh").read_bytes().decode())
        assert sandbox.run(folder / "job.sbatch") == [str(folder.resolve())]
        assert only_comments_before_set((folder / "job.sbatch").read_bytes().decode())
        words = sandbox.run(folder / "clocks.sh", str(folder / "launch.sh"))
        assert word in words


@settings(max_examples=6, deadline=None, phases=NO_SHRINK)
@given(name=hostile, word=any_word, out=folder_names, cwd=folder_names)
def test_scripts_of_a_users_script(name: str, word: str, out: str, cwd: str) -> None:
    with tempfile.TemporaryDirectory() as top:
        sandbox = Sandbox(Path(top))
        folder, start_in = Path(top) / "out" / out, Path(top) / "in" / cwd
        start_in.mkdir(parents=True)
        job = ScriptJob(
            name=name,
            model={},
            sequence_length=0,
            global_batch=8,
            steps=10,
            words=("train.py", word),
            cwd=str(start_in),
            devices=2,
            frame=ScriptFacts(reads=("micro_batch",), config={"train_batch_size": 8}),
        )
        write_launch_files((Configuration.of(data_parallel=2), job, CPU), folder)
        words = sandbox.run(folder / "launch.sh")
        assert "train.py" in words
        assert word in words
        assert sandbox.run(folder / "job.sbatch") == [str(folder.resolve())]


@settings(max_examples=10, deadline=None, phases=NO_SHRINK)
@given(names=st.lists(hostile, min_size=1, max_size=2), value=hostile)
def test_clocks_sh_of_any_live_settings(names: list[str], value: str) -> None:
    """What a record holds, without the check of `write_launch_files` before it."""
    live = Settings(dict.fromkeys(names, value))
    with tempfile.TemporaryDirectory() as top:
        sandbox = Sandbox(Path(top))
        script = Path(top) / "clocks.sh"
        script.write_text(clocks_sh(Configuration(Settings(), live), 1), newline="")
        sandbox.run(script, "python", "started")
        lines = script.read_bytes().decode().split("\n")
        assert all(line.startswith("#") for line in lines[: lines.index("set -uo pipefail")])


@pytest.mark.parametrize(
    ("live", "error"),
    [
        ({"note; touch pwned": 1}, UnknownName),
        ({"micro_batch": 2}, InputError),
        ({"clock_MHz": "1; touch pwned"}, InvalidValue),
        ({"clock_MHz": ("1", "$(touch pwned)")}, InvalidValue),
    ],
)
def test_live_settings_must_be_of_live_knobs(live: dict, error: type, tmp_path: Path) -> None:
    launch = Configuration(Settings(data_parallel=2), Settings(live)), load_job("tiny-gpt"), CPU
    with pytest.raises(error):
        write_launch_files(launch, tmp_path / "out")
    assert not (tmp_path / "out").exists()


# What is read.

NOT_PLAIN = ["\n", "\r", "\x00", "\x1b", "\x7f", "\x85", "\x9b", "\u2028", "\u2029", "\u202e"]


@pytest.mark.parametrize("character", NOT_PLAIN)
def test_a_record_with_control_characters_is_refused(character: str) -> None:
    good = request().to_json()
    for half in ("launch", "live"):
        for setting in ({f"a{character}b": 1}, {"a": f"x{character}"}, {"a": ["x", character]}):
            bad = {**good, half: [setting] if half == "live" else setting}
            with pytest.raises(InvalidValue, match="without line breaks"):
                ProbeRequest.from_json(bad)
    with pytest.raises(InputError, match="without line breaks"):
        Configuration.from_json({"launch": {f"a{character}": 1}})


@pytest.mark.parametrize("character", ["\n", "\x1b", "\u2028"])
def test_a_table_with_control_characters_is_refused(character: str, tmp_path: Path) -> None:
    folder = write_table(tmp_path / "t")
    csv, toml = folder / "table.csv", folder / "table.toml"
    rows = csv.read_text()
    csv.write_text(rows.replace("\n1,", f'\n"1{character}1",', 1), newline="")
    with pytest.raises(InvalidValue, match=r"shape in line \d+ of .*table.csv"):
        load_table(folder)
    csv.write_text(rows.replace("shape", f'"sh{character}ape"', 1), newline="")
    toml.write_text(TOML.replace('"shape"', json.dumps(f"sh{character}ape")))
    with pytest.raises(InvalidValue, match="a column's name"):
        load_table(folder)
    csv.write_text(rows)
    text = json.dumps(f"x{character}")
    for line in (text, f'"made-up"\nbaseline = {{shape = {text}}}'):
        toml.write_text(TOML.replace('"made-up"', line))
        with pytest.raises(InvalidValue, match="without line breaks"):
            load_table(folder)


def test_a_study_with_control_characters_is_refused(tmp_path: Path) -> None:
    run = RunFolder(tmp_path)
    run.write_study({"schema": STUDY_SCHEMA, "baseline": {"configuration": "a=1\nid"}})
    with pytest.raises(InvalidValue, match=r"a text of \[baseline\]"):
        run.read_study()
    run.write_study({"schema": STUDY_SCHEMA, "baseline": {"configuration": "a=1"}})
    assert run.read_study()


@pytest.mark.parametrize("name", ["note\ntouch pwned\n#", "note; touch pwned"])
def test_a_planted_live_knob_is_refused_in_a_sentence(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = Path(modelled_study(tmp_path / "runs", max_probes=2).run_dir)
    trace = run / "trace" / "probes.jsonl"
    records = [json.loads(line) for line in trace.read_text().splitlines()]
    for record in records:
        record["request"]["live"] = [{name: 1}]
        for measurement in record["measurements"]:
            measurement["live"] = {name: 1}
    trace.write_text("".join(json.dumps(record) + "\n" for record in records))
    out = tmp_path / "out"
    capsys.readouterr()
    assert main(["apply", str(run), "--point", "1", "--out", str(out)]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "knob" in error
    assert not out.exists()
