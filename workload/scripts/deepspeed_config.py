"""Rendering of a configuration as DeepSpeed JSON, and the ops that it needs.

`train_batch_size` is the job's global batch, so DeepSpeed itself refuses a micro-batch and
accumulation that do not multiply to it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.workload.hook import merge
from tuner.workload.scripts.declared_knobs import deepspeed_settings
from tuner.workload.scripts.routes import ACCUMULATION, Draft, KnobSupport, Route
from tuner.workload.scripts.script_facts import OFFLOADS, OLD_OFFLOADS, ScriptTraining


def render_deepspeed_config(
    configuration: Configuration, job: TrainingJob, *, nvme_path: str = "", on_cuda: bool = False
) -> dict[str, Any]:
    """Render the DeepSpeed JSON of one configuration (deepspeed.ai/docs/config-json, 0.19).

    On GPUs (`on_cuda`) torch's AdamW is one fused kernel, which needs no compiler, as DeepSpeed's
    FusedAdam does. InvalidValue if the replicas' micro-batches do not divide the global batch.
    """
    offload, job = configuration.get("optimizer_offload"), job.at(configuration)
    config: dict[str, Any] = {
        "train_batch_size": job.global_batch,
        "train_micro_batch_size_per_gpu": configuration.micro_batch,
        "gradient_accumulation_steps": configuration.accumulation(job.global_batch),
        "steps_per_print": 1_000_000_000,  # its own log line a step would be a print a step
        "gradient_clipping": 1.0,
        "optimizer": {
            "type": "AdamW",
            "params": {
                "lr": job.learning_rate,
                # torch's defaults, said: DeepSpeed's CPU Adam decays no weights unless told to, and
                # offload would train another model.
                "betas": [0.9, 0.999],
                "eps": 1e-8,
                "weight_decay": 0.01,
                # torch's AdamW on the device; DeepSpeed's own would be compiled at the first start.
                # With the states on the host DeepSpeed insists on its CPU Adam.
                "torch_adam": offload == "none",
            },
        },
        "zero_optimization": {"stage": configuration.zero_stage},
    }
    if on_cuda and offload == "none":
        config["optimizer"]["params"]["fused"] = True
    if job.precision != "fp32":
        config[job.precision] = {"enabled": True}
    zero = config["zero_optimization"]
    if offload != "none":
        zero["offload_optimizer"] = _kept_on("nvme" if offload == "nvme" else "cpu", nvme_path)
    if offload == "async":
        # SuperOffload; the share of the cores for Adam is the one its authors give.
        zero["offload_optimizer"] |= {"super_offload": True, "cpuadam_cores_perc": 0.8}
    if (near := configuration.get("zero_hpz_partition_size")) != 1:
        zero["zero_hpz_partition_size"] = near
    parameters = configuration.get("parameter_offload")
    if parameters != "none":
        zero["offload_param"] = _kept_on(str(parameters), nvme_path)
    if configuration.tensor_parallel > 1:
        config["tensor_parallel"] = {"autotp_size": configuration.tensor_parallel}
        # DeepSpeed checks this against all ranks, tensor ranks included, before it splits them.
        del config["train_batch_size"]
    return merge(config, deepspeed_settings(configuration, job.knobs))


def _kept_on(device: str, nvme_path: str) -> dict[str, Any]:
    where = {"nvme_path": nvme_path} if device == "nvme" else {}
    return {"device": device, "pin_memory": True, **where}


_SECOND_COPY = "zero_hpz_partition_size"
#: A probe of twenty steps is no experiment, so nothing of it is logged.
_QUIET = {name: {"enabled": False} for name in ("tensorboard", "wandb", "csv_monitor", "comet")}


class DeepSpeedConfig(Route):
    """DeepSpeed's configuration: a file of the command, or a dictionary of the script.

    The user's choices (optimizer, scheduler, precision, global batch) are kept.
    """

    def today(self, job: ScriptTraining) -> Mapping[str, Value]:
        """Return the values of the configuration, and the stages of DeepSpeed's pipeline."""
        frame = job.frame
        tensor = frame.config.get("tensor_parallel") or {}
        places = {knob: frame.device(section) for knob, section in OFFLOADS.items()}
        return {
            "tensor_parallel": tensor.get("autotp_size") or tensor.get("tp_size") or 1,
            "pipeline_parallel": frame.stages,
            "sequence_parallel": frame.config.get("sequence_parallel_size") or 1,
            "zero_stage": int(frame.zero.get("stage", 0)),
            _SECOND_COPY: int(frame.zero.get(_SECOND_COPY, 1)),
            **{knob: "cpu" if place == "cpu" else "none" for knob, place in places.items()},
        }

    def support(self, job: ScriptTraining, knob: str) -> KnobSupport | None:
        """Support ZeRO and offload, and the batch if the script leaves it to DeepSpeed."""
        frame, under = job.frame, job.under_deepspeed
        if knob == "micro_batch" and frame.follows:
            return KnobSupport("the batches follow DeepSpeed's micro-batch", route=self)
        inspected = bool(frame.kind)
        if knob == ACCUMULATION and not frame.owner:
            does = frame.on_deepspeed or (under and not inspected)
            return KnobSupport("DeepSpeed accumulates", route=self) if does else None
        if knob in ("zero_stage", _SECOND_COPY) and under:
            return KnobSupport("DeepSpeed's configuration", route=self)
        if knob not in OFFLOADS or not under or self._kept_place(job, knob):
            return None
        if frame.client_optimizer and knob == "optimizer_offload":
            # SuperOffload replaces the optimizer, which is the user's to keep.
            why = f"DeepSpeed's configuration, with its {frame.client_optimizer}"
            return KnobSupport(why, ("none", "cpu"), self)
        # A script's own folder on a drive is not known.
        values = tuple(value for value in KNOBS[knob].choices if value != "nvme")
        return KnobSupport("DeepSpeed's configuration", values, self)

    def why_not(self, job: ScriptTraining, knob: str) -> str:
        """Name DeepSpeed's absence, or today's place of a state."""
        if knob not in ("zero_stage", _SECOND_COPY, *OFFLOADS):
            return ""
        if not job.under_deepspeed:
            return "the script does not train under DeepSpeed"
        return f"today's offload to {self._kept_place(job, knob)} is kept"

    def _kept_place(self, job: ScriptTraining, knob: str) -> str:
        place = job.frame.device(OFFLOADS[knob])
        return "" if place in ("none", "cpu") else place

    def apply(self, job: ScriptTraining, configuration: Configuration, draft: Draft) -> None:
        """Write the merged configuration to the folder, and name it in the command."""
        base = job.frame.config or job.file_config
        # "auto" is filled in by transformers from its own arguments, which the command sets.
        changes = {
            name: value
            for name, value in self._changes(job, configuration, draft).items()
            if base.get(name) != "auto"
        }
        if draft.probe and (base or job.frame.on_deepspeed):
            changes = {**_QUIET, "autotuning": None, **changes}
        draft.options["deepspeed"] = changes
        if not base and not changes:
            return
        draft.use_config(merge(base, changes))
        named = job.words[job.config_word[0]] if job.config_word else None
        if named is not None and named in draft.words:
            before, equals, _ = named.rpartition("=")
            draft.words[draft.words.index(named)] = f"{before}{equals}{draft.config_file}"

    def _changes(
        self, job: ScriptTraining, configuration: Configuration, draft: Draft
    ) -> dict[str, Any]:
        """Return a configuration's changes to the settings (DeepSpeed 0.19); None removes a key.

        InvalidValue if micro-batch x data parallelism does not divide the global batch.
        """
        declared = deepspeed_settings(configuration, job.knobs)
        if job.driver is not None and not job.frame.on_deepspeed:
            return declared
        changes: dict[str, Any] = {}
        if draft.splits_batch:
            changes |= {
                "train_batch_size": job.global_batch,
                "train_micro_batch_size_per_gpu": configuration.micro_batch,
                "gradient_accumulation_steps": configuration.accumulation(job.global_batch),
            }
        zero = self._zero(job, configuration, draft)
        if zero:
            changes["zero_optimization"] = zero
        client = job.frame.client_optimizer
        if zero.get("stage") and (client or "deepspeed_config" in job.placeholders):
            # The user's own optimizer is as exact under ZeRO as without it.
            changes["zero_allow_untested_optimizer"] = True
        if zero.get("offload_optimizer"):
            changes |= self._optimizer_on_host(job)
        return merge(changes, declared)

    def _zero(
        self, job: ScriptTraining, configuration: Configuration, draft: Draft
    ) -> dict[str, Any]:
        zero: dict[str, Any] = {}
        if draft.offers["zero_stage"].turned:
            zero["stage"] = configuration.zero_stage
            if zero["stage"] != 3:  # nowhere else does DeepSpeed take it
                zero["offload_param"] = None
        if draft.offers[_SECOND_COPY].turned:
            near = configuration.get(_SECOND_COPY)
            zero[_SECOND_COPY] = None if near == KNOBS[_SECOND_COPY].default else near
        rendered = render_deepspeed_config(configuration, job)["zero_optimization"]
        for knob, section in OFFLOADS.items():
            if draft.offers[knob].turned:
                zero[section] = rendered.get(section)
                # DeepSpeed refuses the old spelling beside the new one.
                zero |= {old: None for old in OLD_OFFLOADS[section] if old in job.frame.zero}
        return zero

    def _optimizer_on_host(self, job: ScriptTraining) -> dict[str, Any]:
        optimizer = job.frame.config.get("optimizer") or {}
        if job.frame.client_optimizer or not optimizer:
            return {"zero_force_ds_cpu_optimizer": False}
        if (optimizer.get("params") or {}).get("torch_adam"):
            # The same update by DeepSpeed's kernel for the host, which it insists on.
            return {"optimizer": {"params": {"torch_adam": False}}}
        return {}
