"""Tokens of a file, for training on real data instead of random tokens.

Values change the power of a GPU at equal shapes, because switching bits draws energy. Sequences are
drawn at random positions of the file, by the seed and the step alone.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

#: Largest vocabulary whose tokens are stored in 16 bits in a raw file.
LARGEST_16_BIT = 2**16


def open_tokens(job: dict[str, Any]) -> np.ndarray:
    """Map the tokens of a job's file into memory, (n,); SystemExit if they are too few.

    An .npy file holds them as one array of integers; a .bin file as raw 16-bit unsigned integers,
    32-bit ones if the vocabulary is larger than 65,536; any other file is text, whose bytes are the
    tokens.
    """
    tokens = _mapped(Path(job["data"]), job["model"]["vocab_size"] <= LARGEST_16_BIT)
    needed = job["sequence_length"] + 1
    if len(tokens) < needed:
        raise SystemExit(f"{job['data']} holds {len(tokens)} tokens; a sequence needs {needed}")
    return tokens


@lru_cache(maxsize=1)
def _mapped(path: Path, short: bool) -> np.ndarray:
    if path.suffix == ".npy":
        tokens = np.load(path, mmap_mode="r", allow_pickle=False)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise SystemExit(f"{path} must hold one array of integers, not {tokens.dtype}")
    elif path.suffix == ".bin":
        tokens = np.memmap(path, dtype=np.uint16 if short else np.uint32, mode="r")
    else:
        tokens = np.memmap(path, dtype=np.uint8, mode="r")
    return tokens


def sequences(tokens: np.ndarray, job: dict[str, Any], draw: torch.Generator) -> torch.Tensor:
    """Draw one step's sequences from the file, (global_batch, sequence_length + 1)."""
    length, vocabulary = job["sequence_length"] + 1, job["model"]["vocab_size"]
    starts = torch.randint(len(tokens) - length + 1, (job["global_batch"],), generator=draw)
    drawn = np.stack([tokens[start : start + length] for start in starts.tolist()])
    found = torch.from_numpy(drawn.astype(np.int64))
    if int(found.max()) >= vocabulary or int(found.min()) < 0:
        raise SystemExit(
            f"{job['data']} holds token {int(found.max())}, and the model's vocabulary has "
            f"{vocabulary}; is the file of another tokenizer, or of another integer type?"
        )
    return found
