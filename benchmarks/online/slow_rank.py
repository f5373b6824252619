"""A data-parallel training of which one rank is slowed in the middle: SECONDS, what slows it.

`nice N HOG`: a lower priority, and HOG busy processes on all cores; `quota SHARE`: a control group
that leaves its process this share of a core (version 1, root); `sleep SHARE`: it sleeps this share
of its own step in each; `none`; `stall SECONDS`: all ranks sleep now and then, and rank 0 evaluates
and saves. It prints steps, beginning and end of the part before,
the slowed one and the part after.
"""

import os
import subprocess
import sys
import time

import torch
import torch.distributed as dist
from torch import nn

GROUPS = "/sys/fs/cgroup/cpu"
BUSY = "while True: pass"


def slow_down(way: str, amount: float) -> None:
    """Slow this process down, or end that with an amount of 0."""
    if way == "nice":
        os.setpriority(os.PRIO_PROCESS, 0, int(amount))
    elif way == "quota":
        folder = f"{GROUPS}/joulefront-{os.getpid()}"
        os.makedirs(folder, exist_ok=True)
        for name, value in (
            ("cpu.cfs_period_us", "100000"),
            ("cpu.cfs_quota_us", str(int(100000 * amount) or -1)),
            ("cgroup.procs", str(os.getpid())),
        ):
            with open(f"{folder}/{name}", "w", encoding="ascii") as file:
                file.write(value)


def main() -> None:
    """Train."""
    seconds, way = float(sys.argv[1]), sys.argv[2]
    amount, more = float((*sys.argv[3:], "0")[0]), (*sys.argv[4:], "0", "0")[0]
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(rank)
    model = nn.parallel.DistributedDataParallel(
        nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 512), nn.Linear(512, 8))
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    # More ranks than cores share them: each then computes little and sleeps for the rest.
    nap_s = 0.0 if world <= len(os.sched_getaffinity(0)) else 0.03
    x = torch.randn(256 if nap_s == 0 else 32, 256)
    told = []
    over = torch.zeros(1)
    for part, share in enumerate((0.5, 1.0, 0.5)):
        slowed = part == 1 and rank == world - 1
        hogs = []
        if rank == world - 1 and way in ("nice", "quota"):
            slow_down(way, amount if slowed else 0)
        if slowed:
            hogs = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(int(more))]
        began_s, steps = time.monotonic(), 0
        while not over[0]:
            own_s = time.monotonic()
            time.sleep(nap_s)
            loss = model(x).pow(2).mean()
            if slowed and way == "sleep":
                time.sleep(amount * (time.monotonic() - own_s) * 1.5)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            steps += 1
            if part == 1 and way == "stall" and steps % 40 == 0:
                time.sleep(amount)
            if part == 1 and way == "stall" and steps % 200 == 0 and rank == 0:
                time.sleep(2 * amount)
            if steps % 10 == 0:
                over[0] = float(time.monotonic() - began_s > share * seconds)
                dist.broadcast(over, 0)
        over[0] = 0
        told.append(f"{steps} {began_s:.4f} {time.monotonic():.4f}")
        for hog in hogs:
            hog.kill()
    if rank == 0:
        print("parts", *told, flush=True)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
