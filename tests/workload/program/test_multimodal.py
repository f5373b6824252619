"""The model of video and text: its samples, its positions, its parts, and its facts."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from tuner.models.analytic.model import AnalyticModel
from tuner.search_spaces.cluster import load_cluster
from tuner.search_spaces.configuration import Configuration
from tuner.search_spaces.errors import InputError
from tuner.search_spaces.job import TrainingJob, load_job
from tuner.search_spaces.model_facts import ModelFacts, facts_of
from tuner.search_spaces.rules import unrunnable

JOB = load_job("tiny-lmm")
PLAIN = Configuration.of(data_parallel=2, micro_batch=2)


# Facts.


def test_the_studys_model_has_196_tokens_a_frame() -> None:
    job = load_job("lmm-7b")
    vision = facts_of(job).vision
    assert vision is not None
    assert (vision.patches, vision.tokens) == (27 * 27, 196)
    assert vision.tokens_of(job.frames) == 60 * 196 + 1
    # LLaVA-OneVision-Qwen2-7B is published with 8.03 billion parameters.
    assert facts_of(job).parameters == pytest.approx(8.03e9, rel=1e-3)


def test_flops_of_frames_are_added_to_those_of_tokens() -> None:
    facts = facts_of(JOB)
    assert facts.vision is not None
    text = facts.flops(JOB.global_batch, JOB.sequence_length)
    per_frame = 3 * facts.vision.forward_flops(1)
    both = facts.flops(JOB.global_batch, JOB.sequence_length, JOB.frames)
    assert both == pytest.approx(text + JOB.global_batch * JOB.frames * per_frame)


def changed(**vision: Any) -> dict[str, Any]:
    return {**JOB.model, "vision_config": {**JOB.model["vision_config"], **vision}}


@pytest.mark.parametrize(
    "model",
    [
        {**JOB.model, "multimodal_projector_bias": False},
        changed(vision_use_head=True),
        changed(image_size=60, num_channels=1, num_hidden_layers=3),
    ],
)
def test_parameters_equal_those_of_the_model_transformers_builds(model: dict[str, Any]) -> None:
    torch = pytest.importorskip("torch")
    transformers = pytest.importorskip("transformers")
    values = dict(model)
    config = transformers.AutoConfig.for_model(values.pop("model_type"), **values)
    with torch.device("meta"):
        built = transformers.AutoModelForImageTextToText.from_config(config)
    counted = sum(parameter.numel() for parameter in built.parameters())
    assert ModelFacts.from_config(model).parameters == counted


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ({**JOB.model, "text_config": None}, ["text_config"]),
        (changed(model_type="clip_vision_model"), ["clip_vision_model", "siglip_vision_model"]),
        (changed(patch_size=None), ["patch_size"]),
        (changed(hidden_size=True), ["hidden_size", "at least 1"]),
        (changed(num_attention_heads=5), ["5", "divisor"]),
    ],
)
def test_a_bad_encoder_is_one_sentence(model: dict[str, Any], words: list[str]) -> None:
    with pytest.raises(InputError) as error:
        ModelFacts.from_config(model)
    assert all(word in str(error.value) for word in words)


def test_frames_that_cannot_be_fed_are_refused_with_the_reason() -> None:
    def reasons(job: TrainingJob, **knobs: Any) -> str:
        return "; ".join(unrunnable(Configuration.of(micro_batch=1, **knobs), job))

    assert unrunnable(PLAIN, JOB) == []
    assert "151 tokens" in reasons(replace(JOB, frames=6))
    assert "no frames" in reasons(replace(JOB, frames=0))
    assert "reads no video" in reasons(replace(load_job("tiny-gpt"), frames=2))
    assert "does not divide the 3 frames" in reasons(replace(JOB, frames=3), sequence_parallel=2)
    heads = replace(JOB, model=changed(hidden_size=63, num_attention_heads=3))
    assert "the encoder's 3 heads" in reasons(heads, tensor_parallel=2)
    with pytest.raises(InputError, match="frames"):
        replace(JOB, frames=-1)
    assert TrainingJob.from_json(json.loads(json.dumps(JOB.to_json()))) == JOB


def test_the_analytic_model_charges_the_encoder_to_the_stage_that_embeds() -> None:
    job, cluster = load_job("lmm-7b"), load_cluster("jupiter-32")
    # transformers has no class for the language model alone; its blocks are those of Qwen2.
    model = {**job.model["text_config"], "model_type": "qwen2"}
    text = replace(job, model=model, frames=0)
    vision = facts_of(job).vision
    assert vision is not None
    share = vision.forward_flops(job.frames) / facts_of(text).forward_flops(1, 12288)
    with_frames, without = AnalyticModel(job, cluster), AnalyticModel(text, cluster)
    for knobs in ({"data_parallel": 4}, {"data_parallel": 1, "sequence_parallel": 4}):
        asked = [Configuration.of(micro_batch=1, activation_checkpointing="full", **knobs)]
        more = with_frames.predict(asked).step_time_s / without.predict(asked).step_time_s - 1
        # Narrow products take longer than their arithmetic; under ZeRO 0 communication is the same.
        assert 0.5 * share < more[0] < 2.5 * share
    plain, again = (
        float(with_frames.memory_bytes([asked])[0] - without.memory_bytes([asked])[0])
        for asked in (
            Configuration.of(data_parallel=4, micro_batch=1),
            Configuration.of(data_parallel=4, micro_batch=1, activation_checkpointing="full"),
        )
    )
    # 26 blocks keep about 15 widths of 43,740 patches in 16 bits: 40 GB; recomputed, one each.
    assert plain - again == pytest.approx(36e9, rel=0.15)


# The program's own modules.

torch = pytest.importorskip("torch")
pytest.importorskip("transformers")


def share(**given: int) -> Any:
    from causal_lm import Share

    usual = {"accumulation": 2, "replicas": 1, "replica": 0, "micro_batch": 4}
    return Share(**{**usual, **given})


def test_text_alone_is_learnt(multimodal: Any) -> None:
    layout, job = multimodal.Layout(JOB.to_json()), JOB.to_json()
    assert (layout.visual, layout.learnt, layout.before) == (101, 27, 3)
    for inputs, targets in multimodal.Samples(job, share()).of_step(0):
        placeholder = inputs["input_ids"] == 2047
        assert placeholder.sum(1).tolist() == [layout.visual] * 4
        assert (targets != multimodal.IGNORED).sum(1).tolist() == [layout.learnt] * 4
        # What is learnt at one place is what stands at the next, where that is text.
        here, after = targets[:, :-1], inputs["input_ids"][:, 1:]
        assert torch.equal(here, after.masked_fill(placeholder[:, 1:], multimodal.IGNORED))
        assert inputs["pixel_values_videos"].shape == (4, 4, 3, 54, 54)
        assert inputs["pixel_values_videos"].dtype == torch.uint8


def test_parts_and_replicas_make_up_the_same_step(multimodal: Any) -> None:
    job = JOB.to_json()
    whole = list(multimodal.Samples(job, share()).of_step(3))
    for replica in range(2):
        for part in range(2):
            mine = share(replicas=2, replica=replica, micro_batch=2, parts=2, part=part)
            for (inputs, targets), (all_inputs, all_targets) in zip(
                multimodal.Samples(job, mine).of_step(3), whole, strict=True
            ):
                rows, tokens = slice(2 * replica, 2 * replica + 2), slice(64 * part, 64 * part + 64)
                frames = slice(2 * part, 2 * part + 2)
                assert torch.equal(targets, all_targets[rows, tokens])
                assert torch.equal(inputs["input_ids"], all_inputs["input_ids"][rows])
                seen = all_inputs["pixel_values_videos"][rows, frames]
                assert torch.equal(inputs["pixel_values_videos"], seen)
                # The parts' sums over this number make the whole sample's mean.
                assert 2 * inputs["num_items_in_batch"] == (all_targets[rows] != -100).sum()


def test_positions_are_those_of_qwen2_vl(multimodal: Any) -> None:
    """Of a video of one frame, where transformers' own function follows the paper, all of them; of
    more frames those of the video (transformers 5.23 lets the text after it begin too early: at the
    frame's side rather than past the greatest position)."""
    from transformers import Qwen2VLConfig
    from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel

    def theirs(job: TrainingJob) -> Any:
        layout = multimodal.Layout(job.to_json())
        vision = layout.visual - 1
        kinds = torch.zeros(1, job.sequence_length, dtype=torch.int32)
        kinds[:, layout.before : layout.before + vision] = 2
        grid = torch.tensor([[job.frames, 5, 5]])
        model = Qwen2VLModel.__new__(Qwen2VLModel)
        torch.nn.Module.__init__(model)
        model.config = Qwen2VLConfig(vision_config={"spatial_merge_size": 1})
        ids = torch.zeros(1, job.sequence_length, dtype=torch.long)
        return model.get_rope_index(ids, kinds, video_grid_thw=grid)[0][:, 0]

    one = replace(JOB, frames=1)
    assert torch.equal(multimodal.Layout(one.to_json()).positions(), theirs(one))
    layout = multimodal.Layout(JOB.to_json())
    end = layout.before + layout.visual - 1
    ours = layout.positions()
    assert torch.equal(ours[:, :end], theirs(JOB)[:, :end])
    # Text goes on from the greatest number used, equally in all three.
    assert ours[:, end].tolist() == [int(ours[:, :end].max()) + 1] * 3
    assert torch.equal(ours[:, -1] - ours[:, end], torch.full((3,), 128 - end - 1))


def test_phases_of_a_step_are_marked_in_their_order(multimodal: Any) -> None:
    from causal_lm import build_model

    job = replace(JOB, global_batch=2).to_json()
    for mode in ("none", "full"):  # recomputation marks nothing a second time
        model = build_model(job, mode)
        told: list[str] = []
        multimodal.prepare(model, told.append)
        samples = multimodal.Samples(job, share(accumulation=1, micro_batch=2))
        inputs, targets = next(samples.of_step(0))
        model(**inputs, labels=targets, shift_labels=targets).loss.backward()
        assert told == ["forward.language", "backward.encoder"]
        assert model.model.vision_tower.embeddings.patch_embedding.weight.grad.abs().sum() > 0


def test_every_second_block_of_encoder_and_decoder_is_recomputed(multimodal: Any) -> None:
    from causal_lm import blocks_of, build_model, encoder_blocks_of

    model = build_model(JOB.to_json(), "every_2")
    for blocks, count in ((blocks_of(model), 4), (encoder_blocks_of(model), 2)):
        assert len(blocks) == count
        assert [block.gradient_checkpointing for block in blocks] == [True, False] * (count // 2)
