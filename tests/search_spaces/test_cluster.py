"""Facts about devices and clusters."""

from dataclasses import replace

import pytest

from tuner.models.analytic.constants import origin_of
from tuner.models.analytic.model import known_error_lines
from tuner.search_spaces.cluster import (
    device_names,
    device_tables,
    devices_called,
    load_cluster,
    load_device,
)
from tuner.search_spaces.data_files import catalogue
from tuner.search_spaces.errors import InputError


def test_a_core_shares_the_memory_of_its_host() -> None:
    core, gpu = load_cluster("cpu-2").device, load_device("H100-SXM-80GB")
    assert (core.is_gpu, core.plural, core.memory_limit_bytes) == (False, "cores", None)
    assert (gpu.is_gpu, gpu.plural, gpu.memory_limit_bytes) == (True, "GPUs", gpu.memory_bytes)
    assert replace(gpu, memory_bytes=0).memory_limit_bytes is None  # unknown, and no limit of 0
    assert (core.has_own_memory, gpu.has_own_memory) == (False, True)
    beside = replace(gpu, shares_host_memory=True)  # one memory, of which the GPU tells its part
    assert beside.has_own_memory


def test_only_a_program_on_cores_is_kept_from_the_gpus_beside_them() -> None:
    core, gpu = load_cluster("cpu-2").device, load_device("H100-SXM-80GB")
    assert core.hiding == {"CUDA_VISIBLE_DEVICES": ""}
    assert gpu.hiding == {}


# ---- devices


@pytest.mark.parametrize("name", device_names())
def test_each_device_has_sources_and_a_usual_node(name: str) -> None:
    device, table = load_device(name), device_tables()[name]
    said = " ".join(device.sources)
    for figure in ("peak_flops", "memory", "idle_W|idle power|power"):
        whole = "all else" in said or "half of AMD's data sheet" in said
        assert whole or any(word in said for word in figure.split("|")), figure
    if device.is_gpu:
        assert catalogue("nodes")[table["node"]]["host_link_Bps"] > 0
        assert devices_called(name)[0] == name
        # Boards made for graphics have half of their tensor cores' rate of 16 bits without these.
        # 8 bits are at most twice as fast.
        assert device.peak_flops / 35 < device.fp32_flops < device.peak_flops / 1.9
        assert device.fp8_flops == 0 or 1.8 < device.fp8_flops / device.peak_flops < 2.2


