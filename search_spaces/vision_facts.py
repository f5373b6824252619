"""Size and arithmetic of the encoder that turns video frames into tokens.

It is a SigLIP encoder, which cuts a frame into patches and runs a plain transformer over them; a
two-layer MLP that projects each patch to the language model's width; and 2x2 pooling, which leaves
a quarter of them as tokens. A learned token ends the video. All is as in LLaVA-OneVision
(`transformers.models.llava_onevision`), parameter by parameter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tuner.search_spaces.errors import InputError, InvalidValue, check_integer

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "image_size",
    "patch_size",
)


@dataclass(frozen=True)
class VisionFacts:
    """Sizes of the encoder of a multimodal model, including its projector.

    Attributes:
        tokens: those of one frame that the language model reads.
        parameters: parameters of encoder, projector and the token that ends a video.
        matmul_parameters: those of `parameters` that multiply each patch.
    """

    layers: int
    hidden: int
    heads: int
    intermediate: int
    patches: int
    tokens: int
    extra_tokens: int
    parameters: int
    matmul_parameters: int
    largest_layer: int

    @classmethod
    def from_config(cls, config: Mapping[str, Any], width: int) -> VisionFacts:
        """Read a multimodal configuration; `width` is the language model's."""
        vision = config["vision_config"]
        kind = vision.get("model_type") if isinstance(vision, Mapping) else None
        if kind != "siglip_vision_model":
            raise InvalidValue(
                "vision_config.model_type of the model config", kind, "siglip_vision_model"
            )
        sizes: dict[str, int] = {}
        for name in (*_SIZES, "num_channels"):
            value = vision.get(name, 3 if name == "num_channels" else None)
            if value is None:
                raise InputError(f"the vision_config of the model config does not give {name}")
            sizes[name] = check_integer(f"{name} of the vision_config", value)
        hidden, wide, layers, heads, image, patch = (sizes[name] for name in _SIZES)
        if hidden % heads:
            raise InvalidValue(
                "num_attention_heads of the vision_config",
                heads,
                f"a divisor of the hidden size {hidden}",
            )
        side = image // patch
        patches = side * side
        cells = sizes["num_channels"] * patch * patch * hidden
        block_matrices = 4 * hidden * hidden + 2 * hidden * wide
        # Biases of four projections and two MLP matrices; two norms with weight and bias.
        block = block_matrices + 4 * hidden + wide + hidden + 4 * hidden
        parameters = cells + hidden + patches * hidden + layers * block + 2 * hidden
        if vision.get("vision_use_head", True):
            # A probe, attention, a norm and an MLP that pool a frame to one vector.
            parameters += hidden + 4 * hidden * hidden + 4 * hidden + 2 * hidden
            parameters += 2 * hidden * wide + wide + hidden
        projector = hidden * width + width * width
        biases = 2 * width if config.get("multimodal_projector_bias", True) else 0
        return cls(
            layers=layers,
            hidden=hidden,
            heads=heads,
            intermediate=wide,
            patches=patches,
            tokens=math.ceil(side / 2) ** 2,
            extra_tokens=1,
            parameters=parameters + projector + biases + width,
            matmul_parameters=cells + layers * block_matrices + projector,
            largest_layer=max(block, projector + biases),
        )

    def tokens_of(self, frames: int) -> int:
        """Return the number of tokens of a video."""
        return frames * self.tokens + self.extra_tokens

    def forward_flops(self, frames: float) -> float:
        """Return the FLOPs of encoding and projecting frames.

        They are 2 per parameter and patch, and 4 n h per patch and layer for attention over the
        patches of a frame (see `ModelFacts.forward_flops`).
        """
        attention = 4.0 * self.patches * self.hidden * self.layers
        return frames * self.patches * (2.0 * self.matmul_parameters + attention)
