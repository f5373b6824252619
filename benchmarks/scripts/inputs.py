"""Tiny models and data in the formats that training scripts read, made on the spot.

Weights are random and the text is drawn from a small vocabulary: what is learnt does not matter
here, only that a step computes. Nothing is downloaded.
"""

from __future__ import annotations

import hashlib
import json
import pickle
import random
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import ROOT

CONFIGURATIONS = ROOT / "benchmarks" / "data" / "scripts"
_WORDS = 480
_SEED = 0
#: A chat format that says whose turn it is; TRL's trainers need one.
_CHAT = (
    "{% for m in messages %}{{ '<' + m['role'] + '> ' + m['content'] + ' </s> ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<assistant> ' }}{% endif %}"
)


def _words() -> list[str]:
    generator = random.Random(_SEED)
    letters = "abcdefghijklmnopqrstuvwxyz"
    found: dict[str, None] = {}
    while len(found) < _WORDS:
        found["".join(generator.choices(letters, k=generator.randint(3, 8)))] = None
    return list(found)


def sentences(count: int, length: int = 40) -> Iterator[str]:
    """Yield `count` texts of `length` words each, the same in every run."""
    generator, words = random.Random(_SEED + 1), _words()
    for _ in range(count):
        yield " ".join(generator.choices(words, k=length))


def make_inputs(folder: Path) -> Path:
    """Write every input to `folder`, unless this version of this file did, and return it."""
    mark = folder / "made"
    files = [Path(__file__), *sorted(CONFIGURATIONS.iterdir())]
    version = hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
    if not mark.is_file() or mark.read_text() != version:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for make in _MAKERS:
            make(folder)
        mark.write_text(version)
    return folder


def _tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "<s>", "</s>"]
    roles = ["<user>", "<assistant>", "<system>"]
    vocabulary = {word: n for n, word in enumerate([*special, *roles, *_words()])}
    inner = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    inner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = {"pad": 0, "unk": 1, "cls": 2, "sep": 3, "mask": 4, "bos": 5, "eos": 6}
    return PreTrainedTokenizerFast(
        tokenizer_object=inner,
        chat_template=_CHAT,
        model_max_length=512,
        **{f"{name}_token": special[n] for name, n in names.items()},
    )


def _models(folder: Path) -> None:
    """Write a causal model and an encoder, each with the tokenizer."""
    import torch
    from transformers import (
        BertConfig,
        BertForSequenceClassification,
        LlamaConfig,
        LlamaForCausalLM,
    )

    torch.manual_seed(_SEED)
    tokenizer = _tokenizer()
    sizes: dict[str, Any] = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 512,
        "vocab_size": len(tokenizer),
        "pad_token_id": 0,
    }
    causal = LlamaConfig(**sizes, num_key_value_heads=4, bos_token_id=5, eos_token_id=6)
    for name, model in (
        ("llama", LlamaForCausalLM(causal)),
        ("bert", BertForSequenceClassification(BertConfig(**sizes))),
    ):
        model.save_pretrained(folder / name)
        tokenizer.save_pretrained(folder / name)


