"""Does a job fit: every answer is checked against the models' memory of neighbouring choices."""

from dataclasses import replace

import numpy as np
import pytest

from tuner.models.analytic.model import AnalyticModel
from tuner.models.memory_margin import MemoryMargin
from tuner.planner.fit import LIKELY, SURE, Fit, fit
from tuner.search_spaces.cluster import Cluster, enlarged, load_cluster
from tuner.search_spaces.configuration import Configuration, Settings
from tuner.search_spaces.errors import InputError, InvalidConfiguration, UnknownName
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.rules import broken_rules
from tuner.search_spaces.space import SearchSpace, load_space

JOB, CLUSTER = load_job("qwen2.5-7b"), load_cluster("a100-8")
CAPACITY = CLUSTER.device.memory_bytes


def peak(configuration: Configuration, *, job=JOB, cluster=CLUSTER) -> float:
    return float(AnalyticModel(job, cluster).memory_bytes([configuration])[0])


def chance(peak_bytes: float) -> float:
    return float(MemoryMargin(CAPACITY).probability_of_fitting([peak_bytes])[0])


@pytest.fixture(scope="module")
def roomy() -> Fit:
    return fit(JOB, cluster=CLUSTER, configuration="dp8 mb1 zero3 ckpt-full")


@pytest.fixture(scope="module")
def tight() -> Fit:
    return fit(JOB, cluster=CLUSTER, configuration="dp8 mb4 zero0")


def test_parts_sum_to_the_predicted_peak(roomy: Fit) -> None:
    assert roomy.memory_bytes == pytest.approx(peak(roomy.configuration))
    assert roomy.spare_bytes == pytest.approx(CAPACITY - peak(roomy.configuration))
    parameters = 2 * 7_615_616_512  # transformers' count, in 16 bits
    assert roomy.parts["parameters"] == parameters / 8
    assert roomy.parts["gradients"] == parameters / 8
    assert roomy.parts["optimizer"] == 6 * parameters / 8


def test_the_largest_micro_batch_has_room_and_the_next_one_has_not(roomy: Fit) -> None:
    share = JOB.global_batch // 8
    sizes = [n for n in range(1, share + 1) if share % n == 0]
    most = roomy.micro_batch
    for least, found in ((LIKELY, most.likely), (SURE, most.sure)):
        fitting = [
            n
            for n in sizes
            if chance(peak(Configuration.parse(f"dp8 mb{n} zero3 ckpt-full"))) >= least
        ]
        assert found == max(fitting)
    assert 1 < most.sure < share


def test_the_longest_sequence_has_room_and_the_next_step_has_not(roomy: Fit) -> None:
    for least, tokens in (
        (LIKELY, roomy.sequence_length.likely),
        (SURE, roomy.sequence_length.sure),
    ):
        here, beyond = (
            chance(peak(roomy.configuration, job=replace(JOB, sequence_length=n)))
            for n in (tokens, tokens + 128)
        )
        assert here >= least > beyond
    assert not roomy.sequence_length.capped


def test_learned_positions_bound_the_sequence() -> None:
    said = fit("opt-350m", cluster="a100-8", configuration="dp8 mb1 zero1")
    assert (said.sequence_length.likely, said.sequence_length.capped) == (2048, True)


def test_changes_are_the_fastest_by_their_number_of_knobs_the_fastest_first(tight: Fit) -> None:
    assert not tight.fits
    *_, smallest = tight.changes
    space = load_space("full")
    launches = [
        Configuration(launch)
        for launch in dict.fromkeys(space.candidates(JOB, CLUSTER).launches)
        if Configuration(launch).world_size == 8
    ]
    said = AnalyticModel(JOB, CLUSTER).predict(launches)
    sure = MemoryMargin(CAPACITY).probability_of_fitting(said.memory_bytes) >= SURE
    sure &= said.host_memory_bytes <= CLUSTER.host_memory_bytes
    knobs = np.array(
        [sum(c.get(n) != tight.configuration.get(n) for n in c.launch) for c in launches]
    )
    fewest = knobs[sure].min()
    assert len(smallest.knobs) == fewest
    for change in tight.changes:
        of_as_many = sure & (knobs == len(change.knobs))
        assert change.step_time_s == pytest.approx(said.step_time_s[of_as_many].min())
        assert chance(peak(change.configuration)) == pytest.approx(change.probability)
        assert not broken_rules(change.configuration, JOB, CLUSTER)
    times = [change.step_time_s for change in tight.changes]
    assert times == sorted(times)


def test_the_cheapest_change_costs_the_least_though_an_offload_alone_would_do() -> None:
    said = fit("qwen2.5-7b", cluster="a100-8", configuration="dp8 mb2 zero1")
    first, *slower = said.changes
    assert all(first.time_ratio < change.time_ratio for change in slower)
    assert [change.knobs for change in slower] == [("activation_offload",)]
    assert len(first.knobs) > 1


