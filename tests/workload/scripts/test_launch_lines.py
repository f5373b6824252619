"""Launch lines as people keep them: what is observed of each, with launchers that are stand-ins."""

from __future__ import annotations

import sys
import time
from pathlib import Path
from textwrap import dedent

import pytest

from tests.workload.scripts.launch_lines import LINES, ONE, REFUSED, folder_of, make_place, observe
from tuner.search_spaces.errors import InputError


@pytest.fixture
def place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder, variables = make_place(tmp_path)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.delenv("PYTHONPATH", raising=False)
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize(("line", "ranks", "words"), LINES)
def test_a_line_shows_the_ranks_that_it_starts(
    place: Path, line: str, ranks: int, words: tuple[str, ...]
) -> None:
    seen = observe(place, line)
    words = tuple(word.replace("{home}", str(place.parent)) for word in words)
    assert (seen.ranks, seen.words, seen.folder) == (ranks, words, folder_of(line, place))


def test_what_a_line_adds_to_python_path_belongs_to_its_ranks(place: Path) -> None:
    assert observe(place, "PYTHONPATH=src python train.py").variables == {"PYTHONPATH": "src"}


@pytest.mark.parametrize(("line", "sentences"), REFUSED)
def test_a_line_that_trains_nothing_to_be_seen_ends_in_a_sentence(
    place: Path, monkeypatch: pytest.MonkeyPatch, line: str, sentences: tuple[str, ...]
) -> None:
    monkeypatch.setattr("tuner.workload.node.rank_group.LEAST_PATIENCE_S", 4.0)
    limit_s = 8.0 if "out of time" in sentences[0] else 60.0
    with pytest.raises(InputError) as error:
        observe(place, line, limit_s=limit_s)
    for sentence in sentences:
        assert sentence in str(error.value)
    assert "\n" not in str(error.value)


def test_a_python_that_lacks_torch_is_named_with_ours(place: Path) -> None:
    (place / "torch").unlink()
    with pytest.raises(InputError) as error:
        observe(place, f"{sys._base_executable} -s train.py")  # type: ignore[attr-defined]
    assert "the Python of the command, has no torch" in str(error.value)
    assert sys.executable in str(error.value)


def test_a_command_that_leaves_a_daemon_ends_with_it(
    place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for limit in ("START_LIMIT_S", "IMPORT_LIMIT_S"):
        monkeypatch.setattr(f"tuner.workload.node.rank_group.{limit}", 0.5)
    began = time.monotonic()
    with pytest.raises(InputError, match="without an optimizer step"):
        observe(place, "setsid bash -c 'sleep 397.5; :' &")
    assert time.monotonic() - began < 120
    assert not _running("397.5")


def test_nothing_of_a_command_is_left_running(place: Path) -> None:
    observe(place, "setsid sleep 300.25 & (setsid nohup sleep 300.25 &); python train.py")
    assert not _running("300.25")


def _running(word: str) -> list[str]:
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes()
        except OSError:
            continue
        if word.encode() in words and b"pytest" not in words:
            found.append(path.parent.name)
    return found


def test_a_preparation_may_run_without_the_hook(place: Path) -> None:
    (place / "prepare.py").write_text(dedent("import time; time.sleep(1)"))
    assert observe(place, "python -I prepare.py; python train.py --bs 8").words == ONE
