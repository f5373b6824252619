"""What the training program does on GPUs, without one: where weights are made, fused kernels."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.workload.scripts.deepspeed_config import render_deepspeed_config

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

pytestmark = pytest.mark.usefixtures("beside_the_program")
JOB = load_job("qwen2.5-7b")


def rendered(**knobs: object) -> dict[str, Any]:
    return render_deepspeed_config(Configuration.of(knobs), JOB)


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-olmoe"])
def test_weights_made_in_the_jobs_precision_are_those_deepspeed_would_cast(
    name: str,
) -> None:
    import causal_lm

    job = load_job(name).to_json()
    whole, planned = causal_lm.build_model(job, "none"), causal_lm.planned_model(job, "none")
    fill = causal_lm.Filler(planned, job["seed"], "cpu", torch.bfloat16)
    for block in causal_lm.blocks_of(planned):
        fill(block)  # one block at a time is held in fp32
        assert {p.dtype for p in block.parameters()} == {torch.bfloat16}
    fill(planned)
    planned.tie_weights()
    for (where, mine), theirs in zip(planned.named_parameters(), whole.parameters(), strict=True):
        assert torch.equal(mine, theirs.bfloat16()), where
    for mine, theirs in zip(planned.buffers(), whole.buffers(), strict=True):
        assert mine.dtype == theirs.dtype


class Accelerator:
    """A GPU of 80 GB as DeepSpeed shows it."""

    name = "cuda"

    def device_name(self, index: int | None = None) -> str:
        return self.name if index is None else f"{self.name}:{index}"

    def total_memory(self) -> int:
        return 80 * 10**9


@pytest.mark.real
@pytest.mark.parametrize("knobs", [{"zero_stage": 3}, {"zero_stage": 0}, {"tensor_parallel": 2}])
def test_weights_are_made_on_the_ranks_gpu(
    monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any]
) -> None:
    import causal_lm
    import train

    device = Accelerator()
    monkeypatch.setattr(train.deepspeed.accelerator, "get_accelerator", lambda: device)
    model = causal_lm.planned_model(JOB.to_json(), "none")  # 7.6 billion, without memory
    given, where = SimpleNamespace(local_rank=3, expert_parallel=1), ("cuda:3", torch.bfloat16)
    settings = rendered(data_parallel=4, **knobs)
    assert train.made_as(JOB.to_json(), given, settings, model) == where
    # A model that is split only after it is whole is made on the host if it does not fit well.
    monkeypatch.setattr(device, "total_memory", lambda: 24 * 10**9)
    fits = ("cpu", None) if "tensor_parallel" in settings else where
    assert train.made_as(JOB.to_json(), given, settings, model) == fits
    device.name = "cpu"
    assert train.made_as(JOB.to_json(), given, settings, model) == ("cpu", None)


def test_adamw_is_fused_on_cuda_alone() -> None:
    one = Configuration.of(data_parallel=4)
    on_gpu = render_deepspeed_config(one, JOB, on_cuda=True)["optimizer"]["params"]
    assert (on_gpu["torch_adam"], on_gpu["fused"]) == (True, True)
    assert "fused" not in rendered(data_parallel=4)["optimizer"]["params"]
    hosted = Configuration.of(data_parallel=4, zero_stage=2, optimizer_offload="cpu")
    params = render_deepspeed_config(hosted, JOB, on_cuda=True)["optimizer"]["params"]
    assert "fused" not in params  # DeepSpeed's CPU Adam
