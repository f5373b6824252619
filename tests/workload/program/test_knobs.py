"""What a configuration is rendered to, and the parts of the training program that need no ranks."""

from __future__ import annotations

import contextlib
import json
import weakref
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import load_job
from tuner.search_spaces.rules import broken_rules
from tuner.workload.node.platforms import detect_cluster
from tuner.workload.node.probe_run import ops_needed
from tuner.workload.program.built_in_job import training_arguments
from tuner.workload.scripts.deepspeed_config import render_deepspeed_config

pytestmark = pytest.mark.usefixtures("beside_the_program")
JOB = load_job("qwen2.5-7b")


def rendered(**knobs: object) -> dict[str, Any]:
    return render_deepspeed_config(Configuration.of(knobs), JOB)


def test_parameter_and_asynchronous_offload_are_zero_3s_keys() -> None:
    zero = rendered(zero_stage=3, parameter_offload="cpu", optimizer_offload="async")
    assert zero["zero_optimization"] == {
        "stage": 3,
        "offload_param": {"device": "cpu", "pin_memory": True},
        "offload_optimizer": {
            "device": "cpu",
            "pin_memory": True,
            "super_offload": True,
            "cpuadam_cores_perc": 0.8,
        },
    }
    assert zero["optimizer"]["params"]["torch_adam"] is False
    # torch's AdamW decays weights by default, DeepSpeed's CPU Adam does not: it must be said.
    assert zero["optimizer"]["params"]["weight_decay"] == 0.01
    assert "super_offload" not in json.dumps(rendered(zero_stage=3, optimizer_offload="cpu"))


def test_tensor_parallelism_is_deepspeeds_own_and_leaves_the_batch_to_its_factors() -> None:
    config = rendered(data_parallel=4, tensor_parallel=2, micro_batch=2)
    assert config["tensor_parallel"] == {"autotp_size": 2}
    assert config["train_micro_batch_size_per_gpu"] * config["gradient_accumulation_steps"] * 4 == (
        JOB.global_batch
    )
    assert "train_batch_size" not in config
    assert rendered(data_parallel=4)["train_batch_size"] == JOB.global_batch


def test_a_configuration_renders_to_what_it_names_and_nothing_else() -> None:
    plain = rendered(data_parallel=4)
    assert training_arguments(Configuration.of(data_parallel=4, zero_stage=2, micro_batch=2)) == ()
    for knobs in (
        {"pipeline_parallel": 2},
        {"sequence_parallel": 2},
        {"expert_parallel": 2},
        {"sharding": "fsdp2"},
        {"hsdp_replicas": 2},
        {"activation_checkpointing": "every_4"},
        {"activation_offload": "async"},
        {"compilation": "regional"},
    ):
        ((name, value),) = knobs.items()
        assert training_arguments(Configuration.of(knobs)) == (f"--{name}", str(value))
        assert rendered(data_parallel=4, **knobs) == plain


def test_what_is_kept_on_a_drive_names_its_folder() -> None:
    knobs = {"zero_stage": 3, "optimizer_offload": "nvme", "parameter_offload": "nvme"}
    asked = Configuration.of({"data_parallel": 8, **knobs})
    zero = render_deepspeed_config(asked, JOB, nvme_path="/nvme")["zero_optimization"]
    there = {"device": "nvme", "pin_memory": True, "nvme_path": "/nvme"}
    assert (zero["offload_optimizer"], zero["offload_param"]) == (there, there)
    assert ops_needed(asked.launch) == ("CPUAdamBuilder", "AsyncIOBuilder")
    (phrase,) = {p.partition(" ")[2] for p in broken_rules(asked, JOB, load_cluster("h100-32"))}
    assert "JOULEFRONT_NVME_PATH" in phrase
    here = replace(load_cluster("h100-32"), nvme_path="/nvme")
    assert broken_rules(asked, JOB, here) == []
    low = Configuration.of(data_parallel=8, zero_stage=2, optimizer_offload="nvme")
    assert broken_rules(low, JOB, here) == ["optimizer_offload nvme needs zero_stage 3, not 2"]


def test_this_machines_drive_is_told_by_the_environment() -> None:
    assert detect_cluster(environ={}).nvme_path == ""
    assert detect_cluster(environ={"JOULEFRONT_NVME_PATH": "/nvme"}).nvme_path == "/nvme"


