"""Plug-ins of other distributions: the entry points of one socket, loaded and checked.

A socket of joulefront is a protocol of a few methods. What is shipped stands in a table of the
socket; another distribution adds to it by an entry point of the socket's group. A plug-in that
cannot be used is described in one sentence, and everything else works without it.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from importlib.metadata import EntryPoint, PackageNotFoundError, distribution, entry_points
from types import ModuleType
from typing import Any
from urllib.parse import unquote, urlsplit

from tuner.search_spaces.errors import InputError


def install_command(extra: str) -> str:
    """Return "pip install 'joulefront[dashboard]'", or the folder it was installed from in place
    of the name (PEP 610, direct_url.json)."""
    return f"pip install '{_installed_from() or 'joulefront'}[{extra}]'"


def _installed_from() -> str:
    try:
        text = distribution("joulefront").read_text("direct_url.json")
    except PackageNotFoundError:  # a source tree on PYTHONPATH
        return ""
    if not text:
        return ""
    found = json.loads(text)
    url = urlsplit(str(found.get("url", "")))
    return unquote(url.path) if url.scheme == "file" and "dir_info" in found else ""


#: Attribute of a plug-in that names the version of the socket's protocol that it follows.
VERSION = "PROTOCOL"


@dataclass(frozen=True)
class Socket:
    """A place where other distributions plug in.

    Attributes:
        group: group of the entry points.
        kind: what one is called in sentences, such as "command".
        protocol: version of the protocol, which a plug-in names as its attribute `PROTOCOL`.
        methods: names that a plug-in must have as callables.
        shipped: what this package has, as "module" or "module:attribute" by name. A plug-in takes
            none of these names.
    """

    group: str
    kind: str
    protocol: int
    methods: tuple[str, ...]
    shipped: Mapping[str, str] = field(default_factory=dict, compare=False)

    def part(self, name: str) -> Any:
        """Import what is shipped under a name; return None if its extra is not installed here."""
        module, _, attribute = self.shipped[name].partition(":")
        found = shipped_module(module)
        return getattr(found, attribute) if found is not None and attribute else found

    def needed(self, name: str, what: str) -> Any:
        """Return what is shipped under a name; InputError, by `what` needs it, if it is missing."""
        if (part := self.part(name)) is None:
            raise not_installed(what)
        return part

    @property
    def parts(self) -> list[Any]:
        """What is shipped and installed here, in the order of the table."""
        return [part for name in self.shipped if (part := self.part(name)) is not None]

    @cached_property
    def plugins(self) -> Plugins:
        """The plug-ins of other distributions."""
        return plugins_of(self, tuple(self.shipped))

    def check(self, plugin: Any) -> str:
        """Return the fault of a loaded plug-in; "" if it follows the protocol."""
        version = getattr(plugin, VERSION, None)
        if version != self.protocol:
            return f"it must have {VERSION} = {self.protocol}, not {version!r}"
        missing = [name for name in self.methods if not callable(getattr(plugin, name, None))]
        return f"it must have {' and '.join(f'{name}()' for name in missing)}" if missing else ""


@dataclass(frozen=True)
class Plugins:
    """The plug-ins of a socket that can be used, by name, and a sentence on each other one."""

    found: dict[str, Any]
    left_out: Sequence[str]


def plugins_of(
    socket: Socket,
    taken: Collection[str],
    *,
    points: Callable[[str], Collection[EntryPoint]] | None = None,
) -> Plugins:
    """Load the plug-ins of a socket.

    Args:
        taken: names of what is shipped, which a plug-in may not use.
        points: entry points of a group, in place of those of the installed distributions.
    """
    found: dict[str, Any] = {}
    left_out = []
    listed = points(socket.group) if points else entry_points(group=socket.group)
    for point in listed:
        if point.name in taken or point.name in found:
            fault = f"the name {point.name!r} is taken; a plug-in needs a name of its own"
        else:
            try:
                plugin = point.load()
                fault = socket.check(plugin)
            except Exception as error:  # of another distribution: whatever it raises
                fault = f"it cannot be loaded ({type(error).__name__}: {str(error)[:200]})"
            else:
                if not fault:
                    found[point.name] = plugin
        if fault:
            left_out.append(left_out_sentence(socket, point, fault))
    return Plugins(found, left_out)


def is_left_out(error: ModuleNotFoundError) -> bool:
    """Return whether a module is missing that only this package has: a part of an extra."""
    return (error.name or "").partition(".")[0] == "tuner"


def shipped_module(name: str) -> ModuleType | None:
    """Import a module of an extra; return None if this installation leaves a part of it out.

    What is left of a deleted folder, such as `__pycache__`, is no module.
    """
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if not is_left_out(error):
            raise
        return None
    return module if module.__file__ is not None else None


def extra_module(name: str, what: str) -> Any:
    """Import a module of an extra; raise InputError if this installation leaves a part of it out.

    Args:
        what: what needs the module, for the error.
    """
    if (module := shipped_module(name)) is None:
        raise not_installed(what, name)
    return module


def not_installed(what: str, part: str = "") -> InputError:
    """Return the error of something that needs an extra, which this installation leaves out."""
    named = f" ({part})" if part else ""
    return InputError(
        f"{what} needs a part of joulefront that is not installed here{named}; install all parts: "
        f"{install_command('all')}"
    )


def left_out_sentence(socket: Socket, point: EntryPoint, fault: str) -> str:
    """Return one sentence that names the plug-in, its distribution and the fault."""
    origin = f" of {point.dist.name}" if point.dist is not None else ""
    return f"the {socket.kind} {point.name!r} ({point.value}{origin}) is left out: {fault}"
