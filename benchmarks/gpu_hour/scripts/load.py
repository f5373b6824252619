"""A square wave of load on one GPU, whose edges show how fast its sensors follow: WAVE FILE."""

import json
import sys
import time

import torch

cuda = torch.cuda.is_available()
size = 8192 if cuda else 512
matrix = torch.randn(size, size, device="cuda" if cuda else "cpu", dtype=torch.bfloat16)


def busy(seconds):
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        for _ in range(4):
            matrix @ matrix
        if cuda:
            torch.cuda.synchronize()


busy(0.5)
edges = []
for on_s, off_s in json.loads(sys.argv[1]):
    began = time.monotonic()
    busy(on_s)
    edges.append((began, time.monotonic()))
    time.sleep(off_s)
with open(sys.argv[2], "w") as file:
    json.dump(edges, file)
