"""What stands of ours inside a training process: one package, on the standard library alone.

It stands between the node agent and the training program, in each rank that `fork_server.py` forks.
It counts whole optimizer steps, tells the agent of each, and halts at the boundaries the agent
names: it finishes the device's work, says "boundary", and goes on when told. The training program
itself need know nothing of it.

The program may use it all the same: `import joulefront_hook` gives this package, `configuration()`
says what it is started under, `phase(name)` marks the part of a step that begins, and `step()`
counts a step where neither DeepSpeed nor a torch optimizer takes one. A program that asks nothing
gets the configuration through what it passes to `deepspeed.initialize`. Outside a probe,
`joulefront_hook/__main__.py run SCRIPT ...` starts a script with the same settings and counts
nothing.

In a rank it is loaded by path under the name `joulefront_hook`, here it is `workload.hook`: its
modules import each other relatively, so they serve under both names, and in a user's process none
of them can be taken for a module of the user's, or hide one.

Wire (a line of text each way, over a Unix socket):
    rank to agent   hello RANK PID · step N T · at N T · phase NAME T · facts JSON · peak JSON ·
                    fail JSON · end
    agent to rank   run N (go on until N steps are done) · quit
T is CLOCK_MONOTONIC, which all processes of a node share.
"""

from .engine import merge, micro_batches, split_differently
from .program import main, run_rank
from .state import NotAsAsked, configuration, phase
from .watching import step

__all__ = [
    "NotAsAsked",
    "configuration",
    "main",
    "merge",
    "micro_batches",
    "phase",
    "run_rank",
    "split_differently",
    "step",
]
