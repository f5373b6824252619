"""Job, cluster and constants together, as every term of the analytic models reads them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from tuner.models.analytic.constants import Constants
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.model_facts import ModelFacts, facts_of

#: Tensor-core peak in bf16 over the fp32 peak without tensor cores, for a device whose file does
#: not state the latter: 16 on A100, 15 on H100, 8 on V100, 4 on A40 (NVIDIA data sheets).
TENSOR_OVER_FP32 = 16.0


#: Peak of TF32 products as a share of the bf16 peak, on Ampere and Hopper (NVIDIA data sheets).
TF32_SHARE = 0.5


@dataclass(frozen=True, kw_only=True)
class Program:
    """What a training program does that no knob states.

    Attributes:
        fused_attention: True if attention runs in a fused kernel, which stores no scores and skips
            those that the causal mask hides.
        tf32: True if fp32 products run on tensor cores (torch.backends.cuda.matmul.allow_tf32, or
            TORCH_ALLOW_TF32_CUBLAS_OVERRIDE, which NVIDIA's PyTorch containers set).
        dropout: what drops values, whose masks are kept: "none", "hidden" (the outputs of a block's
            two halves, in a model without gate), or "all" (scores too, if attention stores them).
        copies: number of copies of a rank's parameters that the engine keeps beside them.
        logits: False if the program makes no logits (its loss reads the last block's output).
        vocabulary_parallel_loss: True for Megatron-LM's loss, whose passes over the logits are
            kernels of their own.
        sequence_sharded: True if tensor-parallel ranks divide what is between their products, too
            (Megatron's --sequence-parallel; torchtitan always does).
        fused_blocks: True if norms keep their input alone and a gated MLP its two inputs and their
            product (Transformer Engine, Megatron-Core).
        fp32_gradients: True if gradients accumulate in fp32 (Megatron's
            --accumulate-allreduce-grads-in-fp32, its default in bf16).
        fused_loss: True if the loss keeps 16-bit logits and their gradient in their place.
    """

    fused_attention: bool = True
    tf32: bool = False
    dropout: Literal["none", "hidden", "all"] = "all"
    copies: int = 0
    logits: bool = True
    vocabulary_parallel_loss: bool = False
    sequence_sharded: bool = False
    fused_blocks: bool = False
    fp32_gradients: bool = False
    fused_loss: bool = False


@dataclass(frozen=True)
class Setup:
    """Job on a cluster.

    Attributes:
        peak_flops: peak of the job's precision on one device, FLOP/s.
        element: bytes of an activation, a gradient or a communicated parameter.
    """

    job: TrainingJob
    facts: ModelFacts
    cluster: Cluster
    constants: Constants
    peak_flops: float
    element: float
    program: Program

    @classmethod
    def of(
        cls, job: TrainingJob, cluster: Cluster, constants: Constants, program: Program
    ) -> Setup:
        """Return the setup of a job on a cluster.

        Raises:
            InputError: the job's model lacks a size.
        """
        fp32 = job.precision == "fp32"
        # PyTorch multiplies fp32 matrices without tensor cores unless the program allows TF32
        # (torch.backends.cuda.matmul.allow_tf32 is False by default), and the training program does
        # not. A CPU's stated peak is assumed to be that of the job's precision.
        device = cluster.device
        peak = device.peak_flops
        if fp32 and device.type == "cuda":
            plain = device.fp32_flops or peak / TENSOR_OVER_FP32
            peak = TF32_SHARE * peak if program.tf32 else plain
        return cls(
            job=job,
            facts=facts_of(job),
            cluster=cluster,
            constants=constants,
            peak_flops=peak,
            element=4.0 if fp32 else 2.0,
            program=program,
        )

    @property
    def bandwidth_Bps(self) -> float:
        """Memory bandwidth that a stream reaches on one device, bytes per second."""
        return self.constants.memory_efficiency * self.cluster.device.memory_bandwidth_Bps

    @property
    def flops_per_s(self) -> float:
        """Rate that a large matrix product reaches on one device, FLOP/s."""
        return self.constants.matrix_efficiency * self.peak_flops

    @property
    def host_link_Bps(self) -> float:
        """Bandwidth reached to host memory, bytes per second, of 25 GB/s if none is stated."""
        return self.constants.host_link_efficiency * (self.cluster.host_link_Bps or 2.5e10)
