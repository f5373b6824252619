"""A pipeline script that lets its number of stages be chosen, by one line."""

import deepspeed
import torch
from deepspeed.pipe import PipelineModule

try:
    import joulefront_hook as hook
except ImportError:
    hook = None

config = hook.configuration() if hook else {}
deepspeed.init_distributed()
torch.manual_seed(0)
net = PipelineModule(
    layers=[torch.nn.Linear(8, 8) for _ in range(4)],
    num_stages=config.get("pipeline_parallel", 1),
    loss_fn=torch.nn.functional.mse_loss,
)
data = torch.utils.data.TensorDataset(torch.randn(64, 8), torch.randn(64, 8))
settings = {
    "train_batch_size": 16,
    "train_micro_batch_size_per_gpu": 4,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.001, "torch_adam": True}},
}
engine, *_ = deepspeed.initialize(
    model=net, model_parameters=list(net.parameters()), training_data=data, config=settings
)
micro_batch, accumulation = (
    engine.train_micro_batch_size_per_gpu(),
    engine.gradient_accumulation_steps(),
)
print(f"{engine.num_stages} stages, {micro_batch} x {accumulation}", flush=True)
while True:
    engine.train_batch()
