"""Machines on which `make run` and `make test` are tried: what is read, said and made of them."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks import machines
from benchmarks.machines import MACHINES, CannotBeHadError, CleanRoot, Machine, Outcome

JUNIT = """<?xml version="1.0"?>
<testsuites><testsuite>
<testcase classname="tests.a" name="test_well"/>
<testcase classname="tests.a" name="test_wrong"><failure message="assert 0"/></testcase>
<testcase classname="tests.a" name="test_broken"><error message="no fixture"/></testcase>
<testcase classname="tests.a" name="test_left"><skipped message="no numactl"/></testcase>
<testcase classname="tests.b" name="test_left"><skipped message="no numactl"/></testcase>
</testsuite></testsuites>
"""
WELL = Outcome(0, 0, 301.4, 5000, (), {"no numactl": 2})
OF_RAY = "test_it_keeps_the_executor_protocol_and_measures"
#: mmdebstrap's stand-in: a folder in place of Debian.
DEBOOTSTRAP = """#!/bin/sh
for last; do :; done
echo "$@" > "$last.words"
mkdir -p "$last/etc" "$last/home"
touch "$last/etc/passwd" "$last/etc/group"
"""


def test_tests_are_counted_by_what_became_of_them(tmp_path: Path) -> None:
    for name in ("everyday-shared.xml", "everyday-alone.xml"):
        (tmp_path / name).write_text(JUNIT)
    passed, failed, skipped = machines.tests_of(sorted(tmp_path.glob("*.xml")))
    assert passed == 2
    assert failed == ("tests.a::test_wrong", "tests.a::test_broken") * 2
    assert skipped == {"no numactl": 4}


@pytest.mark.parametrize(
    "wrong",
    [
        {"make_run_exit": 2},
        {"make_test_exit": 2},
        {"failed": ("tests.a::test_wrong",)},
        {"passed": 0},  # whatever ended before the first test
    ],
)
def test_a_machine_is_well_if_nothing_is_wrong(wrong: dict[str, object]) -> None:
    assert WELL.well
    assert not replace(WELL, **wrong).well


def test_figures_have_the_machines_name() -> None:
    found = {each.name: each.value for each in machines.figures_of("python-3.12", WELL)}
    assert found == {
        "python_3_12_failed": 0,
        "python_3_12_skipped": 2,
        "python_3_12_make_run_exit": 0,
        "python_3_12_everyday_s": 301.4,
    }


def test_pips_settings_here_are_those_in_a_root(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = tmp_path / "pip.conf"
    lines = ["[global]", "extra-index-url = https://a/simple", "    https://b/simple"]
    settings.write_text("\n".join([*lines, "find-links = /of/a/file", ""]))
    monkeypatch.setenv("PIP_CONFIG_FILE", str(settings))
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    found = machines.pip_settings()
    assert found["extra-index-url"].split() == ["https://a/simple", "https://b/simple"]
    assert found["find-links"] == str(tmp_path)


def test_what_pips_settings_name_here_is_there_in_a_root(tmp_path: Path) -> None:
    (tmp_path / "index" / "simple").mkdir(parents=True)
    (tmp_path / "my wheels").mkdir()
    (tmp_path / "own.crt").touch()
    found = machines.local_paths(
        {
            "extra-index-url": f"https://far/simple file://{tmp_path}/index/simple\n/nowhere",
            "find-links": f"file://{tmp_path}/my%20wheels",
            "cert": str(tmp_path / "own.crt"),
            "timeout": "60",
        }
    )
    assert found == [tmp_path / "index", tmp_path / "my wheels", tmp_path / "own.crt"]


def test_an_interpreter_that_is_not_here_is_named() -> None:
    with pytest.raises(CannotBeHadError, match=r"no python2\.0 here"):
        machines.interpreter("2.0")


def test_without_root_or_mmdebstrap_the_reason_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machines, "FOLDER", tmp_path)
    machines.bare_debian.cache_clear()
    for euid, reason in ((1000, "only root may"), (0, "no mmdebstrap (Debian: apt-get install")):
        monkeypatch.setattr(os, "geteuid", lambda euid=euid: euid)
        monkeypatch.setattr(machines.shutil, "which", lambda name, **_: None)
        monkeypatch.setattr(sys, "argv", ["machines", "debian-12", "debian-13"])
        machines.main()
        said = capsys.readouterr().out
        assert f"debian-12            was left out: {reason}" in said
        assert f"debian-13            was left out: {reason}" in said


def test_machines_are_listed_and_a_wrong_name_is_one_sentence(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["machines", "--list"])
    machines.main()
    listed = [line.split()[0] for line in capsys.readouterr().out.splitlines()]
    assert listed == list(MACHINES)
    monkeypatch.setattr(sys, "argv", ["machines", "debian-11"])
    with pytest.raises(SystemExit) as ended:
        machines.main()
    assert ended.value.code == 2
    assert "unknown machine 'debian-11'; known: debian-12, " in capsys.readouterr().err


def test_a_read_only_home_holds_no_clone() -> None:
    homes = [machine.clone for machine in MACHINES.values() if machine.read_only_home]
    assert homes
    assert not any(clone.startswith("/home") for clone in homes)


def test_where_no_namespace_may_be_made_the_machine_is_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "FOLDER", tmp_path)
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(machines.shutil, "which", lambda name, **_: f"/usr/bin/{name}")
    monkeypatch.setattr(machines, "ALONE", ("sh", "-c", "echo unshare failed >&2; exit 1"))
    machines.bare_debian.cache_clear()
    with pytest.raises(CannotBeHadError, match="no namespaces may be made here: unshare failed"):
        machines.bare_debian("bookworm", ())


@pytest.mark.parametrize(
    ("brief", "run", "tests"),
    [
        (False, [], [["test"]]),
        (
            True,
            ["SEARCH=--max-probes 4 --search-time 30s"],
            [["everyday-alone", f"CASES=-k {OF_RAY}"], ["everyday-shared", "ABOVE=fail"]],
        ),
    ],
)
def test_a_brief_visit_searches_shortly_and_checks_no_code(
    brief: bool,
    run: list[str],
    tests: list[list[str]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[list[str]] = []
    monkeypatch.setattr(
        CleanRoot, "run", lambda self, words, log: asked.append([*words]) or "everyday" in words[1]
    )
    root = CleanRoot.__new__(CleanRoot)
    root.machine, root.folder = MACHINES["debian-12"], tmp_path
    found = root.outcome(tmp_path / "log", brief=brief)
    assert bool(found.make_test_exit) == brief  # of any of its parts
    assert not found.well  # nothing was tested
    made = [["make", *words] for words in tests]
    assert asked == [["make", "run", *run], ["make", "install"], *made]


def test_what_passed_in_a_root_is_kept_of_this_visit_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(machines, "FOLDER", tmp_path)
    monkeypatch.setattr(sys, "argv", ["machines", "debian-12", "--brief"])
    monkeypatch.setattr(CleanRoot, "__init__", lambda self, machine, folder: setattr(self, "of", 0))
    monkeypatch.setattr(CleanRoot, "durations", tmp_path / "made")
    monkeypatch.setattr(CleanRoot, "outcome", lambda self, log, brief: WELL)
    monkeypatch.setattr(machines.shutil, "rmtree", lambda folder: None)
    kept = tmp_path / "debian-12.xml"
    kept.write_text("of an earlier visit")
    machines.main()
    assert not kept.exists()
    (tmp_path / "made").mkdir()
    (tmp_path / "made" / "everyday-shared.xml").write_text(JUNIT)
    machines.main()
    assert kept.read_text() == JUNIT


@pytest.mark.root
def test_a_command_in_a_root_has_its_environment_and_nothing_of_ours(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    programs = tmp_path / "programs"
    programs.mkdir()
    (programs / "mmdebstrap").write_text(DEBOOTSTRAP)
    (programs / "mmdebstrap").chmod(0o755)
    folder = tmp_path / "machines"
    monkeypatch.setattr(machines, "FOLDER", folder)
    monkeypatch.setenv("PATH", f"{programs}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("https_proxy", "http://proxy:1")
    monkeypatch.setattr(CleanRoot, "_clone", lambda self: None)
    machines.bare_debian.cache_clear()
    machine = Machine("a test's", suite="none", packages=("hello",), shm_MB=64, cores=1)
    root = CleanRoot(machine, folder / "root")
    words = (folder / "none-hello.half.words").read_text()
    assert (
        "--variant=minbase --include=python3,python3-venv,git,make,ca-certificates,hello" in words
    )
    assert (
        "contributor:x:1000:1000::/home/contributor:/bin/sh"
        in (root.folder / "etc" / "passwd").read_text()
    )
    assert "no-compile = true" in (root.folder / "etc" / "pip.conf").read_text()
    seen: list[list[str]] = []

    def run(words: list[str], **_: object) -> object:
        seen.append(words)
        raise machines.subprocess.TimeoutExpired(words, 1)

    monkeypatch.setattr(machines.subprocess, "run", run)
    assert root.run(["make", "run"], None) == 124  # a command that never ends is none that is well
    (words,) = seen
    assert words[:3] == ["setpriv", "--pdeathsig", "KILL"]
    assert words[3:8] == ["unshare", "--mount", "--pid", "--fork", "--kill-child"]
    script = words[-1]
    assert f"size=64m tmpfs {root.folder}/dev/shm" in script
    chroot = script.splitlines()[-1]
    assert chroot.startswith(f"exec chroot --userspec=1000:1000 {root.folder} /usr/bin/env -i ")
    assert f" PATH={machines.PATH} HOME=/home/contributor TERM=dumb sh -c " in chroot
    assert "https_proxy=http://proxy:1" in chroot
    assert "LANG" not in chroot
    assert "taskset -p -c" in chroot
    assert "exec make run" in chroot
