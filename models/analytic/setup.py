"""Job, cluster and constants together, as every term of the analytic models reads them."""

from __future__ import annotations

from dataclasses import dataclass

from tuner.models.analytic.constants import Constants
from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.model_facts import ModelFacts, facts_of
from tuner.search_spaces.program import Program, StateBytes

#: Tensor-core peak in bf16 over the fp32 peak without tensor cores, for a device whose file does
#: not state the latter: 16 on A100, 15 on H100, 8 on V100, 4 on A40 (NVIDIA data sheets).
TENSOR_OVER_FP32 = 16.0


#: Peak of TF32 products as a share of the bf16 peak, on Ampere and Hopper (NVIDIA data sheets).
TF32_SHARE = 0.5


@dataclass(frozen=True)
class Setup:
    """Job on a cluster."""

    job: TrainingJob
    facts: ModelFacts
    cluster: Cluster
    constants: Constants
    peak_flops: float  # peak of the job's precision on one device, FLOP/s
    element: float  # bytes of an activation, a gradient or a communicated parameter
    program: Program

    @classmethod
    def of(
        cls, job: TrainingJob, cluster: Cluster, constants: Constants, program: Program
    ) -> Setup:
        """Return the setup of a job on a cluster."""
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
    def states(self) -> StateBytes:
        """Bytes of weights, gradients and optimizer states per trained parameter."""
        return self.program.state_bytes(self.job.precision)

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
