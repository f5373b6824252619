"""What files make run is shown, and asked for, before anything of it starts."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import pytest

from tuner.cli.main import main
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.fields import one_line, shown_word
from tuner.search_spaces.knob_declarations import Knob, pack_names
from tuner.terminal import visible
from tuner.workload.scripts.frameworks import load_drivers, shipped_drivers, starts_of
from tuner.workload.scripts.frameworks.driver import read_driver
from tuner.workload.scripts.script_job import ScriptJob
from tuner.workload.scripts.user_code import can_run_code, of_files, of_run

DATA = Path(__file__).resolve().parents[1] / "data"
KNOB = """
[{section}knobs.library]
values = ["Ring"]
how = "env:NCCL_ALGO"
"""
DRIVER = """
framework = "mine"
[recognise]
imports = ["torch"]
[probe.env]
NCCL_NET_PLUGIN = "/x.so"
"""


class Started(Exception):
    """What would have started."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    def started(*args: Any, **more: Any) -> None:
        raise Started

    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tuner.api.search_for", started)
    monkeypatch.setattr("tuner.deploy.train.train", started)
    (tmp_path / "train.py").write_text("import torch\n")
    (tmp_path / "knobs.toml").write_text(KNOB.format(section=""))
    (tmp_path / "driver.toml").write_text(DRIVER)
    (tmp_path / "job.toml").write_text(
        'name = "mine"\nsequence_length = 64\nglobal_batch = 8\nsteps = 100\n'
        '[model]\nconfig = "tiny-gpt"\n'
        '[knobs.plugin]\nvalues = ["/x.so"]\nhow = "env:NCCL_TUNER_PLUGIN"\n'
    )
    return tmp_path


ASKED = [
    (["tiny-gpt", "--knobs", "knobs.toml"], "library: NCCL_ALGO=Ring"),
    (["--framework", "driver.toml", "--", "train.py"], "mine: NCCL_NET_PLUGIN=/x.so"),
    (["job.toml"], "plugin: NCCL_TUNER_PLUGIN=/x.so"),
]


@pytest.mark.parametrize(("words", "shown"), ASKED)
def test_without_a_terminal_trust_is_an_option(
    words: list[str], shown: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["optimize", *words]) == 2
    error = capsys.readouterr().err
    assert shown in error
    assert "add --trust" in error
    with pytest.raises(Started):
        main(["optimize", "--trust", *words])
    assert shown in capsys.readouterr().err


