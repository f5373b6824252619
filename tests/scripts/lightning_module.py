"""A Lightning script: the framework owns the loop, the ranks, the accumulation and the logs."""

import argparse

import lightning
import torch

parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=2)
args = parser.parse_args()


class Regression(lightning.LightningModule):
    def __init__(self):
        super().__init__()
        self.net = torch.nn.Sequential(
            torch.nn.Linear(8, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1)
        )

    def training_step(self, batch, index):
        inputs, targets = batch
        loss = torch.nn.functional.mse_loss(self.net(inputs), targets)
        self.log("loss", loss)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


lightning.seed_everything(0)
data = torch.utils.data.TensorDataset(torch.randn(4096, 8), torch.randn(4096, 1))
loader = torch.utils.data.DataLoader(data, batch_size=args.batch_size, shuffle=True)
trainer = lightning.Trainer(
    accelerator="cpu",
    max_epochs=-1,
    accumulate_grad_batches=args.accumulate,
    enable_progress_bar=False,
)
trainer.fit(Regression(), loader)