@pytest.mark.parametrize(
    ("said", "name"),
    [
        ("NVIDIA H100 80GB HBM3", "H100-SXM-80GB"),
        ("NVIDIA H100 PCIe", "H100-PCIe-80GB"),
        ("NVIDIA H100 NVL", "H100-NVL-94GB"),
        ("NVIDIA GH200 480GB", "GH200-96GB"),
        ("NVIDIA GH200 144G HBM3e", "GH200-144GB"),
        ("NVIDIA A100-SXM4-40GB", "A100-SXM-40GB"),
        ("NVIDIA A100-PCIE-40GB", "A100-PCIe-40GB"),
        ("NVIDIA A100 80GB PCIe", "A100-PCIe-80GB"),
        ("NVIDIA B300 SXM6 AC", "B300-SXM-288GB"),
        ("NVIDIA L40", "L40-48GB"),
        ("NVIDIA A10G", "A10G-24GB"),
        ("NVIDIA RTX A6000", "RTX-A6000-48GB"),
        ("NVIDIA RTX 6000 Ada Generation", "RTX-6000-Ada-48GB"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", "RTX-PRO-6000-Blackwell-96GB"),
        ("NVIDIA GeForce RTX 4090", "RTX-4090-24GB"),
        ("Tesla V100-PCIE-32GB", "V100-PCIe-32GB"),
        ("Tesla T4", "T4-16GB"),
        ("AMD Instinct MI300X OAM", "MI300X-192GB"),
        ("a100-80", "A100-SXM-80GB"),
        ("h100sxm5", "H100-SXM-80GB"),
        ("a10080gb", "A100-SXM-80GB"),
        # Others than these: a part of a card, or one of the same number.
        ("NVIDIA GeForce RTX 4090 Laptop GPU", None),
        ("NVIDIA GeForce RTX 4090 D", None),
        ("NVIDIA GeForce RTX 3090 Ti", None),
        ("NVIDIA RTX PRO 6000 Blackwell Max-Q Workstation Edition", None),
        ("NVIDIA A400", None),
        ("MI300A", None),
        ("NVIDIA GB2000", None),
        ("RTX", None),
        ("80GB", None),
        ("SXM", None),
        ("", None),
        ("h" * 100_000, None),
    ],
)
def test_a_device_is_known_by_what_people_and_drivers_call_it(said: str, name: str | None) -> None:
    assert next(iter(devices_called(said)), None) == name


@pytest.mark.parametrize(
    ("name", "origin", "words"),
    [
        ("A100-SXM-80GB", "published", "step time: median"),
        ("B200-SXM-180GB", "published", "set to published runs on it"),
        ("RTX-4090-24GB", "scaled", "those of all NVIDIA GPUs, scaled by its data sheet"),
        ("MI300X-192GB", "guessed", "those of NVIDIA GPUs, a guess"),
    ],
)
def test_the_origin_of_constants_is_said(name: str, origin: str, words: str) -> None:
    device = load_device(name)
    assert origin_of(device) == origin
    assert words in known_error_lines(device)[0]


# ---- nodes in a word


@pytest.mark.parametrize(
    ("text", "nodes", "each", "device"),
    [
        ("8xH100", 1, 8, "H100-SXM-80GB"),
        ("2x8xH100-SXM", 2, 8, "H100-SXM-80GB"),
        ("1xRTX4090", 1, 1, "RTX-4090-24GB"),
        ("2x4xL40S", 2, 4, "L40S-48GB"),
        ("8xMI300X", 1, 8, "MI300X-192GB"),
        ("h100x8", 1, 8, "H100-SXM-80GB"),
        ("8*h100", 1, 8, "H100-SXM-80GB"),
        ("8 × B200", 1, 8, "B200-SXM-180GB"),
        ("8 x H100 SXM5 80GB", 1, 8, "H100-SXM-80GB"),
        ("8 NVIDIA H100 80GB HBM3", 1, 8, "H100-SXM-80GB"),
        ("2 nodes of 4 L40S", 2, 4, "L40S-48GB"),
        ("4090", 1, 1, "RTX-4090-24GB"),
        ("2x4090", 1, 2, "RTX-4090-24GB"),
        ("4090x2", 1, 2, "RTX-4090-24GB"),
        ("1000x8xH100", 1000, 8, "H100-SXM-80GB"),
        ("4xMI250", 1, 8, "MI250-64GB"),  # two dies a board
    ],
)
def test_a_node_is_described_in_a_word(text: str, nodes: int, each: int, device: str) -> None:
    cluster = load_cluster(text)
    assert (cluster.nodes, cluster.devices_per_node) == (nodes, each)
    assert cluster.device.name == device
    again = load_cluster(cluster.name)
    assert (again.name, again.devices) == (cluster.name, cluster.devices)


def test_a_described_node_has_the_links_of_the_built_in_one() -> None:
    for text, name in (("8xH200", "h200-8"), ("4x8xH100", "h100-32"), ("8xB200", "b200-8")):
        described, built_in = load_cluster(text), load_cluster(name)
        same = ("device", "devices", "link_Bps", "network_Bps", "host_link_Bps", "link_mesh")
        same += ("host_memory_bytes", "clock_control")
        for figure in same:
            assert getattr(described, figure) == getattr(built_in, figure), (text, figure)


def test_what_is_assumed_of_a_node_is_said_and_can_be_stated() -> None:
    assumed = load_cluster("8xH100").assumed
    assert "H100-SXM-80GB is meant, not H100-PCIe-80GB or H100-NVL-94GB" in assumed
    assert assumed.endswith(
        "; 450 GB/s between its GPUs, 50 GB/s a GPU between nodes, 64 GB/s to the host, "
        "2,199 GB of host memory (yours: --cluster 8xH100-SXM-80GB,host_memory_bytes=2.2e12)"
    )
    stated = load_cluster("2x8xH100-SXM,network_Bps=12.5e9,clock_control=false")
    assert (stated.network_Bps, stated.clocks_MHz) == (12.5e9, ())
    assert "between nodes" not in stated.assumed
    assert "--cluster 2x8xH100-SXM-80GB,host_memory_bytes=2.2e12" in stated.assumed
    assert load_cluster(stated.name) == stated
    every = "link_Bps=1e9,network_Bps=1e9,host_link_Bps=1e9,host_memory_bytes=1e12"
    assert load_cluster(f"1xT4,{every}").assumed == ""


@pytest.mark.parametrize("text", ["2x4xL40S", "1xRTX4090", "8xMI300X", "3x2xT4", "1xGB10"])
def test_what_is_assumed_of_a_node_is_short_and_what_it_names_can_be_given(text: str) -> None:
    cluster = load_cluster(text)
    figures = cluster.assumed.rpartition("; ")[2]
    assert len(figures) < 170
    assert "Bps=" not in figures.partition("(")[0]
    yours = figures.partition("--cluster ")[2].rstrip(")")
    again = load_cluster(yours)
    key = yours.partition(",")[2].partition("=")[0]
    assert getattr(again, key) == pytest.approx(getattr(cluster, key), rel=0.01)
    assert f"{key}=" not in again.assumed
    assert ("between its GPUs" in figures) == (cluster.devices_per_node > 1)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("0xH100", ["number of devices of a node", "is 0", "above 0"]),
        ("3.5xH100", ["is 3.5", "whole number"]),
        ("-8xH100", ["is -8"]),
        ("٨xH100", ["whole number"]),
        ("2x0x8", ["unknown device"]),
        ("999999999x8xH100", ["nodes of cluster", "100,000"]),
        ("8xH101", ["unknown device 'H101'", "H100", "memory_bytes", "docs/adding-a-gpu.md"]),
        ("8xTPUv5e", ["unknown device 'TPUv5e'", "toml"]),
        ("8xRTX", ["unknown device 'RTX'"]),
        ("8xH100,foo=3", ["'foo'", "network_Bps"]),
        ("8xH100,network_Bps", ["'network_Bps'", "NAME=VALUE"]),
        ("8xH100,network_Bps=fast", ["'fast'", "a number"]),
        ("8xH100,link_Bps=nan", ["link_Bps", "nan"]),
        ("8xH100,link_Bps=-1", ["link_Bps", "-1"]),
        ("8xH100,host_memory_bytes=inf", ["'inf'", "a number"]),
        ("8xH100,nodes=3", ["'nodes'"]),
        ("8xH100,link_mesh=yes", ["'yes'", "true or false"]),
        ("h100-8", ["no cluster 'h100-8'", "8xH100"]),
        ("8x", ["unknown cluster '8x'", "8xH100"]),
        ("8xH100.toml", ["unknown cluster '8xH100.toml'", "path of a toml file"]),
    ],
)
def test_a_description_that_is_none_is_one_sentence(text: str, words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        load_cluster(text)
    said = str(error.value)
    assert [word for word in words if word not in said] == []
