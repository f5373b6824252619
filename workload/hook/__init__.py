"""The hook: joulefront's code inside a training process, on the standard library alone.

It runs between the node agent and the training program, in each rank that `fork_server.py` forks.
It counts whole optimizer steps, reports each to the agent, and halts at the boundaries the agent
names: it finishes the device's work, reports the boundary, and waits for the command to continue.
The training program needs no change.

The program may use the hook: `import joulefront_hook` gives this package, `configuration()` returns
the configuration of this launch, `phase(name)` marks the part of a step that begins, `step()`
counts a step that neither DeepSpeed nor a torch optimizer takes, and `live(name, function)`
registers what sets a live knob between steps. Other programs get the configuration through their
arguments to `deepspeed.initialize`. Outside a probe, `joulefront_hook/__main__.py run SCRIPT ...`
starts a script with the same settings and counts nothing.

In a rank it is loaded by path under the name `joulefront_hook`, elsewhere it is
`tuner.workload.hook`. Its modules import each other relatively, so they work under both names and
cannot collide with a user's modules.

Wire (a line of text each way, over a Unix socket):
    rank to agent   hello RANK PID [WORLD] (of a rank that the agent did not start) · step N T ·
                    ready N T (own share of step N done) · at N T M · phase NAME T · facts JSON ·
                    peak JSON · set JSON (what was read back) · fail JSON · end ·
                    imports PID JSON (words of a process that may become a rank)
    agent to rank   run N (continue until N steps are done) · set JSON (values of live knobs, for
                    the steps from here on) · quit
T is CLOCK_MONOTONIC, which all processes of a node share; M are the micro-batches since the last
boundary, 0 if the program's accumulation cannot be set.
"""

from .attachment import ATTACH, attach
from .batch_counts import GROUPS
from .engine import merge, micro_batches, other_split, parse_config, split_differently
from .program import main, run_rank
from .state import NotAsRequested, configuration, live, phase
from .watching import step

__all__ = [
    "ATTACH",
    "GROUPS",
    "NotAsRequested",
    "attach",
    "configuration",
    "live",
    "main",
    "merge",
    "micro_batches",
    "other_split",
    "parse_config",
    "phase",
    "run_rank",
    "split_differently",
    "step",
]
