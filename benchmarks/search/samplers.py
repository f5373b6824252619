"""Samplers of the benchmark, by name."""

from __future__ import annotations

# Each enters its samplers in PEERS.
from benchmarks.search import peers, peers_botorch  # noqa: F401
from benchmarks.search.ask_tell import PEERS, AskTellPlanner
from benchmarks.search.names import OURS, STOCK
from tuner.models.job_prior import prior_of
from tuner.problem.problem import ProbeCost
from tuner.recordings.table import PredictedBy
from tuner.search.candidate_planner import CandidatePlanner
from tuner.search.planner import ProbePlanner
from tuner.search.sampler import StockPlanner
from tuner.search_spaces.space import Candidates

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
#: Every sampler that can be named.
NAMES = (OURS, *STOCK, *PEERS, WITH_MODELS)


def planner_named(
    name: str,
    candidates: Candidates,
    cost: ProbeCost,
    seed: int,
    recorded: PredictedBy | None = None,
) -> ProbePlanner:
    """Return the planner of a sampler of the benchmark.

    Args:
        recorded: the job and the cluster behind the candidates, which `WITH_MODELS` needs.

    Raises:
        ValueError: there is no sampler of this name.
    """
    if name == OURS:
        return CandidatePlanner(candidates, seed=seed)
    if name == WITH_MODELS:
        assert recorded is not None
        return CandidatePlanner(
            candidates,
            prior=prior_of(recorded.job, recorded.cluster),
            seed=seed,
            memory_bytes=float(recorded.cluster.device.memory_bytes),
        )
    if name in PEERS:
        entered = PEERS[name].make(candidates, cost, seed)
        return AskTellPlanner(candidates, entered)
    if name in STOCK:
        return StockPlanner(candidates, STOCK[name](seed), seed=seed)
    raise ValueError(f"{name!r} is none of {', '.join(NAMES)}")
