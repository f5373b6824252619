"""Counts of the program's first optimizer steps: samples drawn, backward passes, inputs of a pass.

Samples are counted where the loader's sampler hands them out, and passes at the outermost backward.
What lies between two attempts of the first optimizer is a group; an attempt that a gradient scaler
skips is one too. Once `GROUPS` groups are over, torch is as it was before.
"""

import contextlib
import math
import time
import weakref
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from . import state, torch_settings
from .steps import LoaderWatch, around

#: Optimizer steps that are watched. The first one of a program may be special: loops that step at
#: micro-batch 0, warm-ups, wrappers that fetch one batch ahead.
GROUPS = 4
#: `_clocks` of what has not begun.
_NEVER = (0.0, 0.0)
#: Numbers of a batch that tell it from another rank's.
_DIGEST = 64


class StepCounts:
    """Watcher of the first optimizer steps.

    `follows` says of an optimizer whether its steps are counted.

    Attributes:
        groups: of each step: `drawn` (one [loader, samples or None, last of its epoch] a batch),
            `passes` (outermost backward calls) and `shapes` (first input of each outermost forward
            call with gradients). In an inspection `loss` too, the sum of what the passes went back
            from (None if one was not a number), and `scale`, by which a scaler multiplied it; the
            seconds that the program `took` for the group, `waited` for batches, and in the
            optimizer's step (`updated`), with those of each in which its thread was `busy`; and of
            each batch a digest of its `indices` and `batches`.
        first_batch: a digest of the first batch that was drawn, its indices included; None before.
        samples: the number of samples in each dataset that was drawn from, None if unknown.
    """

    def __init__(
        self, torch: Any, follows: Callable[[Any], bool], *, inspects: bool = False
    ) -> None:
        self.samples: list[int | None] = []
        self._follows = follows
        self._inspects = inspects
        self._norms: weakref.WeakSet[Any] = weakref.WeakSet()
        self.groups: list[dict[str, Any]] = []
        self.first_batch: int | None = None
        self.current = _group()
        self._numbers: dict[int, int] = {}
        self._depth = self._scaling = 0
        self._updating = _NEVER  # when the step began that is being taken
        self._last: tuple[Any, Any] | None = None  # iterator and index of the last batch
        self._grad = torch.is_grad_enabled
        self._plain: list[tuple[Any, str, Any]] = []
        self._updates = HandWrittenUpdates(torch, self._around) if inspects else None
        self._watch_loaders(torch)
        self._watch_backward(torch)
        if inspects:
            self._time_updates()

    @property
    def over(self) -> bool:
        """True once all groups were seen."""
        return len(self.groups) >= GROUPS

    @property
    def normalises(self) -> bool:
        """True if a BatchNorm takes its statistics from the batch."""
        return any(each.training for each in self._norms)

    def forward(self, shape: list[int]) -> None:
        """Note the shape of an outermost forward call with gradients."""
        self._begin_group()
        if shape and not self._depth:  # within a backward pass it is a recomputation
            self.current["shapes"].append(shape)

    def attempt(self, *, skipped_too: bool = False) -> None:
        """End a group: a step was counted, or a gradient scaler has skipped it."""
        if self.over or (self._scaling and not skipped_too):
            return
        if (loss := self.current.get("loss")) is not None:
            loss = float(loss)
            self.current["loss"] = loss if math.isfinite(loss) else None
        began = self.current.pop("began", None)
        if began is not None:
            self._spent("took", began)
            self._spent("updated", self._updating)
        self.groups.append(self.current)
        self.current, self._updating = _group(), _NEVER
        if self.over:
            self.end()
            self._read_again()

    def other_stepped(self) -> None:
        """Leave out the passes since the last step: another optimizer's, of a GAN's other model."""
        if not self.over:
            self.current |= {"passes": 0, "shapes": []}

    def end(self) -> None:
        """Take the patches back."""
        while self._plain:
            owner, name, plain = self._plain.pop()
            setattr(owner, name, plain)

    def _begin_group(self) -> None:
        if self._inspects and not self.over:
            self.current.setdefault("began", _clocks())

    def _spent(self, part: str, since: tuple[float, float]) -> None:
        """Add the seconds since then to a part of the group, and those in which this thread ran."""
        passed, ran = (
            now - then if then else 0.0 for then, now in zip(since, _clocks(), strict=True)
        )
        busy = self.current.setdefault("busy", {})
        self.current[part] = self.current.get(part, 0.0) + passed
        busy[part] = busy.get(part, 0.0) + ran

    def _time_batches(self, kind: Any) -> None:
        @self._around(kind, "__next__")
        def next_batch(plain: Any, iterator: Any) -> Any:
            if self.over or not self._grad():  # evaluation
                return plain(iterator)
            self._begin_group()
            began = _clocks()
            batch = plain(iterator)
            self._spent("waited", began)
            return batch

    def _time_updates(self) -> None:
        try:
            from torch.optim.optimizer import register_optimizer_step_pre_hook
        except ImportError:  # of a torch before 2.2
            return

        def begins(optimizer: Any, *_: Any) -> None:
            if not self.over and self._follows(optimizer):
                self._updating = _clocks()

        register_optimizer_step_pre_hook(begins)

    def _read_again(self) -> None:
        if "num_workers" in (state.options.get("torch") or {}) and self._last is not None:
            state.seen["reads_by"] = torch_settings.how_read(*self._last)
        self._last = None

    def _around(self, owner: Any, name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        self._plain.append((owner, name, getattr(owner, name)))
        return around(owner, name)

    def _watch_loaders(self, torch: Any) -> None:
        from torch.utils.data import dataloader

        if self._inspects:  # within the other, so that what is done with a batch is no waiting
            self._time_batches(dataloader._BaseDataLoaderIter)
        LoaderWatch(
            dataloader._BaseDataLoaderIter,
            self._around,
            fetched=self._fetched,
            ended=_note_end,
            began=lambda iterator: iterator.__dict__.pop("_joulefront_last", None),
        )
        if not self._inspects:
            return

        @self._around(torch.nn.modules.batchnorm._BatchNorm, "__init__")
        def normalised(plain: Any, module: Any, *args: Any, **kwargs: Any) -> None:
            plain(module, *args, **kwargs)
            self._norms.add(module)

    def _fetched(self, iterator: Any, index: Any, batch: Any) -> None:
        if self.over or not self._grad():  # evaluation
            return
        dataset = getattr(iterator, "_dataset", iterator)
        loader = self._numbers.setdefault(id(dataset), len(self._numbers))
        if loader == len(self.samples):
            self.samples.append(_samples_of(iterator, index))
        entry = [loader, len(index) if hasattr(index, "__len__") else None, False]
        iterator.__dict__["_joulefront_last"] = entry
        self.current["drawn"].append(entry)
        if self.first_batch is None:
            self.first_batch = _digest(index, batch)
        if self._inspects:
            if "loader" not in state.seen:
                state.seen["loader"] = torch_settings.of_loader(iterator, batch)
            self._last = iterator, index
            self.current.setdefault("indices", []).append(zlib.crc32(repr(index).encode()))
            self.current.setdefault("batches", []).append(torch_settings.digest(batch))

    def _watch_backward(self, torch: Any) -> None:
        @self._around(torch.autograd, "backward")
        def backward(plain: Any, /, *args: Any, **kwargs: Any) -> Any:
            # Checkpointing nests, on a thread of the device's: one counter for all threads.
            if self._depth == 0:
                if self._updates and not (self.groups or state.seen.get("engines")):
                    self._updates.check(self.current["passes"])
                self.current["passes"] += 1
                if self._inspects:
                    self._add_loss(args[0] if args else kwargs.get("tensors"))
            self._depth += 1
            try:
                return plain(*args, **kwargs)
            finally:
                self._depth -= 1

        @self._around(torch.amp.GradScaler, "step")
        def step(plain: Any, scaler: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
            if not scaler.is_enabled():
                return plain(scaler, optimizer, *args, **kwargs)
            self._scaling += 1
            if self._inspects:
                self.current["scale"] = float(scaler.get_scale())
            try:
                return plain(scaler, optimizer, *args, **kwargs)
            finally:
                self._scaling -= 1
                if self._follows(optimizer):
                    self.attempt(skipped_too=True)

    def _add_loss(self, roots: Any) -> None:
        # Add what a pass goes back from; the device is waited for once a step (`attempt`).
        root = roots[0] if isinstance(roots, list | tuple) and len(roots) == 1 else roots
        number = getattr(root, "numel", lambda: 0)() == 1
        loss, added = self.current.get("loss", 0.0), root.detach().float().sum() if number else None
        self.current["loss"] = None if loss is None or added is None else loss + added


def _note_end(iterator: Any) -> None:
    if (entry := iterator.__dict__.pop("_joulefront_last", None)) is not None:
        entry[2] = True


def _clocks() -> tuple[float, float]:
    """Return the time, and how long this thread has run, in seconds."""
    return time.monotonic(), time.thread_time()


def _group() -> dict[str, Any]:
    return {"drawn": [], "passes": 0, "shapes": []}


def _samples_of(iterator: Any, index: Any) -> int | None:
    # A stream, or a dataset of whole batches, may count its length in batches.
    if not hasattr(index, "__len__") or getattr(iterator, "_dataset_kind", None) != 0:
        return None
    try:
        return len(iterator._dataset)
    except Exception:  # the program's own code may fail
        return None


def tensors(value: Any) -> Iterator[Any]:
    """Yield every tensor in nested inputs, token ids first."""
    if hasattr(value, "shape") and hasattr(value, "dtype"):
        yield value
    elif isinstance(value, Mapping):
        for key in sorted(value, key=lambda name: name != "input_ids"):
            yield from tensors(value[key])
    elif isinstance(value, list | tuple):
        for part in value:
            yield from tensors(part)


def _digest(index: Any, batch: Any) -> int | None:
    try:
        tensor = next(tensors(batch), None)
        numbers = tensor.detach().flatten()[:_DIGEST].tolist() if tensor is not None else None
    except Exception:  # a tensor of the program's own kind may not flatten
        return None
    return zlib.crc32(repr((index, numbers)).encode())


# Updates of parameters that a program writes itself, which no optimizer shows.
#
# Between two backward passes gradients add up, and parameters stay as they are, unless the program
# takes a step. Where gradients are cleared and parameters have changed, and no torch optimizer has
# stepped, the program updates them by hand.

#: Updates by hand until that is certain, in a program that has made no optimizer, and in one that
#: has: meta-learning updates copies by hand a few times before each step.
WITHOUT_OPTIMIZER, BESIDE_OPTIMIZER = 3, 100
#: Parameters and numbers of each that are looked at.
_PARAMETERS, _NUMBERS = 4, 16


class HandWrittenUpdates:
    """Watcher of the parameters of the outermost modules until the first optimizer step."""

    def __init__(self, torch: Any, around: Any) -> None:
        self._updates = 0
        self._made = False
        self._parameters: list[Any] = []
        self._before: list[tuple[bool, list[float]]] = []
        owner = getattr(getattr(torch, "optim", None), "Optimizer", None)
        if owner is not None:

            @around(owner, "__init__")
            def init(plain: Any, optimizer: Any, /, *args: Any, **kwargs: Any) -> None:
                self._made = True
                plain(optimizer, *args, **kwargs)

    def check(self, passes: int) -> None:
        """Compare the parameters with those at the last backward pass; NotAsRequested if it is
        certain.

        Args:
            passes: backward passes so far.
        """
        now: list[tuple[bool, list[float]]] = []
        with contextlib.suppress(Exception):  # parameters of a kind that cannot be read
            if self._parameters or self._find():
                now = [_state(each) for each in self._parameters]
        changed = any(
            before[0] is False and own[0] is False and before[1] != own[1]
            for before, own in zip(self._before, now, strict=False)
        )
        self._before, self._updates = now, self._updates + changed
        limit = BESIDE_OPTIMIZER if self._made else WITHOUT_OPTIMIZER
        if self._updates >= limit:
            raise state.NotAsRequested(
                f"the script ran {passes} backward passes and no optimizer.step(): it updates its "
                "parameters itself. Call joulefront_hook.step() after each update "
                "(docs/your-script.md), or start it with an optimizer"
            )

    def _find(self) -> bool:
        watched = state.seen.get("watched")
        for module in watched.modules() if watched is not None else ():
            own = filter(_readable, module.parameters())
            self._parameters += [each for each, _ in zip(own, range(_PARAMETERS), strict=False)]
        return bool(self._parameters)


def _readable(parameter: Any) -> bool:
    # A sharded parameter would meet the other ranks.
    return parameter.requires_grad and parameter.numel() and not hasattr(parameter, "placements")


def _state(parameter: Any) -> tuple[bool, list[float]]:
    gradient = parameter.grad
    has_gradient = gradient is not None and bool(gradient.any())
    return has_gradient, parameter.detach().flatten()[:_NUMBERS].tolist()
