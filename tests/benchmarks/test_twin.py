"""Checks of the twin's benchmark: touches of CUDA before the fork, and delivered clocks."""

from pathlib import Path

import pytest

from benchmarks.twin.checks import preload_touches
from benchmarks.twin.clocks import delivered_clock_error

pytestmark = pytest.mark.twin


TORCH = """
from types import SimpleNamespace as N
_C, cuda, version, __version__ = N(), N(is_initialized=lambda: False), N(cuda={cuda!r}), "2.13.0"
"""


@pytest.mark.parametrize(("cuda", "touches"), [("13.0", 1), (None, None)])
def test_second_day_12_only_a_cuda_build_tells_if_the_preload_starts_the_driver(
    tmp_path: Path, cuda: str | None, touches: int | None
) -> None:
    (tmp_path / "torch.py").write_text(TORCH.format(cuda=cuda))
    (tmp_path / "deepspeed.py").write_text("import ctypes\nctypes.CDLL('libcuda.so.1').cuInit(0)\n")
    assert preload_touches(tmp_path) == touches


def test_delivered_clocks_are_near_the_truth() -> None:
    assert max(abs(delivered_clock_error(seed)) for seed in range(12)) < 0.02
