"""Releases of packages that the built-in program needs, as a whole and for values of its knobs.

Scripts of users are tuned from the releases on that pyproject.toml declares. Each row was looked up
in the releases themselves: the first that has what the program imports, or does.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.knobs import KNOBS, Value
from tuner.workload.scripts.installed import installed_version, release_of


@dataclass(frozen=True)
class Need:
    """First release of a package that supports a value of a knob.

    Attributes:
        knob: name of a knob; empty for the whole program.
    """

    package: str
    since: str
    knob: str = ""

    def concerns(self, knob: str, value: Value | None) -> bool:
        """Return True if a value of a knob needs the release: any but the default."""
        return knob == self.knob and value != KNOBS[knob].default

    def why_not(self) -> str:
        """Return a phrase if an older release is installed, else ""."""
        here = installed_version(self.package)
        if here is None or release_of(here) >= release_of(self.since):
            return ""
        return f"needs {self.package} {self.since} or later, and {here} is installed"


#: Before transformers 5 `_init_weights` leaves buffers and some norms of a model that was built
#: without weights as they are, so that its losses are not a number.
PROGRAM = Need("transformers", "5.0")
#: For deepspeed.runtime.sequence_parallel.parallel_state_sp.
NEEDS = (Need("deepspeed", "0.17", "sequence_parallel"),)


def why_not_program() -> str:
    """Return one sentence if the installed packages cannot run the built-in program, else ""."""
    why = PROGRAM.why_not()
    return why and f"the built-in program {why}; update it, or tune a script of your own"


def why_not(configuration: Configuration) -> list[str]:
    """Return why the installed packages cannot run a configuration, a phrase each."""
    concerned = (need for need in NEEDS if need.concerns(need.knob, configuration.get(need.knob)))
    return [f"{need.knob} {why}" for need in concerned if (why := need.why_not())]


def unsupported_values() -> list[tuple[str, str, Callable[[str, Value], bool]]]:
    """Return unsupported knobs: the name, the reason, and a test of a value."""
    return [(need.knob, why, need.concerns) for need in NEEDS if (why := need.why_not())]
