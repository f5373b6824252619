"""Settings of torch: what the hook sees of a loader and an optimizer, and what it sets."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import numpy
import pytest

from tuner.workload.hook import state, torch_settings

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.real


class Items(torch.utils.data.Dataset):
    """Items that depend on their number, on random numbers, or on what was read before."""

    def __init__(self, kind: str = "number") -> None:
        self.kind = kind
        self.read = 0
        self.own = numpy.random.default_rng(0)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, number: int) -> Any:
        self.read += 1
        added = {
            "number": lambda: 0.0,
            "torch": lambda: torch.rand(1),
            "random": random.random,
            "numpy": numpy.random.random,
            "own": self.own.random,
            "counts": lambda: self.read,
        }[self.kind]()
        return torch.full((4,), float(number)) + added


class Own(torch.utils.data.Sampler):
    """A sampler of a program's own."""

    def __iter__(self) -> Iterator[int]:
        return iter(range(64))

    def __len__(self) -> int:
        return 64


def iterator(kind: str = "number", **arguments: Any) -> Any:
    return iter(torch.utils.data.DataLoader(Items(kind), 4, **arguments))


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("number", "number"),
        ("torch", "random"),
        ("random", "random"),
        ("numpy", "random"),
        ("own", ""),
        ("counts", ""),
    ],
)
def test_what_items_depend_on(kind: str, expected: str) -> None:
    made = iterator(kind)  # which draws the seed of its workers
    states = torch.get_rng_state(), random.getstate()
    assert torch_settings.how_read(made, [0, 1]) == expected
    assert torch.equal(torch.get_rng_state(), states[0])
    assert random.getstate() == states[1]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ({}, ""),
        ({"shuffle": True}, ""),
        ({"sampler": [3, 1, 2]}, ""),
        ({"sampler": Own()}, "Own"),
        ({"batch_size": None, "sampler": Own()}, "Own"),
    ],
)
def test_a_sampler_of_the_programs_own_is_named(arguments: dict[str, Any], expected: str) -> None:
    loader = torch.utils.data.DataLoader(Items(), **{"batch_size": 4, **arguments})
    found = iter(loader)
    assert torch_settings.of_loader(found, next(found))["own_sampler"] == expected


@pytest.mark.parametrize(
    ("first", "second", "same"),
    [
        ([torch.ones(3)], (torch.ones(3),), True),
        ({"a": torch.ones(3), "b": "x"}, {"a": torch.ones(3), "b": "y"}, True),
        (torch.arange(2**18), torch.arange(2**18) + 1, False),
        (torch.ones(2, dtype=torch.bfloat16), torch.zeros(2, dtype=torch.bfloat16), False),
        (numpy.ones(3), numpy.zeros(3), False),
        (Items(), Items(), True),  # None of both: nothing that can be read
    ],
)
def test_digests_tell_batches_apart(first: Any, second: Any, same: bool) -> None:
    assert (torch_settings.digest(first) == torch_settings.digest(second)) is same


@pytest.fixture
def plain_loader() -> Iterator[None]:
    plain = torch.utils.data.DataLoader._get_iterator
    yield
    torch.utils.data.DataLoader._get_iterator = plain
    state.options.clear()


def test_workers_are_set_where_items_are_read_for_training(plain_loader: None) -> None:
    class Stream(torch.utils.data.IterableDataset):
        def __iter__(self) -> Iterator[Any]:
            return iter(torch.ones(8, 2))

    state.options["torch"] = {"num_workers": 1}
    torch_settings.set_chosen(torch)
    found = iterator(shuffle=True)
    assert (found._num_workers, found._prefetch_factor) == (1, 2)
    assert len(list(found)) == 16
    assert iter(torch.utils.data.DataLoader(Stream(), 4))._num_workers == 0
    with torch.no_grad():
        assert iterator()._num_workers == 0


