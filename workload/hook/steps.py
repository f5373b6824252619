"""Counter of optimizer steps of a training process, and of the samples that its loaders draw.

A receipt, an observation, a probe and a training that is tuned while it runs count by it. It
changes nothing that the program computes. Patches are set once a module is imported.

The command's Python may be older than ours: this file and `tally` run on 3.8.
"""

from __future__ import annotations

import functools
import importlib.util
import sys
import weakref
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any


def place() -> tuple[int, int]:
    """Return rank and world of this process: torch.distributed's, Horovod's, or one alone."""
    distributed = getattr(sys.modules.get("torch"), "distributed", None)
    if distributed is not None and distributed.is_available() and distributed.is_initialized():
        return distributed.get_rank(), distributed.get_world_size()
    horovod = sys.modules.get("horovod.torch")
    if horovod is not None and horovod.is_initialized():
        return horovod.rank(), horovod.size()
    return 0, 1


class ImportHook:
    """Import hook that calls `then(name, module)` for each module, now or once it is executed.

    Args:
        find: returns the spec of a module; Python's own if None.
    """

    def __init__(
        self,
        names: Iterable[str],
        then: Callable[[str, Any], None],
        find: Callable[[str], Any] | None = None,
    ) -> None:
        self._names, self._then = set(names), then
        self._find = find or importlib.util.find_spec
        self._finding: set[str] = set()
        for name in sorted(self._names & set(sys.modules)):
            then(name, sys.modules[name])
        sys.meta_path.insert(0, self)

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        """Find the spec of a watched module, with `then` called after its execution."""
        if name not in self._names or name in self._finding:
            return None
        self._finding.add(name)  # while the finders behind this one are called
        try:
            spec = self._find(name)
        finally:
            self._finding.discard(name)
        if spec is not None and spec.loader is not None:
            plain = spec.loader.exec_module

            def exec_module(module: Any) -> None:
                plain(module)
                self._then(name, module)

            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        return spec


class StepCounter:
    """Counter of the steps of this process, which calls `counted` for each.

    The first of these that steps is counted: a DeepSpeed engine, a torch optimizer, the program by
    `joulefront_hook.step()`. Of several engines or optimizers it is the first one, and another one
    once that is gone.

    Attributes:
        source: "engine", "optimizer" or "program"; "" before the first step.
        has_engine: torch optimizers belong to an engine, even before its first step.
    """

    def __init__(self, counted: Callable[[], None]) -> None:
        self._counted = counted
        self.forget()

    def forget(self) -> None:
        """Begin again, for another program."""
        self.source, self.has_engine = "", False
        self._inside = 0
        self._first: dict[str, weakref.ref[Any]] = {}

    def follows(self, source: str, stepping: Any) -> bool:
        """Return True if `stepping` is the engine or optimizer that is counted, or becomes it."""
        first = self._first.get(source)
        counting = first() if first is not None else None
        if counting is None:
            self._first[source] = weakref.ref(stepping)
            return True
        return counting is stepping

    def takes(self, optimizer: Any) -> bool:
        """Return True if a step of this torch optimizer is one of the program's own."""
        return not (self._inside or self.has_engine) and self.follows("optimizer", optimizer)

    def run_engine(self, plain: Callable[[], Any], engine: Any, *, counts: bool) -> Any:
        """Run a step of an engine, and count it if it `counts` and is the first engine's."""
        self._inside += 1
        try:
            result = plain()
        finally:
            self._inside -= 1
        if counts and not self._inside and self.follows("engine", engine):
            self.count("engine")
        return result

    def count(self, source: str) -> None:
        """Count a step, from the first source that reports one."""
        self.source = self.source or source
        if source == self.source:
            self._counted()


def around(owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Put the decorated function around `owner.name`, which it is given before the arguments."""
    plain = getattr(owner, name)

    def put(function: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(plain)  # some read the signature
        def run(*args: Any, **named: Any) -> Any:
            return function(plain, *args, **named)

        setattr(owner, name, run)
        return run

    return put


def count_engine(counter: StepCounter, kind: Any, name: str, ends: Callable[[Any], bool]) -> None:
    """Count the calls of a method of DeepSpeed's engines that end a step."""

    @around(kind, name)
    def run(plain: Any, engine: Any, /, *args: Any, **named: Any) -> Any:
        counts = bool(ends(engine))
        step = functools.partial(plain, engine, *args, **named)
        return counter.run_engine(step, engine, counts=counts)


class LoaderWatch:
    """Watcher of torch's loaders: which indices each batch is made of.

    Args:
        put: returns the decorator of a patch, as `around`.
        fetched: gets an iterator, the index of its batch and the batch.
        ended: gets an iterator that has no more.
        began: gets an iterator that begins an epoch.
    """

    def __init__(
        self,
        kind: Any,
        put: Callable[[Any, str], Callable[[Callable[..., Any]], Any]],
        *,
        fetched: Callable[[Any, Any, Any], None],
        ended: Callable[[Any], None],
        began: Callable[[Any], None] = lambda iterator: None,
    ) -> None:
        @put(kind, "_next_index")
        def next_index(plain: Any, iterator: Any) -> Any:
            index = plain(iterator)
            # With workers, indices are handed out ahead of their batches, in the same order.
            iterator.__dict__.setdefault("_joulefront_indices", deque()).append(index)
            return index

        @put(kind, "_reset")
        def reset(plain: Any, iterator: Any, *args: Any, **named: Any) -> Any:
            iterator.__dict__["_joulefront_indices"] = deque()
            began(iterator)
            return plain(iterator, *args, **named)

        @put(kind, "__next__")
        def next_batch(plain: Any, iterator: Any) -> Any:
            try:
                batch = plain(iterator)
            except StopIteration:
                ended(iterator)
                raise
            indices = iterator.__dict__.get("_joulefront_indices")
            fetched(iterator, indices.popleft() if indices else None, batch)
            return batch
