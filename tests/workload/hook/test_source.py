"""Integers that a program's parser returns, whichever it is, those at their defaults too."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

HEAD = "import json, sys\nfrom tuner.workload.hook import source\nsource.watch_arguments()\n"
TAIL = "\nprint(json.dumps(source.arguments()))"
ARGPARSE = """
import argparse
parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", type=int, default=16)
parser.add_argument("--accum", type=int, default=2)
parser.add_argument("--rate", type=float, default=1.0)
parser.add_argument("--fast", action="store_true")
parser.parse_args()
"""
CLICK = """
import click
@click.command()
@click.option("-b", "--batch-size", default=16)
@click.option("--accum", default=2)
@click.option("--rate", default=1.0)
@click.option("--fast", is_flag=True)
def main(**given): pass
main(standalone_mode=False)
"""
ABSL = """
from absl import flags
flags.DEFINE_integer("batch_size", 16, "")
flags.DEFINE_integer("accum", 2, "")
flags.DEFINE_float("rate", 1.0, "")
flags.DEFINE_bool("fast", False, "")
flags.FLAGS(sys.argv)
"""
FIRE = """
import fire
def main(batch_size=16, accum=2, rate=1.0, fast=False): pass
fire.Fire(main)
"""
TYRO_FUNCTION = """
import tyro
def main(batch_size: int = 16, accum: int = 2, rate: float = 1.0, fast: bool = False): pass
tyro.cli(main)
"""
PROGRAMS = {
    **{"argparse": ARGPARSE, "click": CLICK, "absl": ABSL, "fire": FIRE, "tyro": TYRO_FUNCTION}
}
TABLES = """
from dataclasses import dataclass, field
@dataclass
class Data:
    batch_size: int = 16
    name: str = "16"
@dataclass
class Args:
    data: Data = field(default_factory=Data)
    accum: int = 2
    rate: float = 1.0
"""
TYRO = f"{TABLES}\nimport tyro\ntyro.cli(Args)"
SIMPLE_PARSING = f"{TABLES}\nimport simple_parsing\nsimple_parsing.parse(Args)"
JSONARGPARSE = f"{TABLES}\nimport jsonargparse\njsonargparse.CLI(Args, as_positional=False)"
HYDRA = f"""{TABLES}
import hydra
from hydra.core.config_store import ConfigStore
ConfigStore.instance().store(name="config", node=Args)
@hydra.main(version_base=None, config_name="config")
def main(config): pass
main()
"""
#: Of parts of a command: the option of its batch, and the program.
IN_PARTS = {
    "tyro": ("--data.batch-size", TYRO),
    "simple_parsing": ("--batch_size", SIMPLE_PARSING),
    "jsonargparse": ("--data.batch_size", JSONARGPARSE),
    "hydra": ("data.batch_size=", HYDRA),
}


def every(program: str, *words: str) -> dict[str, Any]:
    command = [sys.executable, "-c", HEAD + program + TAIL, *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def read(program: str, *words: str) -> dict[str, Any]:
    return {n: each for n, each in every(program, *words).items() if n in ("batch_size", "accum")}


@pytest.mark.parametrize("name", PROGRAMS)
def test_integers_are_read_where_they_stand_at_their_defaults(name: str) -> None:
    pytest.importorskip(name)
    option = "--batch-size" if name in ("argparse", "click", "tyro") else "--batch_size"
    for words, values in (((), [16, 2]), ((option, "8"), [8, 2]), ((f"{option}=8",), [8, 2])):
        found = read(PROGRAMS[name], *words)
        assert [each["value"] for each in found.values()] == values
        assert option in found["batch_size"]["options"]
        assert found["accum"]["options"] == ["--accum"]


@pytest.mark.parametrize("name", IN_PARTS)
def test_integers_in_the_parts_of_a_command_have_dotted_names(name: str, tmp_path: Path) -> None:
    pytest.importorskip(name)
    option, program = IN_PARTS[name]
    program = f"import os\nos.chdir({str(tmp_path)!r})\n{program}"  # Hydra writes what it composed
    typed = f"{option.rstrip('=')}=8"
    for words, value in (((), 16), ((typed,), 8)):
        found = every(program, *words)
        batches = [each for n, each in found.items() if n.endswith("data.batch_size")]
        assert [each["value"] for each in batches] == [value]
        assert option in batches[0]["options"]
        assert [each["value"] for n, each in found.items() if n.endswith("accum")] == [2]
        assert not [n for n in found if n.endswith(("name", "rate"))]


def test_both_ways_of_writing_an_option_of_tyro_set_it() -> None:
    pytest.importorskip("tyro")
    for option in ("--data.batch-size", "--data.batch_size"):
        found = every(TYRO, option, "4")["data.batch_size"]
        assert found == {"options": ["--data.batch-size", "--data.batch_size"], "value": 4}


@pytest.mark.parametrize("name", ["tyro", "jsonargparse"])
def test_what_another_parser_refuses_is_the_programs_own_error(name: str) -> None:
    pytest.importorskip(name)
    option, program = IN_PARTS[name]
    command = [sys.executable, "-c", HEAD + program + TAIL, option, "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "x" in done.stderr + done.stdout


def test_a_positional_argument_of_click_has_no_option() -> None:
    pytest.importorskip("click")
    program = CLICK.replace('@click.option("-b", "--batch-size", default=16)', "").replace(
        "@click.command()", '@click.command()\n@click.argument("batch_size", type=int)'
    )
    assert read(program, "4")["batch_size"] == {"options": [], "value": 4}


def test_what_a_parser_refuses_is_the_programs_own_error() -> None:
    command = [sys.executable, "-c", HEAD + ARGPARSE + TAIL, "--batch-size", "x"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert "invalid int value: 'x'" in done.stderr


def named(program: str) -> dict[str, int]:
    head = "import json\nfrom tuner.workload.hook import source\n"
    tell = "\ndef tell(): print(json.dumps(source.batches(running=True)))\n"
    command = [sys.executable, "-c", head + tell + program]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, int] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize(
    ("program", "found"),
    [
        ("batch_size = 6\ntell()", {"batch_size": 6}),
        ("def main():\n    batch_size = 6\n    tell()\nmain()", {"batch_size": 6}),
        ("class Config:\n    bsz = 6\ntell()", {"Config.bsz": 6}),
        ("settings = {'batch_size': 6, 3: 4}\ntell()", {"settings.batch_size": 6}),
        (
            "class Job:\n    def train(self):\n        self.batch_size = 6\n        tell()\n"
            "Job().train()",
            {"self.batch_size": 6},
        ),
        # What is over, what counts batches, and what is no number of samples.
        ("def made():\n    batch_size = 6\nmade()\ntell()", {}),
        ("for batch in range(1, 4): pass\ntell()", {}),
        ("batch_size = True\nbs = 0\nbatch_size_of = 3\ntell()", {}),
        ("class Odd:\n    @property\n    def __dict__(self): 1 / 0\nodd = Odd()\ntell()", {}),
    ],
)
def test_variables_that_are_named_as_a_batch(program: str, found: dict[str, int]) -> None:
    assert named(program) == found


def test_a_function_of_a_measured_program_is_not_asked_for_its_variables() -> None:
    """Its frame would keep the tensors of that step for as long as it runs."""
    program = (
        "import gc, weakref\nclass Big: pass\n"
        "def main():\n    batch_size, big = 6, Big()\n    gone = weakref.ref(big)\n"
        "    tell()\n    del big\n    gc.collect()\n    assert gone() is None\nmain()"
    )
    assert named(program.replace("tell()", "print(json.dumps(source.batches()))")) == {}
