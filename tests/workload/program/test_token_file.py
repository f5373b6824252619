"""Training on a file of tokens: formats, draws, and files that do not fit the job."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tuner.cli.main import main
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob, load_job

PROGRAM = Path(__file__).resolve().parents[3] / "workload" / "program"
RAMP = np.arange(4000) % 4096


@pytest.fixture
def token_file() -> Iterator[Any]:
    pytest.importorskip("torch")
    sys.path.insert(0, str(PROGRAM))
    try:
        import token_file

        yield token_file
    finally:
        sys.path.remove(str(PROGRAM))


def job_with(path: Path, **more: Any) -> dict[str, Any]:
    return replace(load_job(), data=str(path), **more).to_json()


def drawn(module: Any, job: dict[str, Any], seed: int = 0) -> np.ndarray:
    import torch

    draw = torch.Generator().manual_seed(seed)
    found: np.ndarray = module.sequences(module.open_tokens(job), job, draw).numpy()
    return found


@pytest.mark.parametrize("kind", ["uint16", "int32", "int64", "raw"])
def test_sequences_are_parts_of_the_file(token_file: Any, tmp_path: Path, kind: str) -> None:
    if kind == "raw":
        path = tmp_path / "ramp.bin"
        RAMP.astype(np.uint16).tofile(path)
    else:
        path = tmp_path / "ramp.npy"
        np.save(path, RAMP.astype(kind))
    job = job_with(path)
    tokens = drawn(token_file, job)
    assert tokens.shape == (job["global_batch"], job["sequence_length"] + 1)
    assert (np.diff(tokens, axis=1) == 1).all()
    assert len(set(tokens[:, 0].tolist())) > 1
    assert (drawn(token_file, job) == tokens).all()
    assert (drawn(token_file, job, seed=1) != tokens).any()


def test_the_bytes_of_a_text_are_its_tokens(token_file: Any, tmp_path: Path) -> None:
    path = tmp_path / "book.txt"
    path.write_text("Call me Ishmael. " * 100)
    tokens = drawn(token_file, job_with(path))
    assert bytes(tokens[0].astype(np.uint8)).decode() in path.read_text()


@pytest.mark.parametrize(
    ("name", "array", "sentence"),
    [
        ("a.npy", np.zeros((40, 40), np.uint16), "one array of integers"),
        ("b.npy", np.zeros(4000), "one array of integers"),
        ("c.npy", np.zeros(10, np.uint16), "holds 10 tokens"),
        ("d.npy", np.full(4000, 4096), "vocabulary"),
        ("e.npy", np.full(4000, -1), "vocabulary"),
    ],
)
def test_a_file_that_does_not_fit_is_one_sentence(
    token_file: Any, tmp_path: Path, name: str, array: np.ndarray, sentence: str
) -> None:
    np.save(tmp_path / name, array)
    with pytest.raises(SystemExit, match=sentence):
        drawn(token_file, job_with(tmp_path / name))


def test_a_job_names_its_file(tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").write_bytes(bytes(1000))
    text = 'data = "tokens.bin"\nsequence_length = 64\nglobal_batch = 8\nsteps = 10\n'
    (tmp_path / "job.toml").write_text(text + '[model]\nconfig = "tiny-gpt"\n')
    job = load_job(tmp_path / "job.toml")
    assert job.data == str(tmp_path / "tokens.bin")
    assert TrainingJob.from_json(json.loads(json.dumps(job.to_json()))) == job
    assert "data" not in load_job().to_json()
    (tmp_path / "tokens.bin").unlink()
    with pytest.raises(InputError, match="no file of tokens"):
        load_job(tmp_path / "job.toml")
    with pytest.raises(InputError, match="hold video"):
        replace(load_job("tiny-lmm"), data="x.npy")


def test_the_option_needs_a_job_and_a_file(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dev", "probe", "--data", "nowhere.bin"]) == 2
    assert "nowhere.bin" in capsys.readouterr().err
    assert main(["optimize", "--script", "train.py", "--data", "x.bin"]) == 2
    assert "--data is for a job" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.real
def test_a_probe_trains_on_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "same.npy"
    np.save(path, np.full(4000, 7, np.uint16))
    runs = str(tmp_path / "runs")
    words = ["dev", "probe", "--data", str(path), "--runs-dir", runs, "--quiet", "--json"]
    assert main([*words, "--time-limit", "120s"]) == 0
    assert json.loads(capsys.readouterr().out)["measurements"]
    (log,) = (tmp_path / "runs").glob("*/probes/p0000/rank0.log")
    losses = [float(line.split()[3]) for line in log.read_text().splitlines() if "loss" in line]
    assert losses[-1] < 7 < losses[0]  # one token is learnt at once; random ones stay at ln(4096)
