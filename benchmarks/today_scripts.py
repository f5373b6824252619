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
p.add_argument("--epochs", type=int, default=3)
p.add_argument("--bucket", type=int, default=8)
args = p.parse_args()
data = TensorDataset(torch.rand(800, 4) + 1)
net = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(net.parameters(), lr=0.001)
"""


#: Ranks as the launcher starts them; one does without a process group.
_RANKS = """
        import os
        world = int(os.environ.get("WORLD_SIZE", "1"))
        sampler = None
        if world > 1:
            torch.distributed.init_process_group("gloo")
            net = torch.nn.parallel.DistributedDataParallel(net)
            sampler = DistributedSampler(data)
"""
_ALL = ("micro_batch", "data_parallel", "gradient_accumulation")
_SPLIT = ("micro_batch", "gradient_accumulation")


@dataclass(frozen=True)
class Case:
    """A script and what it trains.

    Attributes:
        body: the source after the common head.
        ranks: processes that torchrun starts; 1 for no launcher.
        turns: the knobs that split its batch and that its arguments carry, without another
            training.
        words: of the command, after the script.
    """

    name: str
    body: str
    truth: Truth
    ranks: int = 1
    turns: tuple[str, ...] = ()
    words: str = ""

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
        turns=_SPLIT,
    ),
    Case(
        "batch divided by the accumulation",
        _RANKS
        + """
        for i, (x,) in enumerate(DataLoader(data, args.batch_size // args.accum, sampler=sampler)):
            (net(x).mean() / args.accum).backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
        """,
        (2, 4, 8),
        turns=_ALL,
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
        (8, 4, 32),  # its losses are not divided: another split is another training
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
        turns=("micro_batch", "data_parallel"),
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
    Case(
        "ranks as started, with an accumulation",
        _RANKS
        + """
        loader = DataLoader(data, args.batch_size, sampler=sampler)
        for epoch in range(args.epochs):
            for i, (x,) in enumerate(loader):
                (net(x).square().mean() / args.accum).backward()
                if (i + 1) % args.accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
        """,
        (8, 4, 32),
        turns=_ALL,
    ),
    Case(
        "the same on two ranks, told on the command",
        _RANKS
        + """
        loader = DataLoader(data, args.batch_size, sampler=sampler)
        step = 0
        while step < args.epochs:
            for i, (x,) in enumerate(loader):
                (net(x).square().mean() / args.accum).backward()
                if (i + 1) % args.accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
                    step += 1
                    if step >= args.epochs:
                        break
        """,
        (4, 2, 16),
        2,
        turns=_ALL,
        words="--batch-size=4 --accum 2 --epochs 300",
    ),
    Case(
        "batch divided by the ranks",
        _RANKS
        + """
        for epoch in range(args.epochs):
            for x, in DataLoader(data, args.batch_size // world, sampler=sampler):
                net(x).square().mean().backward()
                optimizer.step()
                optimizer.zero_grad()
        """,
        (4, 1, 8),
        2,
        turns=("micro_batch", "data_parallel"),
    ),
    Case(
        "accumulation divided by the ranks, global batch in the source",
        _RANKS
        + """
        accum = 4 // world
        for i, (x,) in enumerate(DataLoader(data, 10, sampler=sampler)):
            (net(x).square().mean() / accum).backward()
            if (i + 1) % accum == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        (10, 2, 40),
        2,
        turns=("data_parallel", "gradient_accumulation"),
    ),
    Case(
        "the batch also scales the learning rate",
        """
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1 * args.batch_size / 256)
        for i, (x,) in enumerate(DataLoader(data, args.batch_size)):
            (net(x).square().mean() / args.accum).backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
        """,
        (8, 4, 32),
    ),
    Case(
        "one argument for the batch and the buckets of the data",
        """
        data = TensorDataset(torch.rand(100 * args.batch_size, 4) + 1)
        for epoch in range(args.epochs):
            for i, (x,) in enumerate(DataLoader(data, args.batch_size)):
                (net(x).square().mean() / args.accum).backward()
                if (i + 1) % args.accum == 0:
                    optimizer.step()
        """,
        (8, 4, 32),
    ),
    Case(
        "the batch of training and evaluation",
        _RANKS
        + """
        held_out = DataLoader(data, args.batch_size)
        train = DataLoader(data, args.batch_size, drop_last=True, sampler=sampler)
        for i, (x,) in enumerate(train):
            (net(x).square().mean() / args.accum).backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
                with torch.no_grad():
                    for y, in held_out:
                        net(y)
        """,
        (8, 4, 32),
        turns=_ALL,
    ),
    Case(
        "losses that are not divided by the accumulation",
        """
        for i, (x,) in enumerate(DataLoader(data, args.batch_size)):
            net(x).square().mean().backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        (8, 4, 32),
    ),
    Case(
        "losses summed over the batch",
        """
        optimizer = torch.optim.SGD(net.parameters(), lr=1e-5)
        for i, (x,) in enumerate(DataLoader(data, args.batch_size)):
            net(x).square().sum().backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        (8, 4, 32),
        turns=_SPLIT,
    ),
    Case(
        "a leftover of the accumulation is stepped",
        "\n        data = TensorDataset(torch.rand(1616, 4) + 1)"
        + _RANKS
        + """
        loader = DataLoader(data, args.batch_size, sampler=sampler)
        for i, (x,) in enumerate(loader):
            (net(x).square().mean() / args.accum).backward()
            if (i + 1) % args.accum == 0 or i + 1 == len(loader):
                optimizer.step()
                optimizer.zero_grad()
        """,
        (8, 4, 32),
        turns=_ALL,
    ),
    Case(
        "a sampler with a batch size of its own",
        """
        from torch.utils.data import BatchSampler, SequentialSampler
        batches = BatchSampler(SequentialSampler(data), 16, drop_last=False)
        for i, (x,) in enumerate(DataLoader(data, batch_sampler=batches)):
            (net(x).square().mean() / args.accum).backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
        """,
        (16, 4, 64),
    ),
    Case(
        "a script that asserts its batch",
        """
        assert args.batch_size == 8, "tuned for 8"
        for i, (x,) in enumerate(DataLoader(data, args.batch_size)):
            (net(x).square().mean() / args.accum).backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
        """,
        (8, 4, 32),
    ),
    Case(
        "samples from a stream",
        """
        class Stream(torch.utils.data.IterableDataset):
            def __iter__(self):
                return iter(torch.rand(800, 4) + 1)
        for i, x in enumerate(DataLoader(Stream(), args.batch_size)):
            (net(x).square().mean() / args.accum).backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
        """,
        (8, 4, 32),
        turns=_SPLIT,
    ),
    Case(
        "BatchNorm",
        """
        net = torch.nn.Sequential(torch.nn.BatchNorm1d(4), net)
        for i, (x,) in enumerate(DataLoader(data, args.batch_size)):
            (net(x).square().mean() / args.accum).backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
        """,
        (8, 4, 32),
    ),
    Case(
        "negatives of the batch",
        """
        for i, (x,) in enumerate(DataLoader(data, args.batch_size)):
            likeness = net(x) @ net(x).T
            loss = torch.nn.functional.cross_entropy(likeness, torch.arange(len(x)))
            (loss / args.accum).backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
                optimizer.zero_grad()
        """,
        (8, 4, 32),
    ),
    Case(
        "stops early, by its loss",
        _RANKS
        + """
        best = 1e9
        for epoch in range(args.epochs):
            for i, (x,) in enumerate(DataLoader(data, args.batch_size, sampler=sampler)):
                loss = net(x).square().mean()
                (loss / args.accum).backward()
                if (i + 1) % args.accum == 0:
                    optimizer.step()
                    optimizer.zero_grad()
            if loss > best:
                break
        """,
        (8, 4, 32),
        turns=_ALL,
    ),
    Case(
        "seeded by the batch size",
        """
        torch.manual_seed(args.batch_size)
        data = TensorDataset(torch.randn(800, 4) * args.batch_size)
        for i, (x,) in enumerate(DataLoader(data, args.batch_size)):
            (net(x).square().mean() / args.accum).backward()
            if (i + 1) % args.accum == 0:
                optimizer.step()
        """,
        (8, 4, 32),
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
