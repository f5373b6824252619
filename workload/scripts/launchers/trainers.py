"""TRL, LLaMA-Factory and Axolotl, which train by transformers' Trainer with arguments of their own.

LLaMA-Factory and Axolotl start torchrun or accelerate with a module of theirs, which is written out
here after their sources.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from tuner.search_spaces.errors import InputError
from tuner.workload.scripts.launchers.kinds import (
    Kind,
    Read,
    Typed,
    Vendor,
    read_words,
)
from tuner.workload.scripts.script_facts import Launcher


class _Trl(Vendor):
    """`trl COMMAND`, which starts a script of its own by accelerate."""

    name = "trl"
    commands = ("trl",)
    written_back = False


class _LlamaFactory(Kind):
    """`llamafactory-cli train` (0.9.4): its module under torchrun, on NPROC_PER_NODE devices."""

    name = "llamafactory"
    commands = ("llamafactory-cli", "llamafactory", "lmf")
    written_back = False

    def read(self, typed: Typed) -> Read:
        words, environment = typed.words, typed.environment
        if len(words) < 3 or words[1] != "train":
            raise InputError(
                "of llamafactory-cli's commands only `llamafactory-cli train FILE` trains"
            )
        nodes = environment.get("NNODES") or "1"
        if not nodes.isdigit() or not int(nodes):
            raise InputError(f"NNODES={nodes} is no number of nodes")
        env = {}
        if environment.get("OPTIM_TORCH", "1").lower() in ("true", "y", "1"):
            # What it sets for torch's DDP.
            allocator = "expandable_segments:True"
            env = {"PYTORCH_CUDA_ALLOC_CONF": allocator, "TORCH_NCCL_AVOID_RECORD_STREAMS": "1"}
        text = environment.get("NPROC_PER_NODE", "")
        each, nodes_count = int(text) if text.isdigit() else 0, int(nodes)
        launcher = Launcher(self.name, words[:2], words[2:], each, env, nodes=nodes_count)
        return ("-m", "llamafactory.launcher", *words[2:]), launcher


class _Axolotl(Kind):
    """`axolotl train`, after axolotl/cli/main.py and utils/train.py (0.12).

    It starts its module `axolotl.cli.train` by accelerate, torchrun or python (`--launcher`); what
    follows `--` is the launcher's.
    """

    name = "axolotl"
    commands = ("axolotl",)
    written_back = False

    def read(self, typed: Typed) -> Read:
        words = typed.words
        if len(words) < 3 or words[1] != "train" or words[2].startswith("-"):
            raise InputError("of axolotl's commands only `axolotl train FILE` trains")
        own, for_launcher = list(words[2:]), []
        if "--" in own:
            cut = own.index("--")
            own, for_launcher = own[:cut], own[cut + 1 :]
        by, kept = "accelerate", []
        for word in _pairs(own):
            name, _, value = word.partition("=")
            if name in ("--sweep", "--cloud"):
                raise InputError(f"axolotl train {name} starts other runs than one; leave it out")
            if name == "--launcher":
                by = value
            elif name in ("--num-processes", "--main-process-port"):
                for_launcher = [name.replace("-p", "_p"), value, *for_launcher]
            else:
                kept.append(word)
        starts = {"accelerate": ["accelerate", "launch"]}
        starts |= {name: [name] for name in ("torchrun", "python")}
        if by not in starts:
            raise InputError(f"axolotl's launcher is accelerate, torchrun or python, not {by!r}")
        command = [*starts[by], *for_launcher, "-m", "axolotl.cli.train", *kept]
        script, launcher = read_words(command, typed.cwd, typed.environment)
        launcher = launcher or Launcher("", processes=1)
        return script, replace(launcher, kind=self.name, words=words[:2], script=words[2:])


def _pairs(words: Sequence[str]) -> list[str]:
    joined: list[str] = []
    for word in words:
        if joined and joined[-1].startswith("--") and "=" not in joined[-1] and word[:2] != "--":
            joined[-1] += f"={word}"
        else:
            joined.append(word)
    return joined
