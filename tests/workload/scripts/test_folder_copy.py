"""Copies of a working folder on other nodes."""

from __future__ import annotations

import io
import os
import stat
import subprocess
import tarfile
from pathlib import Path

import pytest

from tuner.search_spaces.errors import InputError
from tuner.workload.scripts import folder_copy
from tuner.workload.scripts.folder_copy import packed, unpacked


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
    assert names(copy) == {"train.py", "part/model.py", "data.bin"}


def test_what_git_ignores_is_left_out(tmp_path: Path) -> None:
    source, copy = folder_of(tmp_path / "a"), tmp_path / "b"
    (source / ".gitignore").write_text("*.bin\n")
    subprocess.run(["git", "init", "-q", str(source)], check=True)
    assert unpacked(packed(source), copy) == ""
    assert names(copy) == {".gitignore", "train.py", "part/model.py"}


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


def test_no_list_of_a_strangers_says_what_is_removed(tmp_path: Path) -> None:
    """Review 2, finding 5: a file in the folder named what was deleted, anywhere."""
    source, copy = folder_of(tmp_path / "a"), tmp_path / "node" / "b"
    notes, key = tmp_path / "node" / "notes.txt", tmp_path / "key"
    notes.parent.mkdir()
    for path in (notes, key):
        path.write_text("mine")
    (source / ".joulefront-copy").write_text(f"../notes.txt\n{key}\ntrain.py")
    assert unpacked(packed(source), source) == ""
    assert (source / "train.py").exists()
    for _ in range(2):
        assert unpacked(packed(source), copy) == ""
    # The list is the user's own; even so nothing outside of the folder is removed.
    (listed,) = (tmp_path / "cache" / "joulefront" / "copies").iterdir()
    listed.write_text(f"{listed.read_text()}\n../notes.txt\n{key}\nlink/key")
    (copy / "link").symlink_to(tmp_path)
    assert unpacked(packed(source), copy) == ""
    assert (notes.read_text(), key.read_text()) == ("mine", "mine")


def test_another_folder_in_the_place_of_a_copy_is_left_alone(tmp_path: Path) -> None:
    source, copy = folder_of(tmp_path / "a"), tmp_path / "b"
    unpacked(packed(source), copy)
    copy.rename(tmp_path / "before")
    folder_of(copy)
    (copy / "train.py").write_text("mine")
    assert unpacked(packed(source), copy) == ""
    assert (copy / "train.py").read_text() == "mine"


@pytest.mark.root
def test_a_folder_of_another_user_is_not_used(tmp_path: Path) -> None:
    source, copy = folder_of(tmp_path / "a"), tmp_path / "b"
    copy.mkdir()
    os.chown(copy, 54321, 54321)
    assert "belongs to user 54321" in unpacked(packed(source), copy)
    assert names(copy) == set()


def test_secrets_stay_and_a_copy_is_closed_to_others(tmp_path: Path) -> None:
    """Review 2, finding 11."""
    source, copy = folder_of(tmp_path / "a"), tmp_path / "b"
    (source / ".ssh").mkdir()
    kept = {"train.py", "part/model.py", "data.bin", "id_map.json", "alias.py"}
    for name in (".env", ".env.local", "deploy.pem", ".ssh/id_ed25519", "id_rsa", "id_map.json"):
        (source / name).write_text("secret")
    (source / "alias.py").symlink_to("train.py")
    assert unpacked(packed(source), copy) == ""
    assert names(copy) == kept
    assert (copy / "alias.py").is_symlink()
    assert stat.S_IMODE(copy.stat().st_mode) == 0o700
    outside = tmp_path / "outside"
    outside.write_text("secret")
    for target in (outside, Path("..", "outside"), source / "train.py"):
        (source / "link").symlink_to(target)
        with pytest.raises(InputError, match="leads out of"):
            packed(source)
        (source / "link").unlink()


def test_git_starts_nothing_that_a_folder_names(tmp_path: Path) -> None:
    source, told = folder_of(tmp_path / "a"), tmp_path / "told"
    subprocess.run(["git", "init", "-q", str(source)], check=True)
    program = tmp_path / "monitor"
    program.write_text(f"#!/bin/sh\ntouch {told}\n")
    program.chmod(0o755)
    git = ["git", "-C", str(source)]
    subprocess.run([*git, "config", "core.fsmonitor", str(program)], check=True)
    packed(source)
    assert not told.exists()