@pytest.mark.parametrize(
    "knobs",
    [
        {"optimizer_offload": "async"},
        {"optimizer_offload": "nvme", "parameter_offload": "nvme"},
        {"optimizer_offload": "cpu", "parameter_offload": "cpu"},
    ],
)
def test_deepspeeds_own_schema_reads_the_settings(knobs: dict[str, str]) -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    asked = Configuration.of({"data_parallel": 8, "zero_stage": 3, **knobs})
    zero = render_deepspeed_config(asked, JOB, nvme_path="/nvme")["zero_optimization"]
    read = config.DeepSpeedZeroConfig(**zero)
    assert not read.model_extra
    assert not read.offload_optimizer.model_extra
    assert read.offload_optimizer.super_offload is (knobs["optimizer_offload"] == "async")
    assert read.offload_optimizer.device == zero["offload_optimizer"]["device"]


def test_deepspeeds_own_schema_reads_the_second_copy() -> None:
    config = pytest.importorskip("deepspeed.runtime.zero.config")
    asked = Configuration.of(data_parallel=16, zero_stage=3, zero_hpz_partition_size=8)
    read = config.DeepSpeedZeroConfig(**render_deepspeed_config(asked, JOB)["zero_optimization"])
    assert not read.model_extra
    assert read.zero_hpz_partition_size == 8


torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


@pytest.mark.parametrize(
    ("mode", "recomputed"),
    [("none", []), ("every_4", [0, 4]), ("every_2", [0, 2, 4]), ("full", [0, 1, 2, 3, 4, 5])],
)
@pytest.mark.parametrize("job", ["tiny-gpt", "tiny-opt"])
def test_which_blocks_are_recomputed(
    causal_lm: Any, job: str, mode: str, recomputed: list[int]
) -> None:
    asked = load_job(job)
    asked = replace(asked, model={**asked.model, "num_hidden_layers": 6})
    model = causal_lm.build_model(asked.to_json(), mode)
    runs: list[int] = []
    for number, block in enumerate(causal_lm.blocks_of(model)):
        # The first linear layer inside: its forward runs again when the block is recomputed.
        inside = next(m for m in block.modules() if isinstance(m, torch.nn.Linear))
        inside.register_forward_hook(lambda *_, number=number: runs.append(number))
    tokens = causal_lm.tokens_of_step(asked.to_json(), 0)[:2]
    targets = tokens[:, 1:].contiguous()
    model(input_ids=tokens[:, :-1], labels=targets, shift_labels=targets).loss.backward()
    assert sorted(runs) == sorted([0, 1, 2, 3, 4, 5, *recomputed])


