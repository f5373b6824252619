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
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

#: Modules that make a store: of the ranks, and of torchrun's agent.
RANKS = "torch.distributed.rendezvous"
AGENT = "torch.distributed.elastic.rendezvous.static_tcp_rendezvous"


def listen_on_loopback(*modules: str) -> None:
    """Let the stores that modules of torch make for 127.0.0.1 listen there alone."""
    for name in modules:
        with contextlib.suppress(ImportError):  # a torch without distributed training
            importlib.import_module(name)
            module: Any = sys.modules[name]  # torch.distributed hides one of them
            if hasattr(module, "TCPStore"):
                module.TCPStore = partial(_store, module.TCPStore)


def meet_in_files(path: str) -> None:
    """Let ranks that would meet at 127.0.0.1 meet in files `path`-N, where no port is open."""
    with contextlib.suppress(ImportError):
        importlib.import_module(RANKS)
        module: Any = sys.modules[RANKS]
        module.TCPStore = partial(_file_store, module.TCPStore, path, itertools.count())


def _file_store(
    plain: Callable[..., Any],
    path: str,
    numbers: Iterator[int],
    host_name: str,
    port: int,
    world_size: int | None = None,
    *more: Any,
    **settings: Any,
) -> Any:
    if host_name != "127.0.0.1" or world_size is None:
        return plain(host_name, port, world_size, *more, **settings)
    from torch.distributed import FileStore

    return FileStore(f"{path}-{next(numbers)}", world_size)


def _store(
    plain: Callable[..., Any],
    host_name: str,
    port: int,
    world_size: int | None = None,
    is_master: bool = False,
    *more: Any,
    **settings: Any,
) -> Any:
    if is_master and host_name == "127.0.0.1":
        # A port that is taken is the plain store's to report, or to share with the process.
        with contextlib.suppress(OSError), socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((host_name, port))
            listener.listen(1024)
            settings["master_listen_fd"] = listener.detach()
    return plain(host_name, port, world_size, is_master, *more, **settings)


def run_program(argv: Sequence[str]) -> None:
    """Run `SCRIPT ...` or `-m MODULE ...` in this process as Python itself would."""
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
