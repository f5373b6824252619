"""The start of one node's ranks: their files, environment, processes and logs."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tuner.search_spaces.cluster import Cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.fields import whole_number
from tuner.search_spaces.job import TrainingJob
from tuner.search_spaces.safe_files import (
    make_folder,
    open_plain,
    private_folder,
    without_secrets,
    write_text,
)
from tuner.workload import hook
from tuner.workload.hook import ATTACH
from tuner.workload.node.clocks.base import Governor
from tuner.workload.node.host import core_ranges, granted_cores, oom_kills
from tuner.workload.node.measure.window import IdlePower
from tuner.workload.node.meters import Meter
from tuner.workload.node.meters.base import Ticker
from tuner.workload.node.platforms import Platform, platform_of
from tuner.workload.node.rank_group import GONE, CommandGroup, ServerError, with_entry
from tuner.workload.node.rank_server import RankServer, RankSpec
from tuner.workload.records.probe import INSPECTIONS, Failure, ProbeRequest, shown_by
from tuner.workload.scripts.command import Start
from tuner.workload.scripts.declared_knobs import read_at_start
from tuner.workload.scripts.evidence import explained_exit
from tuner.workload.scripts.job import LaunchableJob, launchable
from tuner.workload.scripts.script_facts import LINES
from tuner.workload.scripts.secrets import revealed

LOG_TAIL_LINES = 20
#: Folder of what loads the hook into each Python below a command.
ENTRY = Path(hook.__file__).parent / "entry"
#: What reads a command's line, as users' job scripts have it.
SHELL = shutil.which("bash") or "/bin/sh"
#: A rank's log that grows beyond this is cut, ...
LOG_LIMIT_BYTES = 64 << 20
#: ... of which so much is kept.
KEPT_BYTES = 1 << 20
PERIOD_S = 0.25
#: Variables that describe a task of another launcher, such as the one that started this process: a
#: rank would take them for its own (Slurm; PMI, PMIx, Open MPI, MVAPICH, Intel MPI, Cray, jsrun).
_TASK = re.compile(r"(PMI_|PMIX_(?!MCA)|OMPI_COMM_|MV2_COMM_|MPI_LOCAL|PALS_|JSM_NAMESPACE_)\w+")
_SLURM_TASK = re.compile(
    r"SLURM_(STEP\w+|NTASKS\w*|NPROCS|TASKS_PER_NODE|PROCID|LOCALID|NODEID|GTIDS|TASK_PID)"
)


@dataclass(frozen=True)
class ProbeNode:
    """A node's devices and settings, which its runner lends to a probe."""

    job: TrainingJob
    cluster: Cluster
    run_dir: Path
    server: RankServer
    meter: Meter
    governor: Governor
    program: Path | None
    new_interpreter: bool
    keep: bool
    step_limit_s: float | None
    cancelled: threading.Event
    prepare: Callable[[Sequence[str]], object]  # opens the run folder, loads DeepSpeed ops
    #: Raises InvalidConfiguration if a request cannot run on some number of nodes.
    check: Callable[[ProbeRequest, int], None]
    idle: IdlePower = field(default_factory=IdlePower)


@dataclass(frozen=True)
class Place:
    """Position of one node's ranks among all ranks of a probe.

    `master` is where rank 0 gathers them; an empty `interface` leaves it to the framework.
    """

    first: int
    ranks: int
    master: tuple[str, int]
    interface: str = ""