def _lines(path: Path, rows: Iterator[dict[str, Any]]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def _chats(folder: Path) -> None:
    """Write the data sets of TRL's scripts: chats, preferences, and answers marked good or bad."""

    def turns(text: str) -> tuple[list[Any], list[Any], list[Any]]:
        words = text.split()
        said = [{"role": "user", "content": " ".join(words[:10])}]
        answers = [
            [{"role": "assistant", "content": " ".join(words[cut : cut + 14])}] for cut in (10, 24)
        ]
        return said, answers[0], answers[1]

    texts = [turns(text) for text in sentences(2000)]
    _lines(folder / "chat" / "train.jsonl", ({"messages": q + a} for q, a, _ in texts))
    _lines(
        folder / "preference" / "train.jsonl",
        ({"prompt": q, "chosen": a, "rejected": b} for q, a, b in texts),
    )
    _lines(
        folder / "marked" / "train.jsonl",
        ({"prompt": q, "completion": a, "label": n % 2 == 0} for n, (q, a, _) in enumerate(texts)),
    )


def _instructions(folder: Path) -> None:
    """Write instructions in Alpaca's format, as rows of a data set and as one JSON file."""
    rows = []
    for text in sentences(2000):
        words = text.split()
        rows.append(
            {"instruction": " ".join(words[:12]), "input": "", "output": " ".join(words[12:])}
        )
    _lines(folder / "alpaca" / "train.jsonl", iter(rows))
    (folder / "alpaca.json").write_text(json.dumps(rows))


def _pairs(folder: Path) -> None:
    """Write sentence pairs in the columns of GLUE's MRPC, and its metric for `evaluate`."""
    for split, count in (("train", 2000), ("validation", 64), ("test", 64)):
        texts = list(sentences(count, 20))
        _lines(
            folder / "glue" / "mrpc" / f"{split}.jsonl",
            (
                {"sentence1": t[:60], "sentence2": t[60:], "label": n % 2, "idx": n}
                for n, t in enumerate(texts)
            ),
        )
    _card(folder / "glue", "mrpc", "mrpc/", ("train", "validation", "test"))
    metric = folder / "metrics" / "glue.py"
    metric.parent.mkdir()
    metric.write_text(_METRIC)


def _card(folder: Path, name: str, below: str, splits: Sequence[str]) -> None:
    """Write the card of a data set with one named configuration, of JSON lines by split."""
    files = "".join(f"  - split: {split}\n    path: {below}{split}.jsonl\n" for split in splits)
    card = f"---\nconfigs:\n- config_name: {name}\n  data_files:\n{files}---\n"
    (folder / "README.md").write_text(card)


_METRIC = '''"""Accuracy under the name of GLUE's metric."""

import datasets
import evaluate


class Glue(evaluate.Metric):
    def _info(self):
        columns = {name: datasets.Value("int64") for name in ("predictions", "references")}
        return evaluate.MetricInfo(
            description="accuracy",
            citation="",
            inputs_description="",
            features=datasets.Features(columns),
        )

    def _compute(self, predictions, references):
        right = sum(int(a == b) for a, b in zip(predictions, references, strict=True))
        return {"accuracy": right / len(references)}
'''


def _texts(folder: Path) -> None:
    """Write plain text: one file, names one a line, and the tokens that nanoGPT reads."""
    text = folder / "text"
    text.mkdir()
    (text / "wikitext-2.txt").write_text("\n".join(sentences(8000)))
    (text / "plays.txt").write_text("\n".join(["O God, O God!", *sentences(2000)]))
    (text / "names.txt").write_text("\n".join(_words()))
    _lines(folder / "wikitext" / "train.jsonl", ({"text": line} for line in sentences(2000)))
    _lines(folder / "wikitext" / "validation.jsonl", ({"text": line} for line in sentences(64)))
    _card(folder / "wikitext", "wikitext-2-v1", "", ("train", "validation"))
    tokens = np.random.default_rng(_SEED).integers(0, 65, 200_000, dtype=np.uint16)
    (folder / "tokens").mkdir()
    tokens.tofile(folder / "tokens" / "train.bin")
    tokens[:20_000].tofile(folder / "tokens" / "val.bin")
    (folder / "tokens" / "meta.pkl").write_bytes(pickle.dumps({"vocab_size": 65}))


def _configurations(folder: Path) -> None:
    """Copy DeepSpeed's ZeRO 3 with offload, as scripts for large models ship, and torchtitan's."""
    for file in CONFIGURATIONS.iterdir():
        shutil.copy(file, folder)


def _litgpt(folder: Path) -> None:
    """Write a checkpoint in litgpt's format, where litgpt is installed."""
    try:
        import litgpt
        from litgpt.utils import save_config
    except ImportError:
        return
    import torch

    torch.manual_seed(_SEED)
    made = folder / "litgpt"
    tokenizer = _tokenizer()
    config = litgpt.Config(
        name="tiny",
        block_size=128,
        vocab_size=len(tokenizer),
        padding_multiple=64,
        n_layer=2,
        n_head=4,
        n_embd=64,
    )
    tokenizer.save_pretrained(made)
    save_config(config, made)
    torch.save(litgpt.GPT(config).state_dict(), made / "lit_model.pth")


def _images(folder: Path) -> None:
    """Write digits in MNIST's format, and a few small pictures in one folder per class."""
    from PIL import Image

    generator = np.random.default_rng(_SEED)
    for part, count in (("train", 60_000), ("t10k", 10_000)):
        for kind, magic, data in (
            ("images-idx3", 2051, generator.integers(0, 256, (count, 28, 28), dtype=np.uint8)),
            ("labels-idx1", 2049, generator.integers(0, 10, count, dtype=np.uint8)),
        ):
            file = folder / "mnist" / f"{part}-{kind}-ubyte"
            file.parent.mkdir(exist_ok=True)
            head = np.array([magic, *data.shape], dtype=">i4").tobytes()
            file.write_bytes(head + data.tobytes())
    for split, count in (("train", 64), ("validation", 8)):
        for number in range(count):
            pixels = generator.integers(0, 256, (64, 64, 3), dtype=np.uint8)
            file = folder / "images" / split / "ab"[number % 2] / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.fromarray(pixels).save(file)


_MAKERS: tuple[Callable[[Path], None], ...] = (
    _models,
    _chats,
    _instructions,
    _pairs,
    _texts,
    _configurations,
    _litgpt,
    _images,
)

if __name__ == "__main__":
    make_inputs(Path(sys.argv[1]))
