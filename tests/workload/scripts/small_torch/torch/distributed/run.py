"""A stand-in for torchrun: it starts the processes of one node, and numbers them."""

import argparse
import os
import subprocess
import sys


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--nproc_per_node", "--nproc-per-node", default="1")
    parser.add_argument("--nnodes", type=int, default=1)
    parser.add_argument("--standalone", action="store_true")
    parser.add_argument("--use_env", action="store_true")
    parser.add_argument("--no-python", "--no_python", action="store_true")
    parser.add_argument("-m", "--module", action="store_true")
    parser.add_argument("program", nargs=argparse.REMAINDER)
    own = parser.parse_args()
    each = 2 if own.nproc_per_node in ("gpu", "auto", "cpu") else int(own.nproc_per_node)
    front = [] if own.no_python else [sys.executable, "-u", *(["-m"] if own.module else [])]
    ranks = []
    for rank in range(each):
        numbers = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": each * own.nnodes}
        env = {**os.environ, **{name: str(number) for name, number in numbers.items()}}
        env.setdefault("OMP_NUM_THREADS", "1")
        ranks.append(subprocess.Popen([*front, *own.program], env=env))
    return max(rank.wait() for rank in ranks)


if __name__ == "__main__":
    sys.exit(main())
