"""Program that builds models by transformers, without weights, and prints their contents.

It runs by path in an interpreter of its own (`tuner.search_spaces.library_count`), because torch
takes seconds to import. Each line of the input is a Hugging Face configuration, each line of the
output its counts, or why there are none. Only classes of the installed transformers are used: code
that a model's repository brings is never loaded, and nothing is fetched.
"""

from __future__ import annotations

import importlib.util
import json
import math
import os
import re
import resource
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from itertools import product
from pathlib import Path
from typing import Any

#: Kinds of failure that the caller explains: the model_type is unknown, the class cannot be built.
UNKNOWN, FAILED = "unknown", "failed"
#: Parts of a configuration that describe how weights are stored or loaded, not the model.
STORAGE = ("quantization_config", "auto_map", "torch_dtype", "dtype", "_name_or_path")
#: Families whose layers keep for the backward pass what the formulas of the analytic models say,
#: which were compared with torch's own counts (`python -m benchmarks.fit`).
DESCRIBED = (
    *(
        "gemma",
        "gpt2",
        "gpt_neox",
        "llama",
        "llava_onevision",
        "mistral",
        "mixtral",
        "olmo2",
        "olmoe",
    ),
    *("opt", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"),
)
#: Mappings from configurations to classes that can be trained, in the order of preference.
_MAPPINGS = (
    *("MODEL_FOR_CAUSAL_LM_MAPPING_NAMES", "MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES"),
    *("MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES", "MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES"),
    *("MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES", "MODEL_FOR_MASKED_LM_MAPPING_NAMES"),
)
#: Beginnings of the names of parameters of a recurrence (Mamba, gated delta rule, RWKV).
_RECURRENT = ("A_log", "dt_", "time_")
#: Parts of the paths of experts that every token visits.
_SHARED = ("shared_expert", "shared_mlp")
#: Keys of each size in configurations of text models, the first that is given.
_SIZES = {
    "hidden": ("hidden_size",),
    "heads": ("decoder_attention_heads", "num_attention_heads"),
    "kv_heads": ("num_key_value_heads",),
    "head_dim": ("v_head_dim", "head_dim"),
    "vocab": ("vocab_size",),
    "dense": ("decoder_ffn_dim", "intermediate_size", "ffn_dim", "n_inner", "d_ff"),
    "expert": ("moe_intermediate_size", "expert_intermediate_size"),
    "experts": ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"),
    "experts_per_token": ("num_experts_per_tok", "moe_topk", "moe_top_k", "moe_k"),
    "positions": ("max_target_positions", "max_position_embeddings"),
}


def count(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of the model that a configuration describes."""
    import transformers

    model_type = config.get("model_type")
    counted_as = {}
    if model_type not in transformers.CONFIG_MAPPING:
        model_type = _type_of_class(config)
        if not model_type:
            return {"failure": UNKNOWN, "transformers": transformers.__version__}
        config, counted_as = {**config, "model_type": model_type}, {"counted_as": model_type}
    try:
        model, builders = _model(config)
        counts = {**_counts(model), **counted_as, "transformers": transformers.__version__}
        if model_type not in DESCRIBED:
            _run_layers(counts["kinds"], builders)
        return counts
    except Exception as error:  # any class may raise anything on sizes that do not match
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return {"failure": FAILED, "why": text[:300], "transformers": transformers.__version__}


def _type_of_class(config: Mapping[str, Any]) -> str:
    """Return the model_type of transformers' class that a configuration of another type names in
    `architectures`, as Kimi-K2 that of DeepSeek-V3; "" if it names none."""
    from transformers.models.auto import modeling_auto

    named = config.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    types = modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.items()
    return next((name for name, built in types if built == first), "")


def adapters(config: Mapping[str, Any], lora: Mapping[str, Any]) -> dict[str, Any]:
    """Return what LoRA adds to a configuration's model, in its blocks and outside them.

    peft adds it where it is installed: what it does to experts follows tables of its own. Without
    it, layers are found as it finds them: a name is that of a module or the end of its path, a
    regular expression fits a whole path, and "all-linear" is every linear layer but the output
    projection.

    Args:
        lora: `rank` and `dora`; `names` of modules or, if there are none, `targets`: a regular
            expression, "attention" or "all-linear"; and `text_alone`, if encoders beside the
            language model have none.
    """
    import transformers

    version = {"transformers": transformers.__version__}
    if config["model_type"] not in transformers.CONFIG_MAPPING:
        config = {**config, "model_type": _type_of_class(config)}
    try:
        model, _ = _model(config)
        held = _Model(model)
        inside = {id(module) for block in held.blocks for module in block.modules()}
        linear = [m for path, m in model.named_modules() if _is_linear(m) and id(m) in inside]
        # bitsandbytes replaces modules, and not the parameters in which experts are stacked.
        found = {"linear": _numel(m.weight for m in linear), "class": type(model).__name__}
        installed = importlib.util.find_spec("peft") is not None
        add = _adapters_of_peft if installed else _adapters_as_peft
        found |= {"adapted": add(held, lora, inside), "by_peft": installed}
    except Exception as error:  # any class may raise anything on sizes that do not match
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return {"failure": FAILED, "why": text[:300], **version}
    stacked = [w for b in held.blocks for p, owner, w in _owned(b) if held.is_expert(p, owner, w)]
    return {**found, **version, "stacked_experts": any(w.dim() == 3 for w in stacked)}


class _Adapters:
    """Sums over adapters, in the blocks and outside them."""

    def __init__(self, inside: set[int]) -> None:
        self.inside, self.attention = inside, True
        names = ("adapters", "inputs", "outputs", "parameters")
        self.parts = {part: dict.fromkeys(names, 0) for part in ("blocks", "outside")}

    def add(self, path: str, module: Any, parameters: int) -> None:
        """Add the adapter of a module, with the widths of a product."""
        here = id(module) in self.inside
        widths = _widths(module) if _is_linear(module) else None
        part = self.parts["blocks" if here else "outside"]
        for name, number in zip(part, (1, *(widths or (0, 0)), parameters), strict=True):
            part[name] += number
        self.attention = self.attention and (not here or _is_attention(path))

    def report(self) -> dict[str, Any]:
        """Return the sums, and if the blocks' adapters are those of attention alone."""
        return {**self.parts, "attention": self.attention}


def _adapters_of_peft(held: _Model, lora: Mapping[str, Any], inside: set[int]) -> dict[str, Any]:
    import peft

    targets: Any = list(lora["names"]) or lora["targets"]
    if targets == "attention" or lora["text_alone"]:
        within = _text_modules(held, lora)
        every = held.model.named_modules()
        targets = [path for path, m in every if id(m) in within and _is_target(path, m, held, lora)]
    given = peft.LoraConfig(r=lora["rank"], target_modules=targets, use_dora=lora["dora"])
    adapted: Any = peft.get_peft_model(held.model, given).base_model.model
    found = _Adapters(inside)
    for path, module in adapted.named_modules():
        if isinstance(module, peft.tuners.lora.LoraLayer):
            own = [getattr(module, name, None) for name in module.adapter_layer_names]
            weights = {id(w): w for each in own if each is not None for w in each.parameters()}
            found.add(path, module.get_base_layer(), _numel(weights.values()))
    return found.report()


def _adapters_as_peft(held: _Model, lora: Mapping[str, Any], inside: set[int]) -> dict[str, Any]:
    found, within = _Adapters(inside), _text_modules(held, lora)
    for path, module in held.model.named_modules():
        if id(module) not in within or not _is_target(path, module, held, lora):
            continue
        if (widths := _widths(module)) is None:
            raise ValueError(f"Target module {path}, a {type(module).__name__}, is not supported")
        found.add(path, module, lora["rank"] * sum(widths) + lora["dora"] * widths[1])
    return found.report()


def _text_modules(held: _Model, lora: Mapping[str, Any]) -> set[int]:
    alone = lora["text_alone"] and held.decoder is not None
    return {id(module) for module in (held.decoder if alone else held.model).modules()}


def _is_target(path: str, module: Any, held: _Model, lora: Mapping[str, Any]) -> bool:
    if names := lora["names"]:
        return any(path == name or path.endswith(f".{name}") for name in names)
    if lora["targets"] not in ("attention", "all-linear"):
        return re.fullmatch(lora["targets"], path) is not None
    if not _is_linear(module) or module is held.model.get_output_embeddings():
        return False
    return lora["targets"] == "all-linear" or _is_attention(path)


def _is_attention(path: str) -> bool:
    return any("attn" in name or "attention" in name.lower() for name in path.split(".")[:-1])


def _is_linear(module: Any) -> bool:
    import torch
    from transformers.pytorch_utils import Conv1D

    return isinstance(module, (torch.nn.Linear, Conv1D))


def _widths(module: Any) -> tuple[int, int] | None:
    """Return the parameters of A and of B of a module's adapter of rank 1; None if peft has none
    for such a module.
    """
    import torch

    if isinstance(module, torch.nn.Linear):
        return module.in_features, module.out_features
    if _is_linear(module):
        return module.weight.shape[0], module.weight.shape[1]
    if isinstance(module, torch.nn.Embedding):
        return module.num_embeddings, module.embedding_dim
    if isinstance(module, torch.nn.modules.conv._ConvNd):
        return module.in_channels // module.groups * math.prod(module.kernel_size), (
            module.out_channels
        )
    return None


def _model(config: Mapping[str, Any]) -> tuple[Any, list[Callable[[], Any]]]:
    """Return the model of the first class that takes the configuration, and the builder of its
    text.

    Of a nested configuration the model of text alone is built first: it needs no images to run.
    """
    import torch
    import transformers

    kept = {name: value for name, value in config.items() if name not in STORAGE}
    read = transformers.CONFIG_MAPPING[config["model_type"]].from_dict(kept)
    failure: Exception = ValueError(f"transformers has no model of text for {type(read).__name__}")
    for number, built in enumerate(_classes_of(read, config)):
        try:
            with torch.device("meta"):
                return built(deepcopy(read)), _builders(built, read)
        except Exception as error:  # a class of text alone does not take a nested configuration
            failure = failure if number else error
    raise failure


def _builders(built: Any, read: Any) -> list[Callable[[], Any]]:
    import transformers

    whole = lambda: built(deepcopy(read))  # noqa: E731
    text = read.get_text_config(decoder=True)
    if text is read:
        return [whole]
    return [lambda: transformers.AutoModelForCausalLM.from_config(deepcopy(text)), whole]


def _classes_of(read: Any, config: Mapping[str, Any]) -> Iterator[Any]:
    """Yield the classes of a configuration that end in a loss, those that it names first."""
    import transformers
    from transformers.models.auto import modeling_auto

    architectures = config.get("architectures")
    named = [str(name) for name in architectures] if isinstance(architectures, list) else []
    names = [name for name in named if "For" in name or "LMHead" in name]
    # A decoder alone has a class, too, that hardly anybody trains.
    whole = bool(getattr(read, "is_encoder_decoder", False))
    for mapping in sorted(_MAPPINGS, key=lambda name: whole and "SEQ" not in name):
        found = getattr(modeling_auto, mapping, {}).get(config["model_type"], ())
        names += [found] if isinstance(found, str) else list(found)
    for name in dict.fromkeys(names):
        found = getattr(transformers, name, None)
        if not isinstance(found, type) or not issubclass(found, transformers.PreTrainedModel):
            continue
        if name not in named or found.config_class is type(read):
            yield found


class _Model:
    """Model whose parameters are divided into blocks, tables, the head and the rest."""

    def __init__(self, model: Any) -> None:
        self.model, self.config = model, model.config.get_text_config(decoder=True)
        self.sizes = {name: self._size(keys) for name, keys in _SIZES.items()}
        self.decoder = self._find_decoder()
        self.blocks = self._find_blocks()
        self.tables = {
            id(module.weight)
            for module in model.modules()
            if "Embedding" in type(module).__name__ and hasattr(module, "weight")
        }

    def _size(self, keys: tuple[str, ...]) -> int | None:
        values = (_attribute(self.config, key) for key in keys)
        whole = (each for each in values if isinstance(each, int) and each > 0)
        return next(whole, None)

    def _find_decoder(self) -> Any:
        import torch

        get = getattr(self.model, "get_decoder", None)
        decoder = get() if get is not None else None
        return decoder if isinstance(decoder, torch.nn.Module) else None

    def _find_blocks(self) -> list[Any]:
        """Return the decoder's blocks: the list of as many modules as layers that holds most."""
        import torch

        layers = getattr(self.config, "num_hidden_layers", None)
        inside = self.model if self.decoder is None else self.decoder
        lists = [m for m in inside.modules() if isinstance(m, torch.nn.ModuleList) and len(m)]
        lists = lists or [m for m in self.model.modules() if isinstance(m, torch.nn.ModuleList)]
        if not lists:
            return []
        blocks = max(lists, key=lambda m: (len(m) == layers, _numel(m.parameters())))
        return list(blocks)

    def between(self) -> list[Any]:
        """Return the matrices of the decoder itself, which are in none of its blocks."""
        import torch

        children = self.decoder.children() if self.decoder is not None else ()
        return [each.weight for each in children if isinstance(each, torch.nn.Linear)]

    def learned_positions(self, tokens: Any) -> bool:
        """Return True if a table has a row for each position, and a few more at most."""
        rows = [
            module.weight.shape[0]
            for module in self.model.modules()
            if id(getattr(module, "weight", None)) in self.tables and module.weight is not tokens
        ]
        positions = self.sizes["positions"]
        return positions is not None and any(positions <= each <= positions + 8 for each in rows)

    def is_expert(self, path: str, owner: Any, parameter: Any) -> bool:
        """Return True if a token visits only part of a parameter's values."""
        names = path.split(".")
        experts = self.sizes["experts"]
        if not experts or any("shared" in name for name in names):
            return False
        if any(name.endswith("experts") for name in names):
            return True
        stacked = parameter.dim() == 3 and parameter.shape[0] == experts
        return stacked or "Experts" in type(owner).__name__

    def share(self, path: str, owner: Any, parameter: Any) -> float:
        """Return the share of a parameter that one token uses."""
        if not self.is_expert(path, owner, parameter):
            return 1.0
        return min(1.0, (self.sizes["experts_per_token"] or 1) / (self.sizes["experts"] or 1))

    def multiplies(self, path: str, parameter: Any) -> bool:
        """Return True if a parameter is a matrix, or a filter, that each token is multiplied by."""
        last = path.rpartition(".")[2]
        if last.endswith("bias") or last.endswith("bias_proj") or "A_log" in last:
            return False
        return parameter.dim() >= 2 and id(parameter) not in self.tables


def _attribute(config: Any, key: str) -> Any:
    """Return a value of a configuration; the largest of those that differ by layer."""
    try:
        return getattr(config, key, None)
    except Exception:  # transformers refuses what its layers give differently
        layers = getattr(config, "per_layer_config", None) or ()
        values = [getattr(layer, key, None) for layer in layers]
        return max((each for each in values if isinstance(each, int)), default=None)


def _weight(model: Any, getter: str) -> Any:
    """Return the weight of the model's table of tokens or of its head; None if it has none."""
    try:
        return getattr(getattr(model, getter)(), "weight", None)
    except NotImplementedError:
        return None


def _numel(parameters: Any) -> int:
    return sum(parameter.numel() for parameter in parameters)


def _owned(module: Any) -> Iterator[tuple[str, Any, Any]]:
    """Yield (path, owner, parameter) of every use of a parameter in a module."""
    for path, owner in module.named_modules(remove_duplicate=False):
        for name, parameter in owner.named_parameters(recurse=False):
            yield f"{path}.{name}".lstrip("."), owner, parameter


def _kind(held: _Model, number: int) -> tuple[Any, ...]:
    block, types = held.blocks[number], getattr(held.config, "layer_types", None)
    shapes = tuple((path, *parameter.shape) for path, _, parameter in _owned(block))
    named = types[number] if isinstance(types, list) and len(types) == len(held.blocks) else ""
    return type(block).__name__, str(named), shapes


def _kinds(held: _Model) -> list[dict[str, Any]]:
    found = Counter(_kind(held, number) for number in range(len(held.blocks)))
    kinds = []
    for (name, layer_type, shapes), layers in found.items():
        block = next(
            each
            for number, each in enumerate(held.blocks)
            if _kind(held, number) == (name, layer_type, shapes)
        )
        every = list(_owned(block))
        kinds.append(
            {
                "class": name,
                "type": layer_type,
                "layers": layers,
                "parameters": _numel(block.parameters()),
                "attends": _attends(block),
                "matmul": sum(
                    w.numel() * held.share(p, owner, w)
                    for p, owner, w in every
                    if held.multiplies(p, w)
                ),
                "shared": sum(
                    w.numel()
                    for p, _, w in every
                    if held.multiplies(p, w) and any(name in p for name in _SHARED)
                ),
                "unusual": sorted({p for p, owner, w in every if _unusual(held, p, owner, w)}),
                "runs": {},
            }
        )
    return kinds


def _run_layers(kinds: list[dict[str, Any]], builders: list[Callable[[], Any]]) -> None:
    """Add the first layer of each kind: saved values and operations, by the bytes of a value."""
    program = _layers_program()
    names = [path.rpartition(".")[2] for kind in kinds for path in kind["unusual"]]
    for kind in kinds:
        if any(name.startswith(_RECURRENT) for name in names):
            kind["why_not_run"] = "a recurrence runs by kernels of its own on a GPU"
    if any("why_not_run" in kind for kind in kinds):
        return
    for size, build in product((2, 4), builders):
        done = all(str(size) in kind["runs"] for kind in kinds)
        if done or (size == 4 and not all("2" in kind["runs"] for kind in kinds)):
            continue
        try:
            found = program.run_layers(build, _blocks_of, size)
        except Exception as error:  # fake tensors refuse what depends on values
            text = " ".join(f"{type(error).__name__}: {error}".split())[:120]
            if isinstance(error, NotImplementedError):
                text = str(error)
            for kind in kinds:
                kind.setdefault("why_not_run", text)
            continue
        if len(found) == len(kinds):
            for kind, ran in zip(kinds, found.values(), strict=True):
                kind["runs"][str(size)] = ran


def _layers_program() -> Any:
    """Return the module beside this one; there is not a package where this program runs."""
    path = Path(__file__).with_name("built_layers.py")
    spec = importlib.util.spec_from_file_location("built_layers", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def _blocks_of(model: Any) -> list[tuple[Any, Any]]:
    held = _Model(model)
    return [(block, _kind(held, number)) for number, block in enumerate(held.blocks)]


def _unusual(held: _Model, path: str, owner: Any, parameter: Any) -> bool:
    """Return True for a parameter that is neither a layer's weight or bias nor an expert's."""
    plain = path.rpartition(".")[2] in ("weight", "bias")
    return not plain and not held.is_expert(path, owner, parameter)


def _attends(block: Any) -> bool:
    names = {type(module).__name__ for module in block.modules()}
    return any("Attention" in n and "Linear" not in n and "Lightning" not in n for n in names)


def _counts(model: Any) -> dict[str, Any]:
    held = _Model(model)
    unique = {id(parameter): parameter for parameter in model.parameters()}
    in_blocks = {id(w): w for block in held.blocks for w in block.parameters()}
    uses = [each for block in held.blocks for each in _owned(block)]
    experts = {id(w): w for p, owner, w in uses if held.is_expert(p, owner, w)}
    projection = _weight(model, "get_output_embeddings")
    table_weight = _weight(model, "get_input_embeddings")
    head_parameters = 0 if projection is None else projection.numel()
    share = held.share
    idle = sum(w.numel() * (1 - share(p, owner, w)) for p, owner, w in uses if id(w) in experts)
    multiplied = sum(
        w.numel() * share(p, owner, w) for p, owner, w in uses if held.multiplies(p, w)
    )
    total = _numel(unique.values())
    tied = projection is not None and projection is table_weight
    tables = {id(w): w for w in (projection, table_weight) if w is not None}
    one_each = [[w] for w in tables.values()]
    # OPT-350m embeds into a narrower space and projects in and out of it.
    narrow = [w for w in held.between() if id(w) not in tables]
    head_parameters += _numel(narrow)
    counted = {*in_blocks, *tables, *map(id, narrow)}
    rest = [w for key, w in unique.items() if key not in counted]
    paths = [path for block in held.blocks[:1] for path, _, _ in _owned(block)]
    return {
        "class": type(model).__name__,
        "qk_norm": any(".q_norm." in path or ".q_layernorm." in path for path in paths),
        "is_nested": bool(getattr(type(model.config), "sub_configs", None)),
        "is_encoder_decoder": bool(getattr(model.config, "is_encoder_decoder", False)),
        "parameters": total,
        "active_parameters": round(total - idle),
        "matmul_parameters": round(multiplied) + head_parameters,
        "head_parameters": head_parameters,
        "block_parameters": _numel(in_blocks.values()),
        "expert_parameters": _numel(experts.values()),
        "other_parameters": _numel(rest),
        "encoder": _encoder(held, projection),
        "largest_layer": max(
            [0, *map(_numel, [*(b.parameters() for b in held.blocks), *one_each])]
        ),
        "tied": tied,
        "learned_positions": held.learned_positions(table_weight),
        "layers": len(held.blocks),
        "sizes": held.sizes,
        "kinds": _kinds(held),
    }


def _encoder(held: _Model, projection: Any) -> dict[str, int]:
    """Return the counts of what a nested model has beside its decoder and the head."""
    import torch

    if held.decoder is None or not getattr(type(held.model.config), "sub_configs", None):
        return {}
    inside = {*map(id, held.decoder.parameters()), id(projection)}
    uses = [(path, w) for path, _, w in _owned(held.model) if id(w) not in inside]
    lists = [m for m in held.model.modules() if isinstance(m, torch.nn.ModuleList)]
    parts = [[*block.parameters()] for each in lists for block in each]
    # Of the modules without a list of blocks, such as a projector, each is a part.
    parts += [
        [*module.parameters()]
        for parent in (held.model, getattr(held.model, "model", None))
        for module in (parent.children() if parent is not None else ())
        if not any(isinstance(each, torch.nn.ModuleList) for each in module.modules())
    ]
    apart = [part for part in parts if not any(id(w) in inside for w in part)]
    return {
        "parameters": _numel({id(w): w for _, w in uses}.values()),
        # The pooling head of an encoder makes one vector of an image, which no token uses.
        "matmul_parameters": sum(
            w.numel() for path, w in uses if held.multiplies(path, w) and ".head." not in path
        ),
        "largest_layer": max(map(_numel, apart), default=0),
    }


def count_of_diffusers(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameters of a model of diffusers, which its configuration names."""
    import torch

    try:
        import diffusers

        built = getattr(diffusers, str(config["_class_name"]))
        if not issubclass(built, diffusers.ModelMixin):
            return {"failure": FAILED, "why": f"{config['_class_name']} is no model"}
        with torch.device("meta"):
            model = built.from_config(dict(config))
    except Exception as error:  # it is not installed, lacks the class or refuses the sizes
        text = " ".join(f"{type(error).__name__}: {error}".split())
        return {"failure": FAILED, "why": text[:300]}
    return {"kinds": [], "parameters": _numel(model.parameters())}


def answer(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Return the counts of a configuration, or of the adapters that are asked for beside it."""
    if "_class_name" in asked:
        return count_of_diffusers(asked)
    return adapters(asked["config"], asked["adapters"]) if "adapters" in asked else count(asked)


def _limit(cpu_s: int) -> None:
    """End this process by SIGXCPU, without a core file, when it has used so much of a processor."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    soft = cpu_s if hard == resource.RLIM_INFINITY else min(cpu_s, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def main() -> None:
    """Answer each line; an argument is the limit of processor seconds."""
    if len(sys.argv) > 1:
        _limit(int(sys.argv[1]))
    os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", USE_HUB_KERNELS="0")
    output = sys.stdout
    sys.stdout = sys.stderr  # libraries print what they like
    for line in sys.stdin:
        print(json.dumps(answer(json.loads(line))), file=output, flush=True)


if __name__ == "__main__":
    main()
