"""Ranks of one node that meet on this node alone: in a probe in files, else on loopback.

torch's TCPStore listens on all interfaces, whatever its address is, and lets every caller read and
set its keys. It takes a socket that is bound already (`master_listen_fd`). Launch files hold a copy
of this module: `loopback.py SCRIPT ...` or `loopback.py -m MODULE ...` runs a program so.
"""

import contextlib
import importlib
import itertools
import os
import runpy
import socket
import sys
import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

#: Modules that make a store: of the ranks, and of torchrun's agent, which LAUNCHER starts.
RANKS = "torch.distributed.rendezvous"
AGENT = "torch.distributed.elastic.rendezvous.static_tcp_rendezvous"
AGENTS = (AGENT, "torch.distributed.elastic.rendezvous.c10d_rendezvous_backend")
LAUNCHER = "torch.distributed.launcher.api"
#: Names of this node alone.
LOOPBACK = ("127.0.0.1", "localhost")
#: Variable with the folder in which the ranks of one node meet.
MEETING = "JOULEFRONT_MEETING"
#: Variable by which torchrun's agent opens no store for the ranks: rank 0 makes it.
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"


def listen_on_loopback(*modules: str) -> None:
    """Let the stores that modules of torch make for loopback listen there alone."""
    for name in modules:
        with contextlib.suppress(ImportError):  # a torch without distributed training
            importlib.import_module(name)
            module: Any = sys.modules[name]  # torch.distributed hides one of them
            if hasattr(module, "TCPStore"):
                module.TCPStore = partial(_store, module.TCPStore)


def meet_in_files(ranks: Any) -> None:
    """Let `ranks`, the module RANKS, use files in the folder MEETING, where no port is open."""
    ranks.TCPStore = partial(_file_store, ranks.TCPStore, defaultdict(itertools.count))


def keep_agents_store(launcher: Any, folder: str) -> None:
    """Let torchrun on one node keep its own store in memory, and its ranks meet in `folder`.

    Args:
        launcher: the module LAUNCHER.
        folder: an agent makes a folder of its own in it.
    """
    launcher.launch_agent = partial(_launch_agent, launcher.launch_agent, folder)


def _launch_agent(
    plain: Callable[..., Any], folder: str, config: Any, *more: Any, **named: Any
) -> Any:
    if config.max_nodes == 1:
        from torch.distributed import HashStore

        # Of each agent, since a command may start several, and of the same port.
        os.environ[MEETING] = tempfile.mkdtemp(prefix="meeting-", dir=folder)
        os.environ[OWN_STORE] = "1"
        for name in AGENTS:
            module: Any = importlib.import_module(name)
            module.TCPStore = lambda *values, **settings: HashStore()
    return plain(config, *more, **named)


def _file_store(
    plain: Callable[..., Any],
    numbers: dict[int, Iterator[int]],
    host_name: str,
    port: int,
    world_size: int | None = None,
    *more: Any,
    **settings: Any,
) -> Any:
    folder = os.environ.get(MEETING)
    here = host_name in (*LOOPBACK, os.environ.get("MASTER_ADDR"))
    whole = str(world_size) == os.environ.get("WORLD_SIZE", str(world_size))
    if not (folder and here and whole) or world_size is None:
        return _store(plain, host_name, port, world_size, *more, **settings)
    from torch.distributed import FileStore

    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    name = f"{port}-{attempt}-{next(numbers[port])}"
    return FileStore(os.path.join(folder, name), world_size)


def _store(
    plain: Callable[..., Any],
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    *more: Any,
    **settings: Any,
) -> Any:
    if is_master and host_name in LOOPBACK:
        # A port that is taken is the plain store's to report, or to share with the process.
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(("127.0.0.1", port))
            listener.listen(1024)
            port = listener.getsockname()[1]  # which is checked, and 0 is any
            settings["master_listen_fd"] = listener.detach()
    try:
        return plain(host_name, port, world_size, is_master, *more, **settings)
    except NotImplementedError:  # torch 2.6's own choice of a server takes no socket
        settings["use_libuv"] = False
        return plain(host_name, port, world_size, is_master, *more, **settings)


#: Modules that are not loaded twice into one process.
_ONCE = {"torch", "numpy", "joulefront_hook"}


def forget_namesakes(folder: str) -> None:
    """Forget imported packages of which the program's own folder has a namesake.

    A process that was forked has imported the installed `datasets`; beside a `datasets.py` of its
    own the program means that.
    """
    for entry in os.scandir(folder):
        name = entry.name.removesuffix(".py")
        file = entry.path if name != entry.name else os.path.join(entry.path, "__init__.py")
        of_installed = getattr(sys.modules.get(name), "__file__", None)
        if of_installed is None or name in _ONCE or name in sys.stdlib_module_names:
            continue
        if os.path.isfile(file) and os.path.realpath(file) != os.path.realpath(of_installed):
            for each in [each for each in sys.modules if f"{each}.".startswith(f"{name}.")]:
                del sys.modules[each]


def run_program(argv: Sequence[str]) -> None:
    """Run `SCRIPT ...` or `-m MODULE ...` in this process as Python itself would."""
    with contextlib.suppress(OSError):  # what cannot be listed holds no namesakes
        forget_namesakes(os.getcwd() if argv[0] == "-m" else os.path.dirname(argv[0]) or ".")
    if argv[0] == "-m":
        sys.argv = list(argv[1:])
        sys.path.insert(0, os.getcwd())
        runpy.run_module(argv[1], run_name="__main__", alter_sys=True)
        return
    sys.argv = list(argv)
    path = os.path.abspath(argv[0])
    sys.path.insert(0, os.path.dirname(path))
    runpy.run_path(path, run_name="__main__")


if __name__ == "__main__":
    if sys.path[:1] == [os.path.dirname(os.path.abspath(__file__))]:
        del sys.path[0]  # which holds nothing for the program
    listen_on_loopback(RANKS, AGENT)
    run_program(sys.argv[1:])