def test_paired_parts_of_a_sequence_are_the_same_causal_work(causal_lm: Any) -> None:
    shares = [causal_lm.Share(1, 1, 0, 1, parts=3, part=part, paired=True) for part in range(3)]
    parts = [share.positions(12).tolist() for share in shares]
    assert parts == [[0, 1, 10, 11], [2, 3, 8, 9], [4, 5, 6, 7]]
    assert len({sum(part) for part in parts}) == 1
    plain = [causal_lm.Share(1, 1, 0, 1, parts=3, part=part).positions(12) for part in range(3)]
    assert torch.cat(plain).tolist() == list(range(12))


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-opt"])
def test_selective_checkpointing_repeats_no_product(causal_lm: Any, name: str) -> None:
    from torch.utils.flop_counter import FlopCounterMode

    job = load_job(name)
    job = replace(job, sequence_length=16, model={**job.model, "num_hidden_layers": 2})
    tokens = causal_lm.tokens_of_step(job.to_json(), 0)[:1]
    targets = tokens[:, 1:].contiguous()
    flops, gradients = {}, {}
    for mode in ("none", "selective", "full"):
        model = causal_lm.build_model(job.to_json(), mode)
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens[:, :-1], labels=targets, shift_labels=targets).loss.backward()
        flops[mode] = counter.get_total_flops()
        gradients[mode] = [parameter.grad for parameter in model.parameters()]
    assert flops["none"] == flops["selective"] < flops["full"]
    for plain, again in zip(gradients["none"], gradients["selective"], strict=True):
        assert torch.equal(plain, again)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if name[-4:] == "lora" else pytest.mark.long)
        for name in ("tiny-gpt", "tiny-opt", "tiny-qwen2.5", "tiny-qwen2.5-lora")
    ],
)
def test_what_is_compiled(causal_lm: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without inductor, which takes half a minute."""
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="eager", dynamic=False))
    job = load_job(name)
    job = replace(job, sequence_length=16, model={**job.model, "num_hidden_layers": 2})
    tokens = causal_lm.tokens_of_step(job.to_json(), 0)[:2]
    targets, losses = tokens[:, 1:].contiguous(), {}
    for scope in ("none", "regional", "full"):
        torch._dynamo.reset()
        torch._dynamo.utils.counters.clear()
        model = causal_lm.build_model(job.to_json(), "none")
        causal_lm.compile_model(model, scope)
        compiled = [m for m in model.modules() if m._compiled_call_impl is not None]
        assert (
            compiled
            == {"none": [], "regional": list(causal_lm.blocks_of(model)), "full": [model]}[scope]
        )
        loss = model(input_ids=tokens[:, :-1], labels=targets, shift_labels=targets).loss
        loss.backward()
        norm = torch.nn.utils.get_total_norm(
            [p.grad for p in model.parameters() if p.requires_grad]
        )
        losses[scope] = (loss.item(), norm.item())
        # All blocks have one code; with LoRA the first one, whose input is frozen, has its own.
        count = torch._dynamo.utils.counters["stats"]["unique_graphs"]
        assert count == (scope != "none") + (scope == "regional" and job.lora is not None)
    assert losses["regional"] == pytest.approx(losses["none"], rel=1e-5)
    assert losses["full"] == pytest.approx(losses["none"], rel=1e-5)


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-opt", "tiny-qwen2.5", "tiny-olmoe", "tiny-lmm"])
def test_a_part_filled_alone_has_the_weights_it_has_in_the_whole(causal_lm: Any, name: str) -> None:
    """What a pipeline stage does, or a rank of ZeRO-3 block by block; the rest takes no memory."""
    job = load_job(name).to_json()
    whole, planned = causal_lm.build_model(job, "none"), causal_lm.planned_model(job, "none")
    assert not any(t.is_meta for t in (*whole.parameters(), *whole.buffers()))
    assert all(parameter.is_meta for parameter in planned.parameters())
    last = causal_lm.blocks_of(planned)[-1]
    causal_lm.Filler(planned, job["seed"])(last)
    for mine, theirs in zip(
        last.parameters(), causal_lm.blocks_of(whole)[-1].parameters(), strict=True
    ):
        assert torch.equal(mine, theirs)
    assert all(p.is_meta for p in causal_lm.blocks_of(planned)[0].parameters())
    # Blocks differ from each other, and other seeds give other weights.
    matrices = [p for p in last.parameters() if p.dim() == 2]
    first = [p for p in causal_lm.blocks_of(whole)[0].parameters() if p.dim() == 2]
    other = causal_lm.build_model({**job, "seed": 1}, "none")
    again = [p for p in causal_lm.blocks_of(other)[-1].parameters() if p.dim() == 2]
    assert not any(torch.equal(a, b) for a, b in zip(matrices, first, strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(matrices, again, strict=True))


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-opt", "tiny-qwen2.5", "tiny-olmoe", "tiny-lmm"])
def test_weights_are_spread_as_the_family_spreads_them(causal_lm: Any, name: str) -> None:
    from transformers import AutoConfig

    job = load_job(name).to_json()
    ours = causal_lm.build_model(job, "none")
    values = dict(job["model"])
    config = AutoConfig.for_model(values.pop("model_type"), **values)
    torch.manual_seed(0)
    theirs = type(ours)(config)
    for (where, mine), usual in zip(ours.named_parameters(), theirs.parameters(), strict=True):
        if mine.numel() > 1000:
            assert float(mine.std()) == pytest.approx(float(usual.std()), rel=0.1), where
        else:
            assert float(mine.mean()) == pytest.approx(float(usual.mean()), abs=0.1), where
    for (where, mine), usual in zip(ours.named_buffers(), theirs.buffers(), strict=True):
        assert torch.equal(mine, usual), where


def test_a_window_of_attention_is_not_split(causal_lm: Any) -> None:
    model = torch.nn.Linear(1, 1)
    config = type("Config", (), {"sliding_window": 64})()
    config.get_text_config = lambda: config
    model.config = config
    causal_lm.check_attention(model, 64)
    with pytest.raises(NotImplementedError, match="window of 64 tokens"):
        causal_lm.check_attention(model, 65)


# Activation offload. No GPU here: streams and events are played, and the order of work is told.


class FakeRuntime:
    """torch.cuda's streams and events as a log; copies are done at once or never in time."""

    def __init__(self, copies_done: bool) -> None:
        self.log: list[str] = []
        self._copies_done = copies_done
        self._streams = ["compute"]

    def Stream(self) -> FakeStream:
        return FakeStream(self, "side")

    def Event(self) -> FakeEvent:
        return FakeEvent(self)

    def current_stream(self) -> FakeStream:
        return FakeStream(self, self._streams[-1])

    @contextlib.contextmanager
    def stream(self, stream: FakeStream) -> Iterator[None]:
        self._streams.append(stream.name)
        yield
        self._streams.pop()


class FakeStream:
    def __init__(self, runtime: FakeRuntime, name: str) -> None:
        self.runtime, self.name = runtime, name

    def wait_stream(self, other: FakeStream) -> None:
        self.runtime.log.append(f"{self.name} waits for {other.name}")

    def wait_event(self, event: FakeEvent) -> None:
        self.runtime.log.append(f"{self.name} waits for {event.number}")


class FakeEvent:
    def __init__(self, runtime: FakeRuntime) -> None:
        self.runtime = runtime
        self.number = sum(line.startswith("mark") for line in runtime.log)

    def record(self, stream: FakeStream) -> None:
        self.runtime.log.append(f"mark {self.number} on {stream.name}")

    def query(self) -> bool:
        return self.runtime._copies_done


def network() -> tuple[torch.nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    layers = [torch.nn.Linear(256, 256), torch.nn.GELU(), torch.nn.Linear(256, 256)]
    return torch.nn.Sequential(*layers), torch.randn(128, 256)


def gradients(context: contextlib.AbstractContextManager[Any]) -> list[torch.Tensor]:
    model, inputs = network()
    with context:
        loss = model(inputs).square().mean()
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("copies_done", [True, False])
def test_offloaded_activations_give_the_same_gradients(
    host_activations: Any, copies_done: bool
) -> None:
    expected = gradients(contextlib.nullcontext())
    asynchronous = host_activations.activations_on_host("async", FakeRuntime(copies_done))
    for context in (host_activations.activations_on_host("sync"), asynchronous):
        assert all(map(torch.equal, gradients(context), expected))


def test_parameters_and_small_tensors_stay(host_activations: Any) -> None:
    weight = torch.nn.Parameter(torch.zeros(256, 256))
    for stays in (weight, weight.t(), torch.zeros(8)):
        for offload in (
            host_activations.Blocking(),
            host_activations.SideStream(FakeRuntime(True)),
        ):
            packed = offload.pack(stays)
            assert packed is stays
            assert offload.unpack(packed) is stays


def test_copies_out_wait_for_the_tensor_and_let_its_memory_go(host_activations: Any) -> None:
    runtime = FakeRuntime(copies_done=True)
    offload = host_activations.SideStream(runtime)
    tensor = torch.randn(256, 256)
    there, copy = weakref.ref(tensor), tensor.clone()
    packed = offload.pack(tensor)
    assert runtime.log == ["side waits for compute", "mark 0 on side"]
    del tensor
    assert there() is None
    assert torch.equal(offload.unpack(packed), copy)
    # The computation waits for the copy back, and for nothing else.
    assert runtime.log[2:] == ["mark 1 on side", "compute waits for 1"]


def test_a_tensor_still_leaving_is_kept_and_given_back_itself(host_activations: Any) -> None:
    offload = host_activations.SideStream(FakeRuntime(copies_done=False))
    tensor = torch.randn(256, 256)
    assert offload.unpack(offload.pack(tensor)) is tensor


def test_the_way_back_begins_one_tensor_ahead(host_activations: Any) -> None:
    runtime = FakeRuntime(copies_done=True)
    offload = host_activations.SideStream(runtime)
    first, second = (offload.pack(torch.randn(256, 256)) for _ in range(2))
    del runtime.log[:]
    offload.unpack(second)
    # Both are on their way before the computation waits for the one that it needs.
    assert runtime.log == ["mark 0 on side", "mark 1 on side", "compute waits for 0"]
    assert first.back is not None
    del runtime.log[:]
    offload.unpack(first)
    assert runtime.log == ["compute waits for 1"]


def test_what_the_backward_pass_has_used_is_not_fetched_again(host_activations: Any) -> None:
    """A pipeline saves the next micro-batch's tensors before it is done with this one's."""
    runtime = FakeRuntime(copies_done=True)
    offload = host_activations.SideStream(runtime)
    first, second = (offload.pack(torch.randn(256, 256)) for _ in range(2))
    offload.unpack(first)
    del runtime.log[:]
    offload.unpack(second)
    assert runtime.log == ["mark 0 on side", "compute waits for 0"]
    assert first.back is None


pytest.importorskip("transformers")


@pytest.mark.parametrize("name", ["tiny-gpt", "tiny-olmoe"])
def test_weights_made_in_the_jobs_precision_are_those_deepspeed_would_cast(
    causal_lm: Any, name: str
) -> None:
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
    causal_lm: Any, monkeypatch: pytest.MonkeyPatch, knobs: dict[str, Any]
) -> None:
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
