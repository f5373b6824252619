"""What the hook sees and turns inside a rank, by its parts, without ranks."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tuner.workload import hook
from tuner.workload.hook import NotAsRequested, frames, source, state, steps, watching
from tuner.workload.hook.batch_counts import HandWrittenUpdates
from tuner.workload.hook.steps import around
from tuner.workload.scripts.command import imported_frameworks, names_a_rank

torch = pytest.importorskip("torch")


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    plain, finders = torch.nn.Module.__call__, list(sys.meta_path)
    state.seen.clear()
    state.options.clear()
    yield
    state.seen.clear()
    state.options.clear()
    torch.nn.Module.__call__ = plain
    sys.meta_path[:] = finders


def train(model: Any, loss: Any, micro_batches: int, size: int) -> None:
    for _ in range(micro_batches):
        loss(model(torch.randn(size, 8)), torch.zeros(size, 1)).backward()


def test_the_largest_outermost_module_is_the_model() -> None:
    plain = torch.nn.Module.__call__
    watched = watching.Forwards(torch)
    model = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.Linear(4, 1))
    train(model, torch.nn.MSELoss(), micro_batches=3, size=5)
    model.eval()
    model(torch.randn(99, 8))  # a look at validation data is no micro-batch
    watched.first_step()
    assert torch.nn.Module.__call__ is plain
    assert state.seen["batch"] == [5, 8]
    assert state.seen["can_checkpoint"] is False


def test_what_has_no_parameters_takes_no_batch_of_the_models() -> None:
    """A loss, and a transform that is a module and is called for each sample that is loaded."""

    class Counts:
        def __init__(self) -> None:
            self.shapes: list[list[int]] = []

        def forward(self, shape: list[int]) -> None:
            self.shapes.append(shape)

    counts: Any = Counts()
    watched = watching.Forwards(torch, counts)
    model, scale = torch.nn.Linear(8, 1), torch.nn.Identity()
    for sample in torch.randn(5, 8):
        scale(sample)
    train(model, torch.nn.MSELoss(), micro_batches=2, size=5)
    watched.end()
    assert counts.shapes == [[5, 8], [5, 8]]


def test_a_model_may_hand_out_its_parameters_as_a_list() -> None:
    class Model(torch.nn.Linear):  # type: ignore[misc, name-defined]
        def parameters(self, recurse: bool = True) -> Any:
            return [self.weight, self.bias]

    class Counts:
        shapes = 0

        def forward(self, shape: list[int]) -> None:
            self.shapes += 1

    counts: Any = Counts()
    watched = watching.Forwards(torch, counts)
    train(Model(8, 1), torch.nn.MSELoss(), micro_batches=2, size=5)
    watched.end()
    assert counts.shapes == 2


def test_a_model_is_compiled_if_most_of_its_tensors_are_in_compiled_parts() -> None:
    """A compiled loss or position embedding does not make an eager model a compiled one."""

    def seen(model: Any) -> bool:
        watching.see_switch(model)
        return bool(state.seen["compiled"])

    def blocks() -> Any:
        return torch.nn.Sequential(*(torch.nn.Linear(4, 4) for _ in range(4)))

    assert not seen(blocks())
    assert seen(torch.compile(blocks(), backend="eager"))
    each, one = blocks(), blocks()
    for block in each[1:]:
        block.compile(backend="eager")
    one[0].compile(backend="eager")
    assert seen(each)
    assert not seen(one)
    assert not seen(torch.nn.Identity())


def test_a_first_batch_of_another_size_is_refused() -> None:
    state.options["micro_batch"] = 4
    with pytest.raises(NotAsRequested, match="hold 5 samples where micro_batch is 4"):
        watching.see_batch(({"input_ids": torch.zeros(5, 8)}, ()))


class Switched(torch.nn.Module):
    """As a transformers model has it."""

    supports_gradient_checkpointing = True
    is_gradient_checkpointing = False

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(8, 1)

    def forward(self, inputs: Any) -> Any:
        return self.net(inputs)

    def gradient_checkpointing_enable(self, gradient_checkpointing_kwargs: Any) -> None:
        self.is_gradient_checkpointing = True

    def gradient_checkpointing_disable(self) -> None:
        self.is_gradient_checkpointing = False


def test_the_switch_is_found_inside_a_wrapper_and_turned_before_the_first_forward() -> None:
    state.options["activation_checkpointing"] = "full"
    model = torch.nn.Sequential(Switched())
    watched = watching.Forwards(torch)
    train(model, torch.nn.MSELoss(), micro_batches=1, size=2)
    watched.first_step()
    assert model[0].is_gradient_checkpointing
    assert (state.seen["can_checkpoint"], state.seen["checkpoints"]) == (True, True)


def test_a_module_is_turned_when_it_is_imported_and_only_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "late_framework.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[tuple[str, Any]] = []
    steps.ImportHook(["late_framework", "json"], lambda name, module: seen.append((name, module)))
    assert [name for name, _ in seen] == ["json"]  # it was there already
    import late_framework  # type: ignore[import-not-found]

    assert seen[1:] == [("late_framework", late_framework)]
    assert late_framework.value == 1
    sys.modules.pop("late_framework")


def test_a_module_that_is_looked_for_before_it_is_imported_is_turned(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sought_framework.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[Any] = []
    steps.ImportHook(["sought_framework"], lambda name, module: seen.append(module.value))
    for _ in range(2):  # as transformers looks for torch
        assert importlib.util.find_spec("sought_framework") is not None
    assert importlib.util.find_spec("absent_framework") is None
    assert seen == []
    importlib.import_module("sought_framework")
    assert seen == [1]
    sys.modules.pop("sought_framework")


def test_a_framework_is_told_what_was_asked_and_what_it_was_told_is_known() -> None:
    assert frames.own(micro_batch=8, gradient_accumulation=2) == {
        "micro_batch": 8,
        "gradient_accumulation": 2,
    }
    state.options["owned"] = {"micro_batch": 4}
    assert frames.own(micro_batch=4, gradient_accumulation=9)["micro_batch"] == 4
    assert state.seen["owned"] == {"micro_batch": 8, "gradient_accumulation": 2}


def test_transformers_arguments_are_turned() -> None:
    class TrainingArguments:
        per_device_train_batch_size, gradient_accumulation_steps = 8, 1
        report_to, push_to_hub = ["wandb"], True

        def __init__(self) -> None:
            self.__post_init__()

        def __post_init__(self) -> None:
            self.derived = self.per_device_train_batch_size * self.gradient_accumulation_steps

    module = type("module", (), {"TrainingArguments": TrainingArguments})
    state.options |= {"owned": {"micro_batch": 2, "gradient_accumulation": 4}, "quiet": True}
    frames.turn_arguments(module)
    made: Any = TrainingArguments()
    assert (made.per_device_train_batch_size, made.gradient_accumulation_steps) == (2, 4)
    assert (made.derived, made.report_to, made.push_to_hub) == (8, [], False)
    assert state.seen["owned"] == {"micro_batch": 8, "gradient_accumulation": 1}


def test_which_frameworks_a_script_imports(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import torch\n# import datasets\nif True:\n    from lightning.pytorch import Trainer\n"
    )
    assert imported_frameworks(("train.py",), tmp_path) == ("lightning", "lightning.pytorch")
    assert imported_frameworks(("-m", "package.train"), tmp_path) == ()
    assert imported_frameworks(("gone.py",), tmp_path) == ()


class Marks:
    """Connection that keeps the marks."""

    steps = 0

    def __init__(self) -> None:
        self.names: list[str] = []

    def mark(self, name: str) -> None:
        self.names.append(name)

    def step_done(self) -> None:
        """Count nothing."""


def test_a_compilation_is_a_phase_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    callbacks = torch._dynamo.callback
    handler = callbacks.CompilationCallbackHandler()
    monkeypatch.setattr(torch._dynamo, "callback_handler", handler)
    monkeypatch.setattr(callbacks, "callback_handler", handler)
    monkeypatch.setattr(state, "link", link := Marks())
    frames.mark_compilations("torch._dynamo.callback", callbacks)
    layer = Switched()
    layer.compile(backend="aot_eager", dynamic=False)
    layer(torch.randn(2, 8)).sum().backward()
    layer(torch.randn(2, 8)).sum().backward()  # compiled already
    assert link.names == ["compilation", "boundary"]
    link.names.clear()
    state.phase("forward")
    layer(torch.randn(5, 8))  # another shape
    assert link.names == ["forward", "compilation", "forward"]
    # A release of torch without the callbacks compiles unmarked.
    frames.mark_compilations("torch._dynamo.callback", object())


@pytest.mark.parametrize(
    ("source", "asks"),
    [
        ("ddp = int(os.environ.get('RANK', -1)) != -1", True),
        ('if "RANK" in os.environ:', True),
        ("if 'RANK' not in os.environ: pass", True),
        ('rank = os.getenv("RANK")', True),
        # These take a rank for granted, or one for another's.
        ('rank = int(os.environ.get("RANK", 0))', False),
        ('rank = int(os.environ["RANK"])', False),
        ('if "LOCAL_RANK" in os.environ:', False),
        ('import deepspeed\nif "RANK" in os.environ:', False),
        ("", False),
    ],
)
def test_a_script_that_asks_whether_it_has_a_rank(tmp_path: Path, source: str, asks: bool) -> None:
    (tmp_path / "train.py").write_text(source)
    assert names_a_rank(("train.py",), tmp_path) is asks
    assert not names_a_rank(("-m", "train"), tmp_path)


def test_outside_a_probe_too_a_bare_program_has_no_rank(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        "import os, sys\nassert 'RANK' not in os.environ\nprint(sys.argv[1:])"
    )
    (tmp_path / "options.json").write_text('{"bare": true}')
    ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    done = subprocess.run(
        [sys.executable, hook.__path__[0] + "/__main__.py", "run", "train.py", "{rank}"],
        cwd=tmp_path,
        env={**os.environ, **ranks, "JOULEFRONT_OPTIONS": str(tmp_path / "options.json")},
        capture_output=True,
        text=True,
    )
    assert done.stdout.splitlines()[-1:] == ["['0']"], done.stderr[-500:]


def test_a_trainer_of_the_users_own_states_the_length_as_the_one_it_is_made_of() -> None:
    plain = type("Trainer", (), {"__module__": "transformers.trainer"})

    class Mine(plain):  # type: ignore[valid-type, misc]
        state = SimpleNamespace(max_steps=90)

        def train(self) -> dict[str, Any]:
            return watching.stated_length()

    assert Mine().train() == {"steps": 90, "by": "transformers"}
    Mine.state.max_steps = -1  # not known yet
    assert Mine().train() == {}


@pytest.mark.parametrize(
    ("name", "is_batch"),
    [
        ("minibatch_size", True),
        ("mini_batch_size", True),
        ("mini_batch", True),
        ("micro_batch_size", True),
        ("per_device_train_batch_size", True),
        ("num_minibatches", False),
        ("mini_batches", False),
        ("minimum_batch_size", False),
        ("eval_batch_size", False),
    ],
)
def test_names_of_a_batch(name: str, is_batch: bool) -> None:
    """PPO's programs name what one step takes `minibatch_size`."""
    assert (source.BATCH.fullmatch(name) is not None) is is_batch


