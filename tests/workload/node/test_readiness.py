"""What `tuner doctor` finds missing, and the exact lines that an administrator is given."""

from __future__ import annotations

import errno
import hashlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest

from benchmarks.figures import ROOT
from tests.support.sysfs import make_sysfs
from tests.twin import TwinGpu, TwinNode
from tuner.cli.main import main
from tuner.search_spaces.fields import JSON_SCHEMA
from tuner.search_spaces.plugins import install_command
from tuner.workload.node.clocks import guard
from tuner.workload.node.clocks.cpu import CpuGovernor
from tuner.workload.node.host import why_shm_is_small
from tuner.workload.node.platforms.base import (
    PROGRAMS,
    Program,
    missing_clocks,
    missing_of_cores,
    missing_parts,
)

Make = Callable[..., TwinNode]
PACKAGES = dict.fromkeys(("torch", "deepspeed", "transformers"), "1.0")
PROGRAMS_HERE = {program.name: f"/usr/bin/{program.name}" for program in PROGRAMS}
GIB = 2**30


class TestClocks:
    def test_each_way_has_its_line_where_it_exists(self) -> None:
        plain = "\n".join(missing_clocks({}).lines)
        assert "systemctl enable --now zeusd" in plain
        assert "ZEUSD_SOCK_PATH=/run/zeusd/zeusd.sock" in plain
        assert hashlib.sha256(Path(guard.__file__).read_bytes()).hexdigest() in plain
        assert '/usr/local/sbin/joulefront-guard ""\'' in plain  # and no words of the caller's
        assert "slurm" not in plain
        here = "\n".join(missing_clocks({"SLURM_JOB_ID": "7"}).lines)
        assert "srun --gpu-freq=MHZ" in here

    def test_cores_name_the_files_to_open(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        root = make_sysfs(tmp_path / "sys")
        assert list(missing_of_cores(CpuGovernor(root, cpus=range(4), guarded=False), "")) == []

        def refuse(path: Path, text: str) -> int:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))

        monkeypatch.setattr(Path, "write_text", refuse)
        governor = CpuGovernor(root, cpus=range(4), guarded=False)
        found = list(missing_of_cores(governor, "chgrp energy F; chmod g+r F"))
        assert found[0].lines == ("chgrp energy F; chmod g+r F",)
        assert "policy*/scaling_max_freq" in found[1].lines[0]
        assert "intel-rapl:*/constraint_1_power_limit_uw" in found[2].lines[0]

    def test_a_virtual_machine_lacks_nothing(self, tmp_path: Path) -> None:
        governor = CpuGovernor(tmp_path, guarded=False)
        assert list(missing_of_cores(governor, "")) == []


class TestParts:
    def test_a_machine_with_all_of_them_lacks_nothing(self) -> None:
        assert list(missing_parts(PACKAGES, PROGRAMS_HERE, gpus=0, cores=1, shm_bytes=0)) == []

    def test_packages_and_compilers(self) -> None:
        found = list(
            missing_parts(
                {**PACKAGES, "torch": None},
                {**PROGRAMS_HERE, "g++": None, "ninja": None},
                gpus=0,
                cores=1,
                shm_bytes=GIB,
            )
        )
        assert [thing.subject.partition(",")[0] for thing in found] == ["torch", "g++", "ninja"]
        (line,) = found[0].lines
        assert line.startswith(f"{install_command('train')} (before it torch's CPU build")
        assert found[1].lines == ("apt-get install g++",)

    def test_torch_with_cuda_is_right_where_there_are_gpus(self) -> None:
        lacking = {**PACKAGES, "torch": None}
        found = [*missing_parts(lacking, PROGRAMS_HERE, gpus=1, cores=8, shm_bytes=GIB)]
        assert found[0].lines == (install_command("train"),)
        no_deepspeed = {**PACKAGES, "deepspeed": None}  # there is a torch already
        found = [*missing_parts(no_deepspeed, PROGRAMS_HERE, gpus=0, cores=8, shm_bytes=GIB)]
        assert found[0].lines == (install_command("train"),)

    @pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.name)
    def test_each_program_is_named_with_what_it_brings_and_what_installs_it(
        self, program: Program
    ) -> None:
        here = {name: path for name, path in PROGRAMS_HERE.items() if name != program.name}
        (missing,) = missing_parts(PACKAGES, here, gpus=0, cores=1, shm_bytes=GIB)
        assert missing.text() == [
            f"missing   {program.name}, {program.brings}",
            f"          {program.line}",
        ]

    def test_shared_memory_of_a_container(self) -> None:
        """Docker's 64 MiB are too small for two ranks, and one needs none."""
        said = why_shm_is_small(64 * 2**20, 8)
        assert said.startswith("/dev/shm has 64 MiB, and 8 ranks need 2048 MiB")
        assert "--shm-size=2048m" in said
        assert "/dev/shm is missing" in why_shm_is_small(0, 2)
        assert why_shm_is_small(64 * 2**20, 1) == ""
        assert why_shm_is_small(2 * GIB, 8) == ""


@pytest.mark.slow
@pytest.mark.parametrize("root", [True, False])
def test_doctor_ends_with_what_is_missing_and_exit_code_1(
    root: bool, twin_node: Make, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "tuner.workload.node.platforms.nvidia.Nvidia.why_not_torch", lambda *a, **k: ""
    )
    twin_node(TwinGpu(), root=root)
    code = main(["doctor"])
    short = capsys.readouterr().out
    assert short.startswith("verdict ")
    assert ("missing   permission to set the clocks" in short) is not root
    assert main(["doctor", "-v"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert code == (0 if root else 1)
    if root:
        assert lines[0].startswith("verdict   ready")
    else:
        (at,) = (n for n, line in enumerate(lines) if line.startswith("missing"))
        assert "permission to set the clocks" in lines[at]
        assert any("visudo" in line or "sudoers" in line for line in lines[at:])
        assert "clocks    not permitted" in lines
    assert len(lines) <= 20
    main(["doctor", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert (answer["schema"], answer["ready"]) == (JSON_SCHEMA, root)


def test_the_published_sum_of_the_guard_is_that_of_this_release() -> None:
    """After a change of the guard, put the sum that this test shows into SECURITY.md."""
    total = hashlib.sha256(Path(guard.__file__).read_bytes()).hexdigest()
    text = (ROOT / "SECURITY.md").read_text(encoding="utf-8")
    assert f"\n{total}  joulefront-guard\n" in text
