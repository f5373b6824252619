"""A bare Accelerate script: its own loop and loader, accumulation by `accumulate`."""

import argparse

import torch
from accelerate import Accelerator

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--out", default="out")
args = parser.parse_args()

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2, log_with="tensorboard")
accelerator.init_trackers("regression")
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
data = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, shuffle=True)
model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
steps = 0
while True:
    for inputs, targets in loader:
        with accelerator.accumulate(model):
            loss = torch.nn.functional.mse_loss(model(inputs), targets)
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
        if accelerator.sync_gradients:
            steps += 1
            accelerator.log({"loss": loss.item()}, step=steps)
            if steps == 2:
                accelerator.save_state(args.out)
            if steps <= 3:
                accelerator.print(f"step {steps} of {accelerator.gradient_accumulation_steps}")