class RankLaunch:
    """The start of the ranks of one probe on one node.

    Args:
        part: its folder below the probe's.
        job: what is started, by default the node's job.
    """

    def __init__(
        self,
        node: ProbeNode,
        request: ProbeRequest,
        *,
        part: str = "",
        job: LaunchableJob | None = None,
    ) -> None:
        self.job = job or launchable(node.job, node.cluster, node.program)
        self.node, self.configuration = node, Configuration(request.launch)
        self._request, self._platform = request, platform_of(node.cluster)
        self.folder = node.run_dir / "probes" / request.probe_id / part
        self.environment: dict[str, Any] = {}
        self._oom_kills_before = 0

    def start(self) -> Start:
        """Write the probe's files and return the command of its ranks."""
        make_folder(self.folder, inside=self.node.run_dir)
        if self._request.inspects:
            alter = self._request.purpose == INSPECTIONS[0]
            return self.job.inspection_start(self.configuration, self.folder, alter=alter)
        return self.on_node(self.job.start(self.configuration, self.folder))

    def on_node(self, start: Start) -> Start:
        """Return a start with the variables that ranks need on this node."""
        return replace(start, env={**self.job.node_environment(self.configuration), **start.env})

    def specs(self, address: str, place: Place) -> list[RankSpec]:
        """Write the files and describe this node's ranks, which report to `address`."""
        self._oom_kills_before = oom_kills()
        private_folder(self.node.run_dir)
        start = self.start()
        if not Path(start.cwd).is_dir():
            raise InputError(
                f"{socket.gethostname()} has no folder {start.cwd}; a script's folder must stand "
                "at the same path on every node, on a shared file system or as a copy"
            )
        world = self.configuration.world_size
        fork_unsafe = self.node.server.fork_unsafe or read_at_start(self.node.job.knobs)
        new_interpreter = self.node.new_interpreter or bool(fork_unsafe)
        self.environment |= {
            "deepspeed_config": start.config,
            "argv": list(start.words),
            "ranks": world,
            "fresh_interpreter": new_interpreter,
        }
        if fork_unsafe:
            self.environment["why_fresh_interpreter"] = fork_unsafe
        options = dict(start.options)
        cores = sorted(os.sched_getaffinity(0))
        granted = granted_cores()
        self.environment |= {"cores": granted, "affinity": core_ranges(cores)}
        if why := self._platform.why_few_cores(granted, place.ranks):
            raise InputError(why)
        bound = self._bound(place.ranks)
        given = start.env.get("OMP_NUM_THREADS", "")
        threads = whole_number(given) or self.job.threads_today
        threads = max(1, min(threads, len(cores) // max(place.ranks, 1)))
        specs, node_rank = [], place.first // max(place.ranks, 1)
        for rank in range(place.first, place.first + place.ranks):
            log = self.folder / f"rank{rank}.log"
            log.unlink(missing_ok=True)
            own = bound[rank - place.first] if bound else {}
            if not own and (kept := self._platform.rank_cores(rank - place.first, cores, threads)):
                own = {"cpus": kept}
            specs.append(
                RankSpec(
                    argv=start.argv(rank, world, rank - place.first, node_rank),
                    env={
                        **self._rank_env(rank, world, place, len(own.get("cpus", ()))),
                        **start.environment(rank, world, rank - place.first, node_rank),
                        **own.pop("env", {}),
                    },
                    log=str(log),
                    cwd=start.cwd,
                    **own,
                    address=address,
                    new_interpreter=new_interpreter,
                    options=options,
                )
            )
        return specs

    def start_command(self, listener: socket.socket, address: str) -> CommandGroup:
        """Write the files and start the whole command, whose ranks report to `address`."""
        rank_count = 0 if self._request.inspects else self.configuration.world_size
        return self.node.server.spawn_command(self._command(address), listener, rank_count)

    def _command(self, address: str) -> RankSpec:
        self._oom_kills_before = oom_kills()
        private_folder(self.node.run_dir)
        start = self.start()
        self.environment |= {
            "deepspeed_config": start.config,
            "argv": [start.command],
            "ranks": self.configuration.world_size,
            "as_it_stands": True,
            "cores": granted_cores(),
        }
        log = self.folder / "rank0.log"
        log.unlink(missing_ok=True)
        order = self.folder / "attach.json"
        spec = {"address": address, "options": dict(start.options), "python": sys.executable}
        write_text(order, json.dumps(spec))
        line = with_entry(revealed(start.command, start.secrets), str(ENTRY))
        hiding = self.node.cluster.device.hiding
        own = {**_own_environment(), **hiding, **start.environment(0, 1)}
        env = {**own, ATTACH: str(order.resolve())}
        env |= entry_variables(env)
        if self._request.inspects:
            env["JOULEFRONT_LINES"] = str(self.folder.resolve() / LINES)
        return RankSpec(
            argv=(SHELL, "-c", line),
            env=env,
            log=str(log),
            cwd=start.cwd,
            address=address,
            command=True,
        )

    def _bound(self, ranks: int) -> list[dict[str, Any]]:
        job, platform = self.job, self._platform
        rule = job.binding(self.configuration)
        if not rule:
            return []
        by_command = job.launcher is not None  # by the user's own command
        bound, why = bound_ranks(
            rule, self.node.server, ranks, platform=platform, by_command=by_command
        )
        binding = {"rule": rule, "cpus": [core_ranges(own["cpus"]) for own in bound]}
        self.environment["binding"] = binding | ({"why_not": why} if why else {})
        if rule.startswith("cores:"):  # DeepSpeed's launcher sets it, too
            return [own | {"env": {"OMP_NUM_THREADS": str(len(own["cpus"]))}} for own in bound]
        return bound

    def _inherited_env(self, node_rank: int) -> dict[str, str]:
        launcher = self.job.launcher
        numbered = launcher is not None and launcher.numbers_tasks
        env = {
            name: text
            for name, text in self.node.server.env.items()
            if not _TASK.fullmatch(name) and (numbered or not _SLURM_TASK.fullmatch(name))
        }
        if "NODE_RANK" in env:
            env["NODE_RANK"] = str(node_rank)
        # By this variable of torchrun's, Lightning and others recognise ranks that were started.
        return (
            env
            if launcher is not None and launcher.kind
            else {**env, "TORCHELASTIC_RUN_ID": "joulefront"}
        )

    def _rank_env(self, rank: int, world: int, place: Place, own: int = 0) -> Mapping[str, str]:
        each = max(place.ranks, 1)
        env = self._inherited_env(place.first // each) | {
            "RANK": str(rank),
            "LOCAL_RANK": str(rank - place.first),
            "WORLD_SIZE": str(world),
            "LOCAL_WORLD_SIZE": str(place.ranks),
            "LOCAL_SIZE": str(place.ranks),
            "MASTER_ADDR": place.master[0],
            "MASTER_PORT": str(place.master[1]),
            "GROUP_RANK": str(place.first // each),
            "GROUP_WORLD_SIZE": str(world // each),
            "GLOO_SOCKET_IFNAME": place.interface,
            "TOKENIZERS_PARALLELISM": "false",
            "PYTHONUNBUFFERED": "1",
        }
        if not place.interface:
            del env["GLOO_SOCKET_IFNAME"]
        env.pop("PYTORCH_NVML_BASED_CUDA_CHECK", None)  # only the fork server needs it
        return {**env, **self._platform.rank_environment(env, each, own, place.interface)}

    def explain_exit(self, rank: int, code: int) -> Failure:
        """Explain an exit without an exception."""
        if code == GONE and oom_kills() > self._oom_kills_before:
            code = -9
        if code == GONE:  # a rank of a command; its launcher knows more
            return Failure("crash", f"the process of rank {rank} is gone")
        if code == -9 and oom_kills() > self._oom_kills_before:
            message = f"the kernel killed rank {rank}: the host ran out of memory"
            return Failure(shown_by("no memory"), message)
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        if not self.job.as_it_stands:
            return Failure("crash", f"rank {rank} {how}")
        return Failure("crash", explained_exit(code, self.log_tail()) or f"the command {how}")

    def log_tail(self) -> str:
        """Return the last lines of a rank's log, of one with an error if there is one."""
        tails = []
        for path in sorted(self.folder.glob("rank*.log")):
            with path.open("rb") as file:
                file.seek(max(0, path.stat().st_size - 16384))
                lines = file.read().decode(errors="replace").splitlines()
            tails.append("\n".join(lines[-LOG_TAIL_LINES:]))
        return most_informative(tails)


def _own_environment() -> dict[str, str]:
    # Return the user's environment for a command, without what an agent in Ray's worker adds.
    added = re.compile(r"RAY_\w+|JOULEFRONT_\w+")
    return {n: text for n, text in without_secrets(os.environ).items() if not added.fullmatch(n)}


def entry_variables(env: Mapping[str, str]) -> dict[str, str]:
    """Return the variables by which the hook is loaded into each Python below a command."""
    paths = filter(None, [str(ENTRY), env.get("PYTHONPATH", "")])
    variables = {"PYTHONPATH": os.pathsep.join(paths), "BASH_ENV": str(ENTRY / "bash_env")}
    return variables | ({"JOULEFRONT_BASH_ENV": env["BASH_ENV"]} if env.get("BASH_ENV") else {})


def most_informative(tails: Iterable[str]) -> str:
    """Return the first of some ends of logs with an error, else the first, else ""."""
    return min(tails, key=lambda text: "Traceback" not in text and "Error" not in text, default="")


@contextlib.contextmanager
def reserved_port(address: str = "127.0.0.1") -> Iterator[int]:
    """Keep a free TCP port of this node for rank 0 until the context ends.

    The socket is bound and does not listen; rank 0 may bind it too, because both set
    SO_REUSEADDR, as torch's TCPStore does (man 7 socket).
    """
    with socket.socket() as holder:
        holder.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        holder.bind((address, 0))
        yield int(holder.getsockname()[1])


@contextlib.contextmanager
def bounded_logs(folder: Path, environment: MutableMapping[str, Any]) -> Iterator[None]:
    """Keep ranks' logs from filling the disk while inside; note in `environment` if one was cut.

    A log that exceeds a limit is cut to its end repeatedly, because its last lines explain a
    failure. Ranks append to their logs, so they continue at the new end. A script that prints as
    fast as the disk allows may overshoot the limit by what it prints in a quarter of a second.
    """

    def cut() -> None:
        for path in folder.glob("rank*.log"):
            with contextlib.suppress(OSError):
                if path.stat().st_size <= LOG_LIMIT_BYTES:
                    continue
                with open(open_plain(path, os.O_APPEND), "r+b") as file:
                    file.seek(-KEPT_BYTES, os.SEEK_END)
                    end = file.read(KEPT_BYTES)
                    file.truncate(0)
                    file.write(end)
                environment[path.name] = (
                    f"more than {LOG_LIMIT_BYTES >> 20} MiB were printed; the end is kept"
                )

    ticker = Ticker(cut, period_s=PERIOD_S, name="joulefront-logs")
    try:
        yield
    finally:
        ticker.stop()


def bound_ranks(
    rule: str, server: RankServer, ranks: int, *, platform: Platform, by_command: bool
) -> tuple[list[dict[str, Any]], str]:
    """Return the ranks' binding, and the reason for none; InputError if a requested one is
    impossible.
    """
    try:
        nodes = platform.memory_nodes()
        if rule.startswith("numa:") and nodes is None:
            raise ServerError("torch asks CUDA for the memory node of each GPU, and there is none")
        bound = server.bind(rule, ranks, nodes or [])
        granted = os.sched_getaffinity(0)
        if other := {core for own in bound for core in own["cpus"]} - granted:
            raise ServerError(
                f"cores {core_ranges(other)} are not among {core_ranges(granted)}, which may be "
                "used here"
            )
        return bound, ""
    except ServerError as error:
        why = str(error).strip().splitlines()[0]
    if by_command:
        kind, _, value = rule.partition(":")
        option = f"--numa-binding {value}" if kind == "numa" else "--bind_cores_to_rank"
        raise InputError(
            f"{option} cannot be applied on this node: {why}; leave it out of the command"
        )
    return [], why
