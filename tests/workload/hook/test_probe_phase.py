"""Phase of a running probe in a file that the training script could replace."""

from __future__ import annotations

import os
from pathlib import Path

from tuner.workload.records.trace import PHASE_NAME, read_phase, write_phase


def test_the_last_phase_is_read_and_an_empty_one_removes_it(tmp_path: Path) -> None:
    write_phase(tmp_path, "p0001", "launching")  # no folder yet: the probe goes on without
    assert read_phase(tmp_path, "p0001") == ""
    (tmp_path / "probes" / "p0001").mkdir(parents=True)
    for phase in ("launching", "measuring 2 of 4 at 1050MHz", ""):
        write_phase(tmp_path, "p0001", phase)
        assert read_phase(tmp_path, "p0001") == phase
    assert not list((tmp_path / "probes" / "p0001").iterdir())


def test_what_is_not_ours_is_no_phase(tmp_path: Path) -> None:
    folder = tmp_path / "probes" / "p0001"
    folder.mkdir(parents=True)
    secret = tmp_path / "secret"
    secret.write_text("secret")
    (folder / PHASE_NAME).symlink_to(secret)
    assert read_phase(tmp_path, "p0001") == ""
    (folder / PHASE_NAME).unlink()
    os.mkfifo(folder / PHASE_NAME)  # nothing waits for a writer
    assert read_phase(tmp_path, "p0001") == ""
    (folder / PHASE_NAME).unlink()
    (folder / PHASE_NAME).write_bytes(b"\xff" * 5000)
    assert len(read_phase(tmp_path, "p0001")) == 100
