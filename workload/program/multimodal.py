"""Model of video and text, built from `transformers`' own parts, and its synthetic samples.

LLaVA-OneVision as it comes: SigLIP encodes each frame, a two-layer MLP projects its patches to the
language model's width, and 2x2 pooling leaves a quarter of them (27 x 27 become 14 x 14 = 196).
Those tokens stand among the text's, and one that is learnt ends the video. The language model is
Qwen2-VL's text half, which is Qwen2 with rotary positions in three dimensions: time, height, width.

A sample is some text, one video, and more text; only text is learnt. Frames are drawn from a small
pool that the job's seed makes, as bytes, as a decoder would hand them over.
"""

import math
from collections.abc import Callable, Iterator
from typing import Any

import torch
from causal_lm import Share, generator_of

#: Frames in the pool. Which of them a sample shows, and in what order, is drawn each step.
POOL = 64
#: Share of the text that comes before the video: a question is short, an answer is long.
BEFORE = 1 / 8
#: What the loss passes over: torch's and transformers' own.
IGNORED = -100


def tokens_a_side(model: Any) -> int:
    """Return the number of tokens along a side of a frame, after pooling."""
    vision = model["vision_config"]
    return math.ceil(vision["image_size"] // vision["patch_size"] / 2)


class Layout:
    """Positions in every sample: text `before`, `visual` tokens; the loss counts `learnt`."""

    def __init__(self, job: dict[str, Any]) -> None:
        self._length, self._frames = job["sequence_length"], job["frames"]
        self._side = tokens_a_side(job["model"])
        self.visual = self._frames * self._side**2 + 1
        self.learnt = self._length - self.visual
        if self._frames < 1 or self.learnt < 2:
            raise ValueError(
                f"{self._frames} frames of {self._side**2} tokens do not fit in a sequence of "
                f"{self._length} tokens with text around them"
            )
        self.before = max(1, int(self.learnt * BEFORE))

    def positions(self) -> torch.Tensor:
        """Return time, height and width of each token, (3, sequence_length).

        Qwen2-VL (arXiv 2409.12191, section 2.1): text counts on equally in all three; a video's
        token has its frame, row and column, from the first free number; the text after it continues
        from the greatest number used.
        """
        side = torch.arange(self._side)
        grid = torch.cartesian_prod(torch.arange(self._frames), side, side).T
        text_before = torch.arange(self.before).expand(3, -1)
        video = grid + self.before
        rest = self._length - self.before - grid.shape[1]
        text_after = torch.arange(rest).expand(3, -1) + video.max() + 1
        return torch.cat([text_before, video, text_after], dim=1)

    def place(self, text: torch.Tensor, placeholder: int) -> torch.Tensor:
        """Mark the video's tokens in text (samples, sequence_length + 1) by a placeholder."""
        text[:, self.before : self.before + self.visual] = placeholder
        return text


def pool_of(job: dict[str, Any]) -> torch.Tensor:
    """Draw the frames for all samples: (POOL, channels, height, width), bytes."""
    vision = job["model"]["vision_config"]
    shape = (POOL, vision.get("num_channels", 3), vision["image_size"], vision["image_size"])
    return torch.randint(256, shape, dtype=torch.uint8, generator=generator_of(job, -1))


class Samples:
    """Samples of a job, one step at a time, in this rank's share."""

    def __init__(self, job: dict[str, Any], share: Share) -> None:
        self._job, self._share, self._pool = job, share, pool_of(job)
        self._layout = Layout(job)
        self._positions = self._layout.positions()

    def of_step(self, step: int) -> Iterator[tuple[dict[str, Any], torch.Tensor]]:
        """Yield inputs and target tokens of each micro-batch."""
        job, share, layout = self._job, self._share, self._layout
        generator = generator_of(job, step)
        samples, length = job["global_batch"], job["sequence_length"]
        placeholder = job["model"]["video_token_id"]
        highest = min(placeholder, job["model"]["image_token_id"])
        text = torch.randint(highest, (samples, length + 1), generator=generator)
        shown = torch.randint(POOL, (samples, job["frames"]), generator=generator)
        ids = share.of(layout.place(text, placeholder))
        shown = share.of(shown).chunk(share.parts, dim=-1)[share.part]
        own = share.slice(length)
        for tokens, frames in zip(ids, shown, strict=True):
            targets = tokens[:, 1:].masked_fill(tokens[:, 1:] == placeholder, IGNORED)
            inputs: dict[str, Any] = {
                "input_ids": tokens[:, :-1],
                "pixel_values_videos": self._pool[frames],
                "position_ids": self._positions[:, None].expand(-1, len(tokens), -1),
            }
            if share.parts > 1:
                # A part's own mean would weigh its text tokens by how many stand there.
                inputs["num_items_in_batch"] = len(tokens) * layout.learnt / share.parts
            yield inputs, targets[:, own].contiguous()


def prepare(model: Any, phase: Callable[[str], None]) -> None:
    """Make the encoder accept bytes, and mark the starts of encoder and language model."""
    inner = model.model

    def normalised(module: Any, given: tuple[Any, ...]) -> tuple[Any, ...]:
        frames, *others = given  # mean and deviation of SigLIP's own processor: one half each
        return (frames.float() / 127.5 - 1.0, *others)

    inner.vision_tower.register_forward_pre_hook(normalised)

    def projected(module: Any, given: Any, patches: torch.Tensor) -> None:
        if patches.requires_grad:
            patches.register_hook(lambda gradient: phase("backward.encoder"))

    inner.multi_modal_projector.register_forward_hook(projected)
    inner.language_model.register_forward_pre_hook(lambda module, given: phase("forward.language"))


class GatherFrames(torch.autograd.Function):
    """Features of all frames from those of each rank; gradients return to the encoding rank."""

    @staticmethod
    def forward(context: Any, own: torch.Tensor, group: Any) -> torch.Tensor:
        context.group = group
        parts = [torch.empty_like(own) for _ in range(torch.distributed.get_world_size(group))]
        torch.distributed.all_gather(parts, own.contiguous(), group=group)
        return torch.cat(parts, dim=1)

    @staticmethod
    def backward(context: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        whole = gradients[0].contiguous()
        torch.distributed.all_reduce(whole, group=context.group)
        degree, rank = (
            torch.distributed.get_world_size(context.group),
            torch.distributed.get_rank(context.group),
        )
        return whole.chunk(degree, dim=1)[rank], None


def split_sequences(model: Any, group: Any) -> None:
    """Split the frames of a sequence over its ranks for encoding, and its tokens afterwards."""
    inner = model.model
    degree, rank = torch.distributed.get_world_size(group), torch.distributed.get_rank(group)
    encode = inner.get_video_features

    def encode_all(*given: Any, **named: Any) -> Any:
        encoded = encode(*given, **named)
        tokens, end = encoded.pooler_output[:, :-1], encoded.pooler_output[:, -1:]
        encoded.pooler_output = torch.cat([GatherFrames.apply(tokens, group), end], dim=1)
        return encoded

    def keep_part(module: Any, given: tuple[Any, ...], named: dict[str, Any]) -> Any:
        named = dict(named)
        named["inputs_embeds"] = named["inputs_embeds"].chunk(degree, dim=1)[rank]
        named["position_ids"] = named["position_ids"].chunk(degree, dim=2)[rank]
        return given, named

    inner.get_video_features = encode_all
    inner.language_model.register_forward_pre_hook(keep_part, with_kwargs=True)
