"""Batches from the counts of a program's first steps, and the counts themselves."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.scripts import CPU
from tuner.search_spaces.errors import InputError
from tuner.workload.hook import state
from tuner.workload.hook.batch_counts import GROUPS, StepCounts
from tuner.workload.hook.steps import StepCounter
from tuner.workload.hook.watching import Forwards
from tuner.workload.scripts.command import Script
from tuner.workload.scripts.evidence import batches_seen, seen_today
from tuner.workload.scripts.inspection import blank_job

torch = pytest.importorskip("torch")
data = torch.utils.data


@pytest.fixture
def counts() -> Iterator[StepCounts]:
    """Counts that every torch optimizer in this process reports to."""
    from torch.optim.optimizer import register_optimizer_step_post_hook

    state.seen.clear()
    counter = StepCounter(lambda: counts.attempt())
    counts = StepCounts(torch, counter.takes)
    watched = Forwards(torch, counts)

    def stepped(optimizer: Any, *_: Any) -> None:
        if counter.takes(optimizer):
            counter.count("optimizer")
        else:
            counts.other_stepped()

    hook = register_optimizer_step_post_hook(stepped)
    yield counts
    hook.remove()
    watched.end()
    counts.end()
    state.seen.clear()


def test_a_watched_loader_has_the_signature_of_torchs(counts: StepCounts) -> None:
    """Lightning makes a loader again from the names of the arguments that made it."""
    assert list(inspect.signature(data.DataLoader.__init__).parameters)[:3] == [
        "self",
        "dataset",
        "batch_size",
    ]


class _Stream(data.IterableDataset):  # type: ignore[misc, name-defined]
    def __iter__(self) -> Iterator[Any]:
        return iter(torch.randn(32, 4))

    def __len__(self) -> int:
        return 4  # some count batches here


@pytest.mark.parametrize(
    ("source", "samples"),
    [
        (lambda: loader(8), 400),
        (lambda: loader(4), 400),
        (lambda: data.DataLoader(_Stream(), batch_size=8), None),
        (lambda: data.DataLoader([torch.randn(8, 4)] * 50, batch_size=None), None),
    ],
)
def test_samples_of_a_dataset_are_counted_where_its_items_are_samples(
    counts: StepCounts, source: Callable[[], Any], samples: int | None
) -> None:
    next(iter(source()))
    assert counts.samples == [samples]


def loader(size: int, samples: int = 400, **more: Any) -> Any:
    return data.DataLoader(data.TensorDataset(torch.randn(samples, 4)), batch_size=size, **more)


def net(inputs: int = 4) -> tuple[Any, Any]:
    model = torch.nn.Linear(inputs, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.1)


def plain(a: int = 1, first: int = 0, size: int = 8, **more: Any) -> None:
    model, optimizer = net()
    for i, (x,) in enumerate(loader(size, **more)):
        model(x).mean().backward()
        if (i + 1 + first) % a == 0:
            optimizer.step()


def evaluates_between() -> None:
    model, optimizer = net()
    held_out = loader(100)
    for (x,) in loader(8):
        model(x).mean().backward()
        optimizer.step()
        with torch.no_grad():
            for (y,) in held_out:
                model(y)


def fetches_ahead() -> None:
    model, optimizer = net()
    batches = iter(loader(8))
    ahead = next(batches)
    for now in batches:
        model(ahead[0]).mean().backward()
        optimizer.step()
        ahead = now


def fetches_a_step_at_once() -> None:
    model, optimizer = net()
    batches = iter(loader(8))
    for _ in range(6):
        for (x,) in [next(batches) for _ in range(3)]:
            model(x).mean().backward()
        optimizer.step()


def splits() -> None:
    model, optimizer = net()
    for (x,) in loader(32, num_workers=0):
        for part in x.split(8):
            model(part).mean().backward()
        optimizer.step()


def closure() -> None:
    model = torch.nn.Linear(4, 1)
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=5, lr=0.1)
    for (x,) in loader(32):

        def again(x: Any = x) -> Any:
            optimizer.zero_grad()
            loss = (model(x) ** 2).mean()
            loss.backward()
            return loss

        optimizer.step(again)


def scaler() -> None:
    model, optimizer = net()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**127)
    for (x,) in loader(16):
        scaler.scale((model(x) * 30).sum()).backward()
        scaler.step(optimizer)
        scaler.update()


def two_optimizers() -> None:
    (judge, of_judge), (maker, of_maker) = net(), net(2)
    for (x,) in loader(64):
        judge(x).mean().backward()
        fake = maker(torch.randn(64, 2)).expand(64, 4)
        judge(fake.detach()).mean().backward()
        of_judge.step()
        judge(fake).mean().backward()
        of_maker.step()


def sums_losses() -> None:
    model, optimizer = net()
    batches = iter(loader(8))
    for _ in range(6):
        sum(model(next(batches)[0]).mean() for _ in range(3)).backward()  # type: ignore[attr-defined]
        optimizer.step()


def varied() -> None:
    model, optimizer = net()
    sizes = [[*range(n)] for n in (7, 3, 9, 5, 6)]
    for (x,) in data.DataLoader(data.TensorDataset(torch.randn(9, 4)), batch_sampler=sizes):
        model(x).mean().backward()
        optimizer.step()


def two_loaders() -> None:
    model, optimizer = net()
    for (x,), (y,) in zip(loader(8), loader(24), strict=False):
        (model(x).mean() + model(y).mean()).backward()
        optimizer.step()


def rises() -> None:
    model, optimizer = net()
    batches = iter(loader(8))
    for a in (1, 1, 2, 4, 4):
        for _ in range(a):
            model(next(batches)[0]).mean().backward()
        optimizer.step()


def nested_backward() -> None:
    from torch.utils.checkpoint import checkpoint

    (model, optimizer), part = net(), torch.nn.Linear(4, 4)
    for (x,) in loader(8):
        model(checkpoint(part, x.requires_grad_(), use_reentrant=True)).mean().backward()
        optimizer.step()


def two_short_epochs() -> None:
    """20 samples in batches of 8: the last of each epoch holds 4."""
    model, optimizer = net()
    for _ in range(3):
        for (x,) in loader(8, samples=20):
            model(x).mean().backward()
            optimizer.step()


def other_in_turn(each: int, micro_batches: int = 1) -> None:
    """A critic steps always, and a generator after every `each` steps of it, as in a WGAN."""
    (critic, of_critic), (made, of_made) = net(), net()
    batches = iter(loader(8))
    for number in range(5):
        for _ in range(micro_batches):
            critic(next(batches)[0]).mean().backward()
        of_critic.step()
        if number % each == 0:
            for _ in range(3):
                critic(made(torch.randn(5, 4)).expand(5, 4)).mean().backward()
            of_made.step()


def other_within() -> None:
    """The other one steps between the passes of a step: which are whose is not known."""
    (model, optimizer), (made, of_made) = net(), net()
    batches = iter(loader(8))
    for number in range(6):
        for _ in range(2 if number else 0):  # the first one that steps is counted
            model(next(batches)[0]).mean().backward()
            made(torch.randn(5, 4)).mean().backward()
            of_made.step()
        model(next(batches)[0]).mean().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("train", "batches", "how"),
    [
        (plain, (8, 1), "drawn"),
        (lambda: other_in_turn(1), (8, 1), "drawn"),
        (lambda: other_in_turn(3), (8, 1), "drawn"),
        (lambda: other_in_turn(3, 4), (8, 4), "drawn"),
        (other_within, (0, 0), "3 batches are drawn for 1 backward passes"),
        (lambda: plain(4), (8, 4), "drawn"),
        (lambda: plain(4, first=3), (8, 4), "drawn"),  # steps at micro-batch 0, too
        (lambda: plain(2, num_workers=2), (8, 2), "drawn"),
        (evaluates_between, (8, 1), "drawn"),
        (fetches_ahead, (8, 1), "drawn"),
        (fetches_a_step_at_once, (8, 3), "drawn"),
        (splits, (8, 4), "32 drawn and split"),
        (closure, (32, 1), "one batch in 5 passes"),
        (scaler, (16, 1), "drawn"),
        (two_optimizers, (64, 1), "one batch in 2 passes"),
        (sums_losses, (24, 1), "3 batches in one pass"),
        (nested_backward, (8, 1), "drawn"),
        (two_short_epochs, (8, 1), "drawn"),
        (varied, (0, 0), "3 to 9 samples"),
        (two_loaders, (0, 0), "several loaders"),
        (rises, (0, 0), "1 to 4 backward passes"),
        (lambda: plain(50), (0, 0), "no second optimizer step"),
    ],
)
def test_counts_of_a_training(
    counts: StepCounts, train: Callable[[], None], batches: tuple[int, int], how: str
) -> None:
    before = torch.autograd.backward
    train()
    seen = batches_seen({"groups": counts.groups, "first_batches": [counts.first_batch]})
    assert (seen.micro_batch, seen.accumulation) == batches, counts.groups
    assert how in seen.how
    if counts.over:
        assert len(counts.groups) == GROUPS
        assert torch.autograd.backward is not before  # torch is as it was before


def group(*drawn: int | None, passes: int = 1, shapes: Any = ((8, 4),)) -> dict[str, Any]:
    return {"drawn": [[0, n, False] for n in drawn], "passes": passes, "shapes": list(shapes)}


@pytest.mark.parametrize(
    ("one", "more", "batches"),
    [
        # No loader: the dimension that is named, wherever it stands; two names are none.
        (group(shapes=[(35, 20)]), {"named": {"batch_size": 20}}, (20, 1)),
        (group(shapes=[(12, 12)]), {"named": {"batch_size": 12}}, (12, 1)),
        (group(shapes=[(35, 20)]), {"named": {"batch_size": 20, "bs": 35}}, (0, 0)),
        (group(shapes=[(35, 20)]), {"named": {"batch_size": 64}}, (0, 0)),
        (group(shapes=[(4096,)]), {}, (0, 0)),
        # Tokens, a graph of the program's own, one rank that reads for all.
        (group(None), {}, (0, 0)),
        (group(8, passes=0), {}, (0, 0)),
        (group(8, 8, passes=1), {"first_batch": 5, "first_batches": [5, None]}, (0, 0)),
        # Two batches for one pass of 8 rows: another rank's is among them.
        (group(8, 8, passes=1), {}, (0, 0)),
        # The model is called with a number first, which has no rows.
        (group(8, passes=2, shapes=[()]), {}, (0, 0)),
        (group(8, 8, passes=1, shapes=[(), (8, 4)]), {}, (0, 0)),
    ],
)
def test_what_the_counts_leave_open_is_unknown(
    one: dict[str, Any], more: dict[str, Any], batches: tuple[int, int]
) -> None:
    seen = batches_seen({"groups": [one] * GROUPS, "first_batches": [1], **more})
    assert (seen.micro_batch, seen.accumulation) == batches, seen
    assert seen.how


# ---- from the counts to today


def today(folder: Path, words: str, one: dict[str, Any], ranks: int = 1, **more: Any) -> Any:
    (folder / "train.py").touch()
    told = {name: more.pop(name) for name in ("global_batch",) if name in more}
    launcher = f"torchrun --nproc-per-node {ranks} "
    script = Script(f"{launcher}train.py {words}", cwd=folder, **told)
    facts = {"groups": [one] * GROUPS, "first_batches": [*range(ranks)], **more}
    return seen_today(script, blank_job(script, CPU), facts)


EIGHT = group(8, 8, passes=2)


@pytest.mark.extra("tuner.workload.scripts.frameworks")
@pytest.mark.usefixtures("launchers_here")
def test_the_global_batch_is_what_was_counted_on_all_ranks(tmp_path: Path) -> None:
    found = today(tmp_path, "", EIGHT, ranks=2)
    assert (found.global_batch, found.frame.micro_batch, found.frame.accumulation) == (32, 8, 2)
    assert found.frame.counted
    assert found.frame.sources["micro_batch"] == "counted in 3 steps"
    # Ranks that read the same samples, and a framework that was told something else.
    same = today(tmp_path, "", EIGHT, ranks=2, first_batches=[7, 7])
    assert same.global_batch == 0
    assert "drew the same samples" in same.notes[0]
    owned = {"micro_batch": 8, "gradient_accumulation": 4}
    other = today(tmp_path, "", EIGHT, owned=owned, owner="transformers")
    assert (other.global_batch, other.frame.accumulation) == (0, 0)
    assert "was told accumulation 4, and the first steps took 2" in other.notes[0]
    assert not other.frame.counted


@pytest.mark.usefixtures("launchers_here")
def test_a_user_who_contradicts_the_counts_is_refused(tmp_path: Path) -> None:
    placed = "-b {micro_batch=8} -a {gradient_accumulation=2}"
    assert today(tmp_path, placed, EIGHT).frame.sources["micro_batch"] == "the command"
    with pytest.raises(InputError, match=r"says micro_batch 16, but 3 .*write \{micro_batch=8\}"):
        today(tmp_path, placed.replace("8", "16"), EIGHT)
    with pytest.raises(InputError, match=r"--global-batch is 128, but .* trains 1 x 8 x 2 = 16"):
        today(tmp_path, "", EIGHT, global_batch=128)
    # What the counts leave open the user may say; what is left follows.
    tokens = group(None, passes=2)
    told = today(tmp_path, "", tokens, global_batch=64, owned={"gradient_accumulation": 2})
    assert (told.frame.micro_batch, told.frame.accumulation, told.global_batch) == (32, 2, 64)
    assert told.frame.sources["micro_batch"] == "--global-batch"
