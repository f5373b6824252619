"""GPU nodes of tests: all of their GPUs are visible, and their meters are closed at the end."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from typing import Any

import pytest

from tests.twin import TwinGpu, TwinNode
from tuner.workload.node.meters.nvml import NvmlMeter


@pytest.fixture(autouse=True)
def _all_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forget which GPUs the shell hides that runs the tests."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


@pytest.fixture
def metered(
    twin_node: Callable[..., TwinNode],
) -> Iterator[Callable[..., tuple[TwinNode, NvmlMeter]]]:
    """Return a function that makes a node of GPUs and its meter, whose options it takes."""
    with ExitStack() as opened:

        def make(*gpus: TwinGpu, **options: Any) -> tuple[TwinNode, NvmlMeter]:
            node = twin_node(*gpus)
            own_time = {"environ": {}, "clock": node.clock, "sleep": node.sleep}
            return node, opened.enter_context(closing(NvmlMeter(**{**own_time, **options})))

        yield make
