"""Samplers of the benchmark, by name."""

from __future__ import annotations

import math

# Each enters its samplers in PEERS.
from benchmarks.search import external, peers, peers_botorch  # noqa: F401
from benchmarks.search.ask_tell import PEERS, AskTellPlanner
from benchmarks.search.names import OURS, STOCK
from benchmarks.search.problems import Problem
from benchmarks.search.recorded_priors import RECORDED_PRIORS
from tuner.models.analytic.model import AnalyticModel, Prior
from tuner.problem.probe_cost import ProbeCost
from tuner.problem.settings import SamplerDesign
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.planner import ProbePlanner
from tuner.search.stock import StockPlanner
from tuner.search_spaces.candidates import Candidates
from tuner.workload.table import PredictedBy

#: Samplers that may sweep the live settings of a launch.
SWEEPING = tuple(name for name, entry in PEERS.items() if entry.sweeps)
DEFAULT_SAMPLERS = (
    OURS,
    "tpe",
    "nsgaii",
    "random",
    "tpe-sweep",
    "nsgaii-sweep",
    "random-sweep",
    "hill-climb",
)
#: Ours with the analytic models of what a table recorded.
WITH_MODELS = f"{OURS}+models"
#: Ours with a prior made of the table as its models: exact ("truth"), or wrong in a known way.
WITH_RECORDED = {f"{OURS}+{kind}": kind for kind in RECORDED_PRIORS}
WITH_TRUTH = f"{OURS}+truth"
#: Our sampler with one design choice left out or made otherwise.
ABLATIONS = {
    "no-sweep": SamplerDesign(max_live=1, extend_launches=False),
    "a-setting-at-a-time": SamplerDesign(max_live=1),
    "fill-every-slot": SamplerDesign(in_flight_share=math.inf),
    "sweep-chosen-at-launch": SamplerDesign(extend_launches=False),
    "no-cost": SamplerDesign(cost_weight=0.0),
    "start-of-2-launches": SamplerDesign(start_launches=2),
    "start-of-4-launches": SamplerDesign(start_launches=4),
}
#: Every sampler that can be named.
NAMES = (
    OURS,
    *STOCK,
    *PEERS,
    WITH_MODELS,
    *WITH_RECORDED,
    *ABLATIONS,
)


def planner_named(
    name: str,
    candidates: Candidates,
    cost: ProbeCost,
    seed: int,
    recorded: PredictedBy | None = None,
    problem: Problem | None = None,
    prior: Prior | None = None,
) -> ProbePlanner:
    """Return the planner of a sampler of the benchmark.

    Args:
        recorded: the job and the cluster behind the candidates, which `WITH_MODELS` needs.
        problem: of the table, which `WITH_RECORDED` needs.
        prior: the models that `OURS` has.
    """
    if name == OURS and prior is not None:
        return CandidatePlanner(candidates, prior=prior, seed=seed)
    if name in WITH_RECORDED:
        assert problem is not None
        prior = RECORDED_PRIORS[WITH_RECORDED[name]](problem)
        return CandidatePlanner(candidates, prior=prior, seed=seed)
    if name == WITH_MODELS:
        assert recorded is not None
        return CandidatePlanner(
            candidates,
            prior=AnalyticModel(recorded.job, recorded.cluster),
            seed=seed,
            memory_bytes=float(recorded.cluster.device.memory_bytes),
        )
    if name in ABLATIONS:
        return CandidatePlanner(candidates, seed=seed, design=ABLATIONS[name])
    if name in PEERS:
        entered = PEERS[name].make(candidates, cost, seed)
        return AskTellPlanner(candidates, entered)
    if name in STOCK:
        return StockPlanner(candidates, STOCK[name](seed), seed=seed)
    return CandidatePlanner(candidates, seed=seed)
