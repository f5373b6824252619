"""LoRA in the built-in training program: adapters, frozen weights, and what has a gradient."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tuner.search_spaces.job import LoRA, load_job
from tuner.search_spaces.model_facts import facts_of

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")

JOB = load_job("tiny-qwen2.5-lora")
SMALL = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4, "vocab_size": 101}
GATED = {**SMALL, "intermediate_size": 100, "num_key_value_heads": 2, "pad_token_id": 0}
GPT2 = {"n_embd": 64, "n_layer": 3, "n_head": 4, "vocab_size": 101}
OPT = {**SMALL, "ffn_dim": 100, "word_embed_proj_dim": 32, "do_layer_norm_before": False}
EXPERTS = {**GATED, "num_experts": 6, "num_experts_per_tok": 2}


@pytest.mark.parametrize(
    ("model_type", "sizes"),
    [
        ("gpt2", {**GPT2, "n_inner": 100}),
        ("opt", {**OPT, "pad_token_id": 0}),
        ("gpt_neox", {**SMALL, "intermediate_size": 100}),
        ("llama", {**GATED, "head_dim": 24, "attention_bias": True}),
        ("mistral", GATED),
        ("qwen2", GATED),
        ("qwen3", {**GATED, "head_dim": 16}),
        ("olmo2", GATED),
        ("gemma", {**GATED, "head_dim": 16}),
        ("olmoe", EXPERTS),
        ("mixtral", {**GATED, "num_local_experts": 6}),
    ],
)
@pytest.mark.parametrize("targets", ["attention", "all-linear"])
def test_trainable_parameters_are_those_of_the_real_model(
    causal_lm: Any, model_type: str, sizes: dict[str, Any], targets: str
) -> None:
    if targets == "all-linear" and model_type in ("olmoe", "mixtral"):
        pytest.skip("experts are not adapted")
    job = replace(JOB, model={"model_type": model_type, **sizes}, lora=LoRA(5, targets))
    model = causal_lm.planned_model(job.to_json(), "none")
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    frozen = sum(p.numel() for p in model.parameters() if not p.requires_grad)
    assert (trained, frozen) == (facts_of(job).trainable_parameters, facts_of(job).parameters)


def test_training_starts_from_the_plain_model_and_moves_adapters_alone(causal_lm: Any) -> None:
    plain = causal_lm.build_model(replace(JOB, lora=None).to_json(), "none")
    model = causal_lm.build_model(JOB.to_json(), "none")
    weights = dict(model.named_parameters())
    for name, weight in plain.named_parameters():
        assert torch.equal(weight, weights[name])
        assert not weights[name].requires_grad
    tokens = causal_lm.tokens_of_step(JOB.to_json(), 0)[:1, :-1]
    loss = model(input_ids=tokens, labels=tokens).loss
    assert torch.equal(loss, plain(input_ids=tokens, labels=tokens).loss)
    loss.backward()
    gradients = {name: w.grad for name, w in weights.items() if w.grad is not None}
    assert set(gradients) == {name for name in weights if ".adapter." in name}
    # B is zero, so the first step moves B alone.
    assert all(bool(g.any()) == (".up." in name) for name, g in gradients.items())
