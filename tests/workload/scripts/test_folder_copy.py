"""Copies of a working folder on other nodes."""

from __future__ import annotations

import io
import subprocess
import tarfile
from pathlib import Path

import pytest

from tuner.search_spaces.errors import InputError
from tuner.workload.scripts import folder_copy
from tuner.workload.scripts.folder_copy import MARK, packed, unpacked


def folder_of(path: Path) -> Path:
    (path / "part").mkdir(parents=True)
    (path / "train.py").write_text("import part.model")
    (path / "part" / "model.py").write_text("x = 1")
    (path / "runs").mkdir()
    (path / "runs" / "log").write_text("long")
    (path / "data.bin").write_text("ignored")
    return path


def names(path: Path) -> set[str]:
    return {str(file.relative_to(path)) for file in path.rglob("*") if file.is_file()}


def test_a_copy_holds_the_files_but_not_runs(tmp_path: Path) -> None:
    source, copy = folder_of(tmp_path / "a"), tmp_path / "node" / "a"
    assert unpacked(packed(source), copy) == ""
    assert names(copy) == {"train.py", "part/model.py", "data.bin", MARK}


def test_what_git_ignores_is_left_out(tmp_path: Path) -> None:
    source, copy = folder_of(tmp_path / "a"), tmp_path / "b"
    (source / ".gitignore").write_text("*.bin\n")
    subprocess.run(["git", "init", "-q", str(source)], check=True)
    assert unpacked(packed(source), copy) == ""
    assert names(copy) == {".gitignore", "train.py", "part/model.py", MARK}


def test_a_copy_is_renewed_and_a_folder_of_the_nodes_own_is_left_alone(tmp_path: Path) -> None:
    source, copy, own = folder_of(tmp_path / "a"), tmp_path / "b", folder_of(tmp_path / "c")
    unpacked(packed(source), copy)
    (source / "train.py").write_text("print()")
    (source / "data.bin").unlink()
    (own / "train.py").write_text("mine")
    (copy / "runs").mkdir()
    (copy / "runs" / "log").write_text("of the node")
    for folder in (copy, own):
        assert unpacked(packed(source), folder) == ""
    assert (copy / "train.py").read_text() == "print()"
    assert not (copy / "data.bin").exists()
    assert (copy / "runs" / "log").read_text() == "of the node"
    assert (own / "train.py").read_text() == "mine"
    assert not (own / MARK).exists()


def test_what_cannot_be_copied_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = folder_of(tmp_path / "a")
    monkeypatch.setattr(folder_copy, "_MOST_BYTES", 10)
    with pytest.raises(InputError, match=r"too much to copy to every node.*shared file system"):
        packed(source)
    (tmp_path / "file").write_text("")
    assert "cannot be copied there" in unpacked(b"", tmp_path / "file" / "below")
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w:gz") as archive:
        member = tarfile.TarInfo("../outside")
        archive.addfile(member, io.BytesIO())
    assert "cannot be copied there" in unpacked(stream.getvalue(), tmp_path / "d")
    assert not (tmp_path / "outside").exists()
