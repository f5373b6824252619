"""Expert parallelism by DeepSpeed: the experts of each layer distributed over ranks.

`transformers` keeps all experts of a layer in one tensor; `deepspeed.moe.layer.MoE` holds each
rank's own. The weights are taken over, no token is dropped, and DeepSpeed's gate, which makes the
chosen experts' weights sum to one, is scaled back where the model does not.
"""

from typing import Any

import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer


class Expert(torch.nn.Module):
    """Gated MLP, taken out of the layer's stacked weights."""

    def __init__(self, stacked: Any) -> None:
        super().__init__()
        _, double, hidden = stacked.gate_up_proj.shape
        self.gate_up = torch.nn.Linear(hidden, double, bias=False)
        self.down = torch.nn.Linear(double // 2, hidden, bias=False)
        self.act = stacked.act_fn

    def take(self, stacked: Any, number: int) -> None:
        with torch.no_grad():
            self.gate_up.weight.copy_(stacked.gate_up_proj[number])
            self.down.weight.copy_(stacked.down_proj[number])

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(tokens).chunk(2, dim=-1)
        return self.down(self.act(gate) * up)


class SpreadExperts(torch.nn.Module):
    """Sparse MLP with its experts distributed over `degree` ranks."""

    def __init__(self, block: Any, degree: int) -> None:
        super().__init__()
        gate, stacked = block.gate, block.experts
        count, hidden = gate.weight.shape
        self.chosen, self.sums_to_one = int(gate.top_k), bool(gate.norm_topk_prob)
        if self.chosen == 1 and self.sums_to_one:
            raise NotImplementedError(
                "one expert whose weight is always one leaves no gate to train"
            )
        if self.chosen == 2:
            # DeepSpeed's gate for two draws the second at random unless told not to.
            options: dict[str, Any] = {"top2_2nd_expert_sampling": False}
        else:
            options = {}
        self.moe = MoE(
            hidden,
            Expert(stacked),
            num_experts=count,
            ep_size=degree,
            k=self.chosen,
            drop_tokens=False,
            use_rts=False,
            **options,
        )
        layer: Any = self.moe.deepspeed_moe
        first = torch.distributed.get_rank() % degree * (count // degree)
        for number, expert in enumerate(layer.experts.deepspeed_experts):
            expert.take(stacked, first + number)
        with torch.no_grad():
            layer.gate.wg.weight.copy_(gate.weight)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out, _, _ = self.moe(hidden)
        # DeepSpeed's gate gives one chosen expert its probability, but several make up one.
        if self.sums_to_one or self.chosen == 1:
            return out
        gate: Any = self.moe.deepspeed_moe.gate.wg
        odds = torch.softmax(gate(hidden.to(gate.weight.dtype)).float(), dim=-1)
        share = odds.topk(self.chosen, dim=-1).values.sum(-1, keepdim=True)
        return out * share.to(out.dtype)


def spread(model: Any, degree: int) -> None:
    """Distribute each layer's experts over ranks; NotImplementedError if not stacked as OLMoE's."""
    for block in model.get_decoder().layers:
        sparse: Any = getattr(block, "mlp", None)
        stacked = getattr(sparse, "experts", None)
        if stacked is None:
            continue  # a dense layer among sparse ones
        supported = hasattr(stacked, "gate_up_proj") and hasattr(sparse.gate, "norm_topk_prob")
        if not supported or hasattr(sparse, "shared_expert"):
            raise NotImplementedError(f"experts of {type(model).__name__} are not spread yet")
        block.mlp = SpreadExperts(sparse, degree)


def parameter_groups(model: Any) -> list[dict[str, Any]]:
    """Return the optimizer's groups, experts apart: DeepSpeed reduces them over other ranks."""
    return split_params_into_different_moe_groups_for_optimizer(
        {"params": list(model.parameters()), "name": "parameters"}
    )