def test_what_surely_fits_needs_no_change(roomy: Fit) -> None:
    assert roomy.probability >= SURE
    assert roomy.changes == ()


def test_fewest_gpus_have_room_and_fewer_have_not() -> None:
    said = fit(
        "lmm-72b", cluster="h100-32", configuration="dp32 mb1 zero3 ckpt-full", space="default"
    )
    job, cluster = load_job("lmm-72b"), load_cluster("h100-32")
    capacity = cluster.device.memory_bytes
    assert said.fewest_gpus is not None
    gpus, change = said.fewest_gpus
    assert change.configuration.world_size == gpus
    here = enlarged(cluster, gpus)
    assert peak(change.configuration, job=job, cluster=here) <= capacity
    fewer = enlarged(cluster, gpus // 2)
    launches = [
        Configuration(launch)
        for launch in dict.fromkeys(load_space("default").candidates(job, fewer).launches)
        if Configuration(launch).world_size <= gpus // 2
    ]
    predicted = AnalyticModel(job, fewer).predict(launches)
    room = predicted.memory_bytes <= capacity
    room &= predicted.host_memory_bytes <= cluster.host_memory_bytes
    assert not room.any()
    assert said.fewest_replicas == 64


def test_gpus_choose_the_configuration_of_a_part_of_the_cluster() -> None:
    assert fit("opt-350m", cluster="a100-8", gpus=2).configuration.world_size == 2


def test_a_full_host_does_not_fit() -> None:
    small = replace(CLUSTER, host_memory_bytes=2**33)
    said = fit(JOB, cluster=small, configuration="dp8 mb1 zero3 optim-cpu ckpt-full")
    assert said.memory_bytes < CAPACITY
    assert (said.fits, said.probability) == (False, 0.0)
    assert said.changes[0].configuration.get("optimizer_offload") == "none"


def test_ranks_of_a_cpu_node_share_its_memory() -> None:
    cluster = load_cluster("cpu-2")
    both, one = (fit("tiny-gpt", cluster=cluster, configuration=c) for c in ("dp2 mb4", "dp1 mb4"))
    assert one.capacity_bytes == 2 * both.capacity_bytes == 2 * cluster.device.memory_bytes


@pytest.mark.parametrize(
    ("words", "error"),
    [
        ({"configuration": "tp16"}, InvalidConfiguration),
        ({"configuration": "quick"}, InputError),
        ({"gpus": 12}, InputError),
        ({"gpus": 0}, InputError),
        ({"space": "nothing"}, UnknownName),
        ({"cluster": "nothing"}, UnknownName),
    ],
)
def test_nonsense_is_refused(words: dict[str, object], error: type[Exception]) -> None:
    with pytest.raises(error):
        fit(JOB, **{"cluster": CLUSTER, **words})  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("knobs", "bytes_each"),
    [
        ("dp8 mb1 zero3", 2),  # gathered in 16 bits by DeepSpeed
        ("dp8 mb1 zero0 fsdp2", 4),  # fp32 on the shards of FSDP
        ("dp8 mb1 zero2", 0),  # every rank has the parameters
    ],
)
def test_a_whole_model_is_saved_through_the_first_ranks_host(knobs: str, bytes_each: int) -> None:
    prediction = fit("qwen2.5-7b", configuration=knobs, cluster="a100-8")
    assert prediction.saving_bytes == bytes_each * prediction.parameter_count


def test_only_launches_on_as_many_gpus_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    listed: list[int | None] = []
    plain = SearchSpace.groups

    def groups(
        self: SearchSpace, job: TrainingJob, cluster: Cluster, *, gpus: int | None = None
    ) -> object:
        listed.append(gpus)
        return plain(self, job, cluster, gpus=gpus)

    monkeypatch.setattr(SearchSpace, "groups", groups)
    found = fit(JOB, cluster=CLUSTER, configuration="dp8 mb4 zero0")
    assert found.changes
    assert set(listed) == {8}
    assert found.fewest_gpus is not None
    assert max(n for n in listed if n) == 8


@pytest.mark.parametrize("name", ["qwen2.5-7b", "olmoe-1b-7b"])
def test_every_launch_has_a_lighter_one_among_those_that_decide_a_size(name: str) -> None:
    """A size is passed over by fewer launches than it has, and none of the others may fit there."""
    job = load_job(name)
    model = AnalyticModel(job, CLUSTER)
    launches = [Configuration(each) for each, _ in load_space("full").groups(job, CLUSTER)]
    peaks = np.column_stack(model.peaks(launches))
    place = {launch.launch: at for at, launch in enumerate(launches)}
    lighter = {"activation_offload": "sync"}
    for launch, bytes_here in zip(launches, peaks, strict=True):
        changed = {knob: other for knob, other in lighter.items() if launch.get(knob) == "async"}
        settings = Settings(launch.launch, micro_batch=1, **changed)
        assert settings in place, settings.key
        assert (peaks[place[settings]] <= bytes_here * (1 + 1e-12)).all(), settings.key
