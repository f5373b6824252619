"""Small scripts with what they train: each states its batches in another way.

A truth is (micro-batch, accumulation, global batch), None where no number is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from textwrap import dedent

Truth = tuple[int | None, int | None, int | None]
UNKNOWN: Truth = (None, None, None)

_HEAD = """
import argparse, torch
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset
p = argparse.ArgumentParser()
p.add_argument("--batch-size", type=int, default=8)
p.add_argument("--eval-batch-size", type=int, default=8)
p.add_argument("--accum", type=int, default=4)
args = p.parse_args()
data = TensorDataset(torch.randn(800, 4))
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
"""


@dataclass(frozen=True)
class Case:
    """A script and what it trains.

    Attributes:
        body: the source after the common head.
        ranks: processes that torchrun starts; 1 for no launcher.
    """

    name: str
    body: str
    truth: Truth
    ranks: int = 1

    @property
    def source(self) -> str:
        """The whole script."""
        return _HEAD + dedent(self.body)


OWN = (
    Case(
        "accumulates",
        """
        for i, (x,) in enumerate(DataLoader(data, args.batch_size)):
            (net(x).mean() / args.accum).backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
        """,
        (8, 4, 32),
    ),
    Case(
        "batch divided by the accumulation",
        """
        for i, (x,) in enumerate(DataLoader(data, args.batch_size // args.accum)):
            net(x).mean().backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
        """,
        (2, 4, 8),
    ),
    Case(
        "workers, and an evaluation between the steps",
        """
        held_out = DataLoader(data, args.eval_batch_size * 8)
        for x, in DataLoader(data, args.batch_size, num_workers=1):
            net(x).mean().backward()
            optimizer.step()
            net.eval()
            with torch.no_grad():
                for y, in held_out:
                    net(y)
            net.train()
        """,
        (8, 1, 8),
    ),
    Case(
        "the last batch is smaller",
        """
        while True:
            for x, in DataLoader(TensorDataset(torch.randn(20, 4)), args.batch_size):
                net(x).mean().backward()
                optimizer.step()
        """,
        (8, 1, 8),
    ),
    Case(
        "two samples a row (pairs)",
        """
        for x, in DataLoader(data, args.batch_size):
            net(torch.cat([x, -x])).mean().backward()
            optimizer.step()
        """,
        (8, 1, 8),
    ),
    Case(
        "samples made in the loop",
        """
        while True:
            for _ in range(args.accum):
                net(torch.randn(args.batch_size, 4)).mean().backward()
            optimizer.step()
        """,
        (8, 4, 32),
    ),
    Case(
        "inputs that nothing names",
        """
        while True:
            net(torch.randn(17, 4)).mean().backward()
            optimizer.step()
        """,
        UNKNOWN,
    ),
    Case(
        "labelled and unlabelled loaders",
        """
        for (x,), (y,) in zip(DataLoader(data, args.batch_size), DataLoader(data, 24)):
            (net(x).mean() + net(y).mean()).backward()
            optimizer.step()
        """,
        UNKNOWN,
    ),
    Case(
        "two ranks with a DistributedSampler",
        """
        torch.distributed.init_process_group("gloo")
        net = torch.nn.parallel.DistributedDataParallel(net)
        for x, in DataLoader(data, args.batch_size, sampler=DistributedSampler(data)):
            net(x).mean().backward()
            optimizer.step()
        """,
        (8, 1, 16),
        2,
    ),
    Case(
        "two ranks that read the same samples",
        """
        torch.distributed.init_process_group("gloo")
        net, data = torch.nn.parallel.DistributedDataParallel(net), range(800)
        for x in DataLoader(data, args.batch_size):
            net(x[:, None].expand(-1, 4) / 800).mean().backward()
            optimizer.step()
        """,
        (8, 1, None),
        2,
    ),
)

#: Files of a folder that may be given, by the name of each without ".py".
GIVEN: dict[str, Truth] = {
    "a_nanogpt": (12, 40, 480),
    "b_offbyone": (8, 4, 32),
    "c_scaler": (16, 1, 16),
    "d_timefirst": (20, 1, 20),
    "e_split": (8, 4, 32),
    "f_detect": (4, 1, 4),
    "g_reentrant": (8, 2, 16),
    "h_sam": (32, 1, 32),
    "i_hops": (128, 1, 128),
    "j_dynamic": UNKNOWN,
    "k_gan": (64, 1, 64),
    "l_packed": UNKNOWN,
    "m_kwargs": (32, 1, 32),
    "1_opt": (32, 1, 32),
    "2_inplace": (32, 1, 32),
    "3_functional": (32, 1, 32),
    "4_forward": (32, 1, 32),
    "5_object": (32, 1, 32),
    "6_evalmode": (32, 1, 32),
}