@pytest.fixture
def silenced(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Link of a probe that saves nothing but data; its number of steps can be set."""
    link = SimpleNamespace(steps=0)
    monkeypatch.setattr(torch, "save", torch.save)
    monkeypatch.setattr(state, "link", link)
    frames.silence(torch)
    return link


def test_data_that_a_program_prepares_is_saved_in_a_probe(
    tmp_path: Path, silenced: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache of a data set was left without its file, so that the program itself failed later."""
    data = {"triples": torch.arange(6), "names": {"a": [torch.ones(2)]}}
    torch.save(data, tmp_path / "cache.pt")
    assert torch.load(tmp_path / "cache.pt")["triples"].tolist() == [0, 1, 2, 3, 4, 5]
    # What is there may be of another run, and later it is a sample or a log of the training.
    torch.save({"triples": 0}, tmp_path / "cache.pt")
    assert "names" in torch.load(tmp_path / "cache.pt")
    (tmp_path / "link.pt").symlink_to(tmp_path / "elsewhere.pt")
    torch.save(data, tmp_path / "link.pt")
    assert not (tmp_path / "elsewhere.pt").exists()
    silenced.steps = 1
    torch.save(data, tmp_path / "later.pt")
    assert not (tmp_path / "later.pt").exists()
    monkeypatch.setattr(state, "link", None)  # a process that prepares, and does not train
    torch.save(data, str(tmp_path / "prepared.pt"))
    assert (tmp_path / "prepared.pt").exists()


def test_no_checkpoint_is_saved_in_a_probe_before_its_first_step_either(
    tmp_path: Path, silenced: SimpleNamespace
) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    for number, value in enumerate(
        (
            model,
            model.state_dict(),
            optimizer,
            optimizer.state_dict(),
            {"epoch": 0, "model": model.state_dict()},
            {"epoch": 0, "all": {"optimizer": optimizer.state_dict()}},
        )
    ):
        torch.save(value, tmp_path / f"{number}.pt")
    assert not list(tmp_path.iterdir())


def copies_of(model: Any) -> dict[str, Any]:
    """A model's parameters as programs copy them, by the way in which they do."""
    state_dict = model.state_dict()
    return {
        "dict": dict(state_dict),
        "clones": {name: value.clone() for name, value in state_dict.items()},
        "renamed": {f"module.{name}": value.half() for name, value in state_dict.items()},
        "list": [parameter.data for parameter in model.parameters()],
        "arrays": {name: value.numpy().copy() for name, value in state_dict.items()},
        "nested": {"epoch": 0, "ema": {"shadow": [p.clone() for p in model.parameters()]}},
        "part": {name: value for name, value in dict(state_dict).items() if name[0] == "0"},
    }


@pytest.mark.parametrize("way", ["dict", "clones", "renamed", "list", "arrays", "nested", "part"])
def test_no_copy_of_a_model_is_saved_in_a_probe_before_its_first_step(
    tmp_path: Path, silenced: SimpleNamespace, way: str
) -> None:
    """A copy lacks the mark of a state dict, and was taken for data that the program prepares."""
    model = torch.nn.Sequential(torch.nn.Linear(4, 3), torch.nn.LayerNorm(3), torch.nn.Linear(3, 2))
    torch.save(copies_of(model)[way], tmp_path / "initial.pt")
    assert not list(tmp_path.iterdir())


class Unreadable(dict[str, Any]):
    """A mapping whose values cannot be had, such as a file of another library that is closed."""

    def values(self) -> Any:
        raise OSError("closed")


def test_data_of_any_kind_is_saved_in_a_probe(tmp_path: Path, silenced: SimpleNamespace) -> None:
    """What the hook cannot compare with a model must not end the program."""
    numpy = pytest.importorskip("numpy")
    models = [torch.nn.LazyLinear(2), torch.nn.Linear(2, 3), torch.nn.Linear(0, 3)]
    data = {
        "reversed": [numpy.arange(3.0)[::-1], numpy.arange(2, dtype=">f4")],
        "wide": {"a": numpy.ones(2, dtype=numpy.longdouble), "b": torch.randn(3)},
        "nested": [torch.nested.nested_tensor([torch.ones(2), torch.ones(3)]), torch.randn(2)],
        "sparse": [torch.eye(3, 2).to_sparse(), torch.randn(3)],
        "unreadable": Unreadable(a=1),
    }
    for name, value in data.items():
        torch.save(value, tmp_path / f"{name}.pt")
    assert {path.stem for path in tmp_path.iterdir()} == set(data)
    # They hide no checkpoint beside them.
    torch.save([data["reversed"][0], dict(models[1].state_dict())], tmp_path / "initial.pt")
    assert not (tmp_path / "initial.pt").exists()


def test_data_is_saved_by_the_names_of_the_arguments_too(
    tmp_path: Path, silenced: SimpleNamespace
) -> None:
    """`torch.save(obj=..., f=...)` was a TypeError in a probe, and an error of the program's."""
    torch.save(obj=torch.arange(3), f=tmp_path / "data.pt", pickle_protocol=4)
    torch.save(f=tmp_path / "model.pt", obj=torch.nn.Linear(2, 2))
    assert [path.name for path in tmp_path.iterdir()] == ["data.pt"]


def test_arguments_of_a_program_may_have_the_names_that_the_hook_uses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.optim.Optimizer, "__init__", torch.optim.Optimizer.__init__)

    class Model(torch.nn.Module):
        def forward(self, module: Any, plain: Any) -> Any:
            return module + plain

    class Averaged(torch.optim.SGD):
        def __init__(self, optimizer: Any, plain: float) -> None:
            super().__init__(params=optimizer.param_groups[0]["params"], lr=plain)

    class Engine:
        def forward(self, plain: int, engine: int) -> int:
            return plain + engine

    around(Engine, "forward")(
        lambda plain, engine, /, *args, **named: plain(engine, *args, **named)
    )
    assert Engine().forward(plain=1, engine=2) == 3
    HandWrittenUpdates(torch, around)
    watching.Forwards(torch)
    weight = torch.nn.Parameter(torch.ones(1))
    assert Model()(module=weight, plain=1.0) == 2
    assert Averaged(optimizer=torch.optim.SGD([weight]), plain=0.5).defaults["lr"] == 0.5


