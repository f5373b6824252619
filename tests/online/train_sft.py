"""TRL's SFTTrainer on a tiny model and sentences made here; prints its losses: STEPS, FOLDER."""

import random
import sys

import torch
from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import GPT2Config, GPT2LMHeadModel, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

steps, folder = int(sys.argv[1]), sys.argv[2]
words = {word: number for number, word in enumerate(["<pad>", "<unk>", *map(str, range(30))])}
tokenizer = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
fast = PreTrainedTokenizerFast(
    tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<pad>", unk_token="<unk>"
)
torch.manual_seed(0)
shape = {"n_positions": 32, "n_embd": 16, "n_layer": 1, "n_head": 2}
model = GPT2LMHeadModel(
    GPT2Config(vocab_size=len(words), pad_token_id=0, eos_token_id=0, bos_token_id=0, **shape)
)
draw = random.Random(0)
texts = [" ".join(str(draw.randrange(30)) for _ in range(12)) for _ in range(400)]


class Losses(TrainerCallback):
    def on_log(self, args, state, control, logs=None, **more):  # type: ignore[no-untyped-def]
        if state.is_world_process_zero and logs and "loss" in logs:
            print("loss", state.global_step, repr(logs["loss"]), flush=True)


SFTTrainer(
    model=model,
    processing_class=fast,
    train_dataset=Dataset.from_dict({"text": texts}),
    callbacks=[Losses()],
    args=SFTConfig(
        output_dir=folder,
        max_steps=steps,
        per_device_train_batch_size=8,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
        use_cpu=True,
        bf16=False,
        disable_tqdm=True,
    ),
).train()
