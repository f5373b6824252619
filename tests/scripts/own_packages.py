"""The training script of a repository that has packages `models` and `workload` of its own."""

import sys

import deepspeed
from models.net import build
from workload.data import batches

here = __file__.rsplit("/", 1)[0]
for name in ("models", "workload"):
    assert sys.modules[name].__file__.startswith(here), sys.modules[name].__file__
ours = {"tuner", "search_spaces"} & {name.split(".")[0] for name in sys.modules}
assert not ours, ours

deepspeed.init_distributed()
net = build()
config = {
    "train_batch_size": 8,
    "gradient_accumulation_steps": 2,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
}
engine, _, loader, _ = deepspeed.initialize(
    model=net, model_parameters=net.parameters(), training_data=batches(), config=config
)
print("stage", engine.zero_optimization_stage(), flush=True)
for _ in range(10**6):
    for inputs, targets in loader:
        engine.backward((engine(inputs) - targets).square().mean())
        engine.step()