def test_a_command_of_click_may_name_the_arguments_of_its_parser(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    click = pytest.importorskip("click")
    monkeypatch.setattr(click.Command, "parse_args", click.Command.parse_args)
    source.watch_arguments(inherited=False)

    class Mine(click.Command):  # type: ignore[name-defined, misc]
        def parse_args(self, ctx: Any, args: Any) -> Any:
            return super().parse_args(ctx=ctx, args=args)

    sizes: list[int] = []
    option = click.Option(["--batch"], type=int)
    Mine("train", callback=lambda batch: sizes.append(batch), params=[option]).main(
        ["--batch", "8"], standalone_mode=False
    )
    assert sizes == [8]
    assert source.arguments()["batch"] == {"options": ["--batch"], "value": 8}


def test_data_that_resembles_a_model_is_still_saved_in_a_probe(
    tmp_path: Path, silenced: SimpleNamespace
) -> None:
    """Statistics of a data set are ones and zeros as those of a norm are, and its vectors are a
    table that an embedding is made of."""
    vectors = torch.randn(5, 3)
    model = torch.nn.Sequential(
        torch.nn.Embedding.from_pretrained(vectors, freeze=False),
        torch.nn.LayerNorm(3),
        torch.nn.Linear(3, 2),
        torch.nn.Linear(2, 2, device="meta"),
    )
    data = {
        "statistics": {"mean": torch.zeros(3), "deviation": torch.ones(3)},
        "vectors": {"table": vectors, "more": torch.randn(5, 3)},
        "samples": [torch.randn(2, 3), torch.randn(2), torch.arange(3)],
        "text": ["a", b"b"],
    }
    for name, value in data.items():
        torch.save(value, tmp_path / f"{name}.pt")
    assert {path.stem for path in tmp_path.iterdir()} == set(data)
    assert model[0].weight.equal(vectors)


def written(folder: Path, quiet: bool, program: str) -> list[str]:
    """Paths that a program leaves which makes a writer of TensorBoard's events, as a rank."""
    package = folder / "package" / "tensorboardX"
    package.mkdir(parents=True)
    (package / "__init__.py").touch()
    # As the real ones: the events' writer makes the folder and a file in it.
    (package / "writer.py").write_text(
        "import os\n"
        "class EventFileWriter:\n"
        "    def __init__(self, logdir, max_queue=10, filename_suffix=''):\n"
        "        self.path = logdir\n"
        "        os.makedirs(logdir, exist_ok=True)\n"
        "        open(os.path.join(logdir, 'events.out'), 'w').close()\n"
        "    def get_logdir(self):\n"
        "        return self.path\n"
        "    def add_event(self, event, step=None):\n"
        "        pass\n"
        "class FileWriter:\n"
        "    def __init__(self, logdir):\n"
        "        self.event_writer = EventFileWriter(logdir, 5, filename_suffix='')\n"
    )
    paths = [str(folder / "package"), str(Path(hook.__path__[0]).parent)]
    code = (
        f"import sys; sys.path[:0] = {paths}\n"
        "from hook import frames, link, program, state, steps\n"
        f"state.options['quiet'] = {quiet}\n"
        "steps.ImportHook(frames.NAMES, frames.stand_around)\n"
        "from tensorboardX.writer import FileWriter\n"
        "events = FileWriter('logs/runs/one').event_writer\n"
        "events.add_event('loss', 1)\n"
        "assert events.get_logdir() == 'logs/runs/one'\n"
        "FileWriter('logs/runs/one/of-its-own')\n"  # as add_hparams does
        f"{program}\n"
        "link.end_process(0)\n"
    )
    work = folder / "work"
    (work / "logs").mkdir(parents=True)
    subprocess.run([sys.executable, "-c", code], cwd=work, check=True)
    return sorted(str(path.relative_to(work)) for path in work.rglob("*"))


def test_a_probe_leaves_no_run_of_tensorboard(tmp_path: Path) -> None:
    """20 probes of a program left 20 runs beside the user's. Its folder of logs, empty, stays."""
    assert written(tmp_path / "probe", True, "") == ["logs"]
    assert "logs/runs/one/events.out" in written(tmp_path / "training", False, "")


def test_what_a_program_puts_beside_its_events_needs_their_folder(tmp_path: Path) -> None:
    program = "open('logs/runs/one/arguments.json', 'w').close()"
    left = written(tmp_path, True, program)
    assert left == ["logs", "logs/runs", "logs/runs/one", "logs/runs/one/arguments.json"]


def test_events_that_go_to_no_file_system_make_no_folder(tmp_path: Path) -> None:
    program = "FileWriter('s3://bucket/runs')"
    assert written(tmp_path, True, program) == ["logs"]
