"""A model's configuration from its hub: a small server stands in for it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from tests.support.commands import finished

CONFIG = json.dumps(
    {
        **{"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "vocab_size": 512},
        **{"num_attention_heads": 4, "intermediate_size": 128, "max_position_embeddings": 512},
    }
).encode()


@pytest.fixture
def hub() -> Iterator[tuple[str, list[str]]]:
    asked: list[str] = []

    class Hub(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self.answer(body=False)

        def do_GET(self) -> None:
            self.answer(body=True)

        def answer(self, *, body: bool) -> None:
            asked.append(self.path)
            there = self.path == "/small/llama/resolve/main/config.json"
            self.send_response(200 if there else 404)
            if there:
                self.send_header("ETag", '"abc"')
                self.send_header("X-Repo-Commit", "0" * 40)
            else:
                self.send_header("X-Error-Code", "RepoNotFound")
            self.send_header("Content-Length", str(len(CONFIG) if there else 0))
            self.end_headers()
            if body and there:
                self.wfile.write(CONFIG)

        def log_message(self, format: str, *arguments: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Hub)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}", asked
    server.shutdown()
    server.server_close()


def fit(name: str, home: Path, **env: str) -> subprocess.CompletedProcess[str]:
    unset = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE", "HF_HUB_CACHE")
    kept = {key: value for key, value in os.environ.items() if key not in unset}
    return finished(
        [sys.executable, "-m", "tuner.cli", "fit", name, "--cluster", "a100-8"],
        env={**kept, "HF_HOME": str(home), **env},
        timeout=120,
    )


def test_the_configuration_alone_is_fetched_and_kept(
    hub: tuple[str, list[str]], tmp_path: Path
) -> None:
    endpoint, asked = hub
    done = fit("small/llama", tmp_path, HF_ENDPOINT=endpoint)
    assert (done.returncode, done.stderr) == (0, "")
    assert {*asked} == {"/small/llama/resolve/main/config.json"}
    asked.clear()
    assert fit("small/llama", tmp_path, HF_ENDPOINT=endpoint).returncode == 0
    assert asked == []  # it is in the cache


def test_a_model_that_the_hub_lacks_and_no_hub(hub: tuple[str, list[str]], tmp_path: Path) -> None:
    endpoint, asked = hub
    done = fit("small/other", tmp_path, HF_ENDPOINT=endpoint)
    assert done.returncode == 2
    assert "has no model small/other" in done.stderr
    asked.clear()
    done = fit("small/llama", tmp_path, HF_ENDPOINT=endpoint, HF_HUB_OFFLINE="1")
    assert done.returncode == 2
    assert "was not fetched (HF_HUB_OFFLINE is set)" in done.stderr
    assert asked == []
    done = fit("small/llama", tmp_path, HF_ENDPOINT="http://127.0.0.1:9")
    assert done.returncode == 2
    assert "does not answer" in done.stderr
    assert done.stderr.count("\n") == 1