@pytest.mark.parametrize("answer", ["y\n", "YES\n", "\n", "n\n", "yellow\n", ""])
def test_at_a_terminal_a_yes_is_needed(
    answer: str, folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = io.StringIO(answer)
    monkeypatch.setattr(typed, "isatty", lambda: True)
    monkeypatch.setattr("sys.stdin", typed)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    words = ["optimize", *ASKED[0][0]]
    if answer.strip().lower() in ("y", "yes"):
        with pytest.raises(Started):
            main(words)
    else:
        assert main(words) == 2
        assert capsys.readouterr().err.endswith("nothing was started\n")


@pytest.mark.parametrize(
    "words",
    [
        ["tiny-gpt", *(word for name in pack_names() for word in ("--knobs", name))],
        ["tiny-gpt", "--knob", "env:NCCL_ALGO=Ring,Tree"],
        ["tiny-gpt", "--knobs", "knobs.toml", "--executor", "simulated"],
        ["--knobs", "framework", "--", "train.py"],
    ],
)
def test_what_is_shipped_typed_or_not_started_is_not_asked_about(
    words: list[str], folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(Started):
        main(["optimize", *words])
    assert not capsys.readouterr().err


@pytest.mark.parametrize(("words", "shown"), ASKED)
def test_a_dry_run_shows_it_and_asks_nothing(
    words: list[str], shown: str, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["optimize", "--dry-run", *words]) == 0
    said = capsys.readouterr()
    assert shown in said.out
    assert "[y/N]" not in said.err


def test_a_shipped_driver_is_ours_and_a_changed_one_is_not(tmp_path: Path) -> None:
    for driver in shipped_drivers():
        assert not list(starts_of(driver))
        assert not list(starts_of(read_driver(dict(driver.table), "a copy")))
    wrapped = next(driver for driver in shipped_drivers() if driver.wrapper)
    table = {**wrapped.table, "wrapper": {**wrapped.table["wrapper"], "search": ["evil.{module}"]}}
    assert any("evil.{module}" in str(phrase) for phrase in starts_of(read_driver(table, "x")))


def test_what_a_driver_sets_by_its_knobs_is_shown(tmp_path: Path) -> None:
    path = tmp_path / "d.toml"
    path.write_text(
        'framework = "mine"\n[recognise]\nimports = ["torch"]\n'
        '[knobs.micro_batch]\nkey = "env:PYTHONPATH"\n'
        '[knobs.compilation.levels.none]\n"a.b" = "call:evil:Class"\n"env:LD_PRELOAD" = "/x.so"\n'
        '[declared.more]\nkey = "env:BASH_ENV"\nvalues = ["/x.sh"]\n'
    )
    shown = "\n".join(map(str, starts_of(*load_drivers(path))))
    for part in ("PYTHONPATH=", "call:evil:Class", "LD_PRELOAD=/x.so", "BASH_ENV=/x.sh"):
        assert part in shown
    assert [*map(str, of_files([], path, None))] == shown.splitlines()


STRANGERS = """
[knobs.loader]
values = ["false", "true"]
kind = "flag"
how = "conf.json:trust_remote_code"
[knobs.name]
values = ["evil/model"]
how = "conf.json:model"
[knobs.algorithm]
values = ["Ring", "Tree"]
how = "env:NCCL_ALGO"
"""


def test_keys_that_run_code_need_more_than_a_yes(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "knobs.toml").write_text(STRANGERS)
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n"))
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    words = ["optimize", "--knobs", "knobs.toml", "--", "train.py", "conf.json"]
    assert main(words) == 2
    lines = capsys.readouterr().err.splitlines()
    assert "  loader: conf.json:trust_remote_code=false, true (can run code)" in lines
    assert "  name: conf.json:model=evil/model (can run code)" in lines
    assert "  algorithm: NCCL_ALGO=Ring, Tree" in lines
    assert lines[-1].endswith("add --trust if you trust it")
    with pytest.raises(Started):
        main([*words[:1], "--trust", *words[1:]])


CODE = [
    *(
        ("trust_remote_code", [True]),
        ("trust_remote_code", [1]),
        ("model.trustRemoteCode", ["yes"]),
    ),
    *(("model", ["gpt2"]), ("model_name_or_path", ["gpt2"]), ("tokenizer", ["x"])),
    *(("resume_from_checkpoint", ["x"]), ("checkpoint.folder", ["x"]), ("load_ckpt", [True])),
    *(("report_to", ["wandb"]), ("callbacks.0._target_", ["x.Y"]), ("plugin", ["x"])),
    *(("anything", ["call:evil:Class"]), ("anything", ["x.py"]), ("anything", ["https://a.b"])),
    *(("LD_PRELOAD", ["x"]), ("PYTHONSTARTUP", ["x"]), ("NCCL_NET_PLUGIN", ["x"]), ("CC", ["x"])),
    *(("load", ["x"]), ("loader.load_from", ["x"]), ("pretrained", ["x"]), ("init_from", ["x"])),
    *(("weights_only", ["false"]), ("attn", ["kernels-community/flash-attn"])),
]
PLAIN = [
    *(("trust_remote_code", ["false"]), ("trust_remote_code", [0]), ("report_to", ["none"])),
    *(("activation_checkpoint.mode", ["selective"]), ("gradient_checkpointing", [True])),
    *(("checkpoint.interval", [500]), ("NCCL_ALGO", ["Ring"]), ("bucket", [5e7, "1e6"])),
    *(("model.dtype", ["bfloat16"]), ("compile", [True]), ("profile", ["yes"]), ("attn", ["sdpa"])),
    *(("load_in_4bit", ["true"]), ("offload", ["cpu"]), ("dataloader.shuffle", ["true"])),
    *(("weights_only", ["true"]), ("OMP_NUM_THREADS", [4]), ("training.steps", [10])),
]


@pytest.mark.parametrize(("key", "values"), CODE)
def test_keys_and_values_that_can_run_code(key: str, values: list[Any]) -> None:
    assert can_run_code(key, values)
    assert can_run_code(key, [*values, "0" if key != "weights_only" else "true"])


@pytest.mark.parametrize(("key", "values"), PLAIN)
def test_keys_and_values_that_run_nothing(key: str, values: list[Any]) -> None:
    assert not can_run_code(key, values)


def test_everything_that_a_driver_writes_is_listed(tmp_path: Path) -> None:
    path = tmp_path / "d.toml"
    path.write_text(
        'framework = "fast"\n[recognise]\nimports = ["torch"]\n'
        '[command]\noption = "--trust_remote_code --{key}={value}"\n'
        '[knobs.micro_batch]\nkey = "bs"\ndefault = 4\n'
        "[knobs.compilation.levels.none]\ncompile = false\n"
        '[probe.set]\ntrust_remote_code = true\n"x\\n  y: z=1" = "\\u202emoc"\n'
        '[declared.path]\nkey = "resume_from_checkpoint"\nvalues = ["evil"]\n'
    )
    assert [*map(str, of_files([], path, None))] == [
        "fast: options as '--trust_remote_code --{key}={value}' (can run code)",
        "fast: trust_remote_code=True (can run code)",
        r"fast: 'x\n  y: z=1'='\u202emoc'",
        "fast, micro_batch: bs=VALUE",
        "fast, compilation: compile=False, <unset>",
        "path: framework:resume_from_checkpoint=evil (can run code)",
    ]


CHARACTERS = ["\n", "\r", "\x1b", "\x7f", "\x85", "\u200b", "\u2028", "\u202e"]


@pytest.mark.parametrize("character", CHARACTERS)
@pytest.mark.parametrize("show", [shown_word, one_line])
def test_a_word_is_one_line_in_its_own_order(show: Any, character: str) -> None:
    shown = show(f"a{character}Start it? [y/N] y")
    assert shown.splitlines() == [shown]
    assert shown.isprintable()


@pytest.mark.parametrize("character", [c for c in CHARACTERS if c not in "\n\u200b"])
def test_a_terminal_is_sent_no_character_that_reorders(character: str) -> None:
    assert visible(f"a{character}b").isprintable()
    assert visible("ä\n\t✓") == "ä\n\t✓"


def test_a_run_lists_what_it_starts_and_sets(tmp_path: Path) -> None:
    knobs = (
        Knob("code", ("false", "true"), how="conf.json:trust_remote_code"),
        Knob("unset", ("a",), how="env:UNSET"),
    )
    words = ("train.py", "x\n  y", "\u202etxt")
    job = ScriptJob(
        "mine", {"model_type": "gpt2"}, 64, 8, words=words, cwd=str(tmp_path), knobs=knobs
    )
    chosen = Configuration(Settings({"code": "true"}))
    assert [*map(str, of_run(job, chosen))] == [
        rf"in {tmp_path}: train.py 'x\n  y' '\u202etxt' (can run code)",
        "code: conf.json:trust_remote_code=true (can run code)",
    ]


def test_a_long_word_is_cut_in_the_middle_and_says_so() -> None:
    shown = shown_word("/home/me/" + "x" * 5000 + "/evil.py")
    assert len(shown) < 200
    assert shown.startswith("'/home/me/")
    assert shown.endswith("/evil.py'")
    assert "4,897 more characters" in shown