def updated(kind: Any, kernel: str, **arguments: Any) -> tuple[Any, Any]:
    torch.manual_seed(0)
    model = torch.nn.Linear(8, 8)
    optimizer = kind(model.parameters(), **arguments)
    for _ in range(3):
        if kernel:
            torch_settings.set_kernel(optimizer, kernel)
        model(torch.ones(2, 8)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.weight.detach(), optimizer


@pytest.mark.parametrize(
    ("kind", "kernel", "arguments"),
    [
        (torch.optim.AdamW, "fused", {}),
        (torch.optim.SGD, "fused", {"lr": 0.01, "momentum": 0.9}),
        (torch.optim.Adagrad, "fused", {}),
        (torch.optim.RMSprop, "foreach", {}),
        (torch.optim.Adam, "loop", {"fused": True}),
    ],
)
def test_another_kernel_updates_alike(kind: Any, kernel: str, arguments: dict[str, Any]) -> None:
    plain, optimizer = updated(kind, "", **arguments)
    assert torch_settings.of_optimizer(optimizer)["kernel"] != kernel
    other, optimizer = updated(kind, kernel, **arguments)
    assert torch_settings.of_optimizer(optimizer)["kernel"] == kernel
    assert torch.allclose(plain, other, atol=1e-6)
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    assert torch_settings.of_optimizer(optimizer)["kernel"] == kernel


@pytest.mark.parametrize(
    ("kind", "arguments"),
    [
        (torch.optim.LBFGS, {}),
        (torch.optim.RMSprop, {}),  # it has no fused kernel
        (torch.optim.Adam, {"differentiable": True}),
    ],
)
def test_an_optimizer_without_the_kernel_stays(kind: Any, arguments: dict[str, Any]) -> None:
    optimizer = kind([torch.nn.Parameter(torch.ones(2))], **arguments)
    before = dict(optimizer.defaults)
    torch_settings.set_kernel(optimizer, "fused")
    assert optimizer.defaults == before


def test_a_checkpoint_that_is_loaded_later_keeps_the_kernel() -> None:
    _, trained = updated(torch.optim.Adam, "")
    parameter = torch.nn.Parameter(torch.ones(8, 8))
    optimizer = torch.optim.Adam([parameter, torch.nn.Parameter(torch.ones(8))])
    torch_settings.set_kernel(optimizer, "fused")
    optimizer.load_state_dict(trained.state_dict())
    torch_settings.set_kernel(optimizer, "fused")
    parameter.grad = torch.ones(8, 8)
    optimizer.step()
    assert torch_settings.of_optimizer(optimizer)["kernel"] == "fused"


class Net(torch.nn.Module):
    """A model of two parts, of which a training calls the whole."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Linear(2, 2)

    def forward(self, x: Any) -> Any:
        return self.inner(x)


def test_the_outermost_modules_are_compiled_after_the_first_step(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(torch.nn.Module, "compile", lambda module: compiled.append(module))
    model, evaluated, loss = Net(), Net(), torch.nn.MSELoss()
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    torch_settings.compile_after_first_step(torch)
    for step in range(3):
        with torch.no_grad():
            evaluated(torch.ones(1, 2))
        with pytest.raises(TypeError):
            model()  # a call that fails leaves no trace
        loss(model(torch.ones(1, 2)), torch.ones(1, 2)).backward()
        assert compiled == ([] if step == 0 else [model])
        optimizer.step()
    assert not torch.nn.modules.module._global_forward_pre_hooks


def test_gradients_that_are_filled_with_zeros_are_seen_and_may_be_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for kind in (torch.optim.Optimizer, torch.nn.Module):
        monkeypatch.setattr(kind, "zero_grad", kind.zero_grad)
    monkeypatch.setattr(state, "seen", {})
    monkeypatch.setattr(state, "options", {"inspect": True})
    torch_settings.set_chosen(torch)
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.zero_grad()
    model.zero_grad(set_to_none=True)
    assert not state.seen.get("zeroes")
    optimizer.zero_grad(set_to_none=False)
    assert state.seen["zeroes"]
    state.seen.clear()
    monkeypatch.setattr(state, "options", {"inspect": True, "torch": {"set_to_none": True}})
    torch_settings.set_chosen(torch)
    model(torch.ones(1, 2)).sum().backward()
    model.zero_grad(False)
    assert model.weight.grad is None
    assert not state.seen.get("zeroes")


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adam])
def test_a_part_of_a_model_may_have_its_first_gradient_late(kind: Any) -> None:
    """The fused kernel of SGD takes no momentum that is there for some parameters alone."""

    def trained(kernel: str) -> list[Any]:
        torch.manual_seed(0)
        always, late, never = (torch.nn.Linear(4, 4) for _ in range(3))
        modules = torch.nn.ModuleList([late, always, never])
        more = {"momentum": 0.9} if kind is torch.optim.SGD else {}
        optimizer = kind(modules.parameters(), lr=0.1, **more)
        x = torch.randn(8, 4)
        kernels = []
        for step in range(6):
            optimizer.zero_grad()
            (late(always(x)) if step in (2, 4, 5) else always(x)).square().mean().backward()
            torch_settings.set_kernel(optimizer, kernel)
            kernels.append(torch_settings.of_optimizer(optimizer)["kernel"])
            optimizer.step()
        assert kernels[-1] == kernel
        return [parameter.detach() for parameter in modules.parameters()]

    for one, other in zip(trained("loop"), trained("fused"), strict=True):
        torch.testing.assert_close(one, other)
