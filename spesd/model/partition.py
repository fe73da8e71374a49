"""From parameter names to parts, and to the names of the Hugging Face format.

The only file that reads parameter names. Decides which part a parameter belongs to and what it is
called on export; never what a part's bytes look like (`checkpoint.bundle` does).

A part is the shared parameters, or one expert: the networks with one index in *every* layer.
"""

import re
from collections.abc import Iterator, Mapping
from typing import Literal

import torch
from torch import Tensor, nn

from spesd.config import ModelConfig
from spesd.ids import SHARED, all_parts, expert_part
from spesd.model.hf import Family, family_of
from spesd.model.transformer import MoETransformer

_EXPERT = re.compile(r"layers\.(\d+)\.experts\.(\d+)\.(w1|w2)\Z")
_LAYER = re.compile(r"layers\.(\d+)\.(.+)\Z")

_HF_TOP = {
    "embed.weight": "model.embed_tokens.weight",
    "norm.weight": "model.norm.weight",
    "head.weight": "lm_head.weight",
}
_HF_LAYER = {
    "attention_norm.weight": "input_layernorm.weight",
    "attention.q.weight": "self_attn.q_proj.weight",
    "attention.k.weight": "self_attn.k_proj.weight",
    "attention.v.weight": "self_attn.v_proj.weight",
    "attention.o.weight": "self_attn.o_proj.weight",
    "attention.q_norm.weight": "self_attn.q_norm.weight",
    "attention.k_norm.weight": "self_attn.k_norm.weight",
    "moe_norm.weight": "post_attention_layernorm.weight",
    "router.weight": "mlp.gate.weight",
}
_MOE = {"mixtral": "block_sparse_moe"}  # what the others call mlp
_PROJECTIONS = ("gate_proj", "up_proj", "down_proj")


def part_of(name: str) -> str:
    """Name the part (see `spesd.ids`) that a parameter belongs to."""
    match = _EXPERT.match(name)
    return expert_part(int(match[2])) if match else SHARED


def parts(model: MoETransformer) -> dict[str, list[tuple[str, nn.Parameter]]]:
    """Return every part's (name, parameter) pairs, sorted by name; shared first.

    Look it up again after `set_owned`: parameters may have been replaced.
    """
    found: dict[str, list[tuple[str, nn.Parameter]]] = {
        part: [] for part in all_parts(model.config.n_experts)
    }
    for name, parameter in sorted(model.named_parameters()):
        found[part_of(name)].append((name, parameter))
    return found


def part_shapes(config: ModelConfig) -> dict[str, dict[str, tuple[int, ...]]]:
    """Return the shape of every parameter of every part, without allocating any.

    What a bundle from another peer must have: these names, all of them, in these shapes.
    """
    with torch.device("meta"):
        model = MoETransformer(config)
    return {
        part: {name: tuple(parameter.shape) for name, parameter in members}
        for part, members in parts(model).items()
    }


@torch.no_grad()
def load_part(model: MoETransformer, part: str, tensors: Mapping[str, Tensor]) -> None:
    """Set a part's parameters, rounded to the form and moved to the device they have there.

    Raises ValueError, before anything is written, unless names and shapes are exactly the part's.
    """
    members = dict(parts(model)[part])
    if members.keys() != tensors.keys():
        odd = sorted(members.keys() ^ tensors.keys())
        raise ValueError(f"the tensors of {part} are not its parameters: {odd[0]!r} is odd")
    for name, parameter in members.items():
        if parameter.shape != tensors[name].shape:
            raise ValueError(
                f"{name} has the shape {list(tensors[name].shape)}, not {list(parameter.shape)}"
            )
    for name in members:
        model.put(name, tensors[name])


def part_values(model: MoETransformer, part: str) -> dict[str, Tensor]:
    """Return a part's values by name, detached; they share memory unless held as int8."""
    return {name: model.dense(name) for name, _ in parts(model)[part]}


def expert_layers(model: MoETransformer) -> Iterator[list[tuple[Tensor, Tensor]]]:
    """Yield, layer by layer, (w1, w2) of every expert, detached.

    They share memory with the model, but for experts held as int8: those are widened, one layer at
    a time, to be read only.
    """
    for block in model.blocks():
        yield [(e.dense("w1").detach(), e.dense("w2").detach()) for e in block.each_expert()]


def hf_name(name: str, family: Family | Literal["dense"] = "olmoe") -> tuple[str, ...]:
    """Return the on-disk Hugging Face name(s) of one of our parameters.

    Two for an expert's `w1`: gate_proj, then up_proj, which are its upper and lower half. A `dense`
    model has one network for all experts of a layer and, for a router, nothing. Raises ValueError
    for a name that is not a parameter of ours.
    """
    if name in _HF_TOP:
        return (_HF_TOP[name],)
    expert = _EXPERT.match(name)
    if expert:
        mlp = f"model.layers.{expert[1]}.{_MOE.get(family, 'mlp')}"
        stem = mlp if family == "dense" else f"{mlp}.experts.{expert[2]}"
        names = ("w1", "w3", "w2") if family == "mixtral" else _PROJECTIONS
        chosen = names[:2] if expert[3] == "w1" else names[2:]
        return tuple(f"{stem}.{one}.weight" for one in chosen)
    layer = _LAYER.match(name)
    if layer is None or layer[2] not in _HF_LAYER:
        raise ValueError(f"{name!r} is not a parameter of this model")
    if layer[2] == "router.weight" and family == "dense":
        return ()
    own = _HF_LAYER[layer[2]].replace("mlp.", f"{_MOE.get(family, 'mlp')}.")
    return (f"model.layers.{layer[1]}.{own}",)


def part_to_hf(tensors: Mapping[str, Tensor], family: Family) -> Iterator[tuple[str, Tensor]]:
    """Yield (on-disk name, tensor) of some of our parameters; no two share memory."""
    for name, tensor in tensors.items():
        targets = hf_name(name, family)
        for target, piece in zip(targets, tensor.detach().chunk(len(targets)), strict=True):
            yield target, piece.clone(memory_format=torch.contiguous_format)


def to_hf(state: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename a whole model's tensors to the Hugging Face on-disk format.

    The result shares no memory between its tensors, as safetensors wants. Raises ValueError
    unless `state` has exactly the parameters of `config`.
    """
    expected = {name for members in part_shapes(config).values() for name in members}
    if expected != state.keys():
        odd = sorted(expected ^ state.keys())
        raise ValueError(f"the state is not a whole model: {odd[0]!r} is odd")
    return dict(part_to_hf(state, family_of(config)))


def from_hf(tensors: Mapping[str, Tensor], config: ModelConfig) -> dict[str, Tensor]:
    """Rename tensors of the Hugging Face on-disk format to ours; the inverse of `to_hf`.

    Tensors that this model does not have are left out. Raises ValueError for one that is missing
    or has another shape.
    """
    state: dict[str, Tensor] = {}
    for members in part_shapes(config).values():
        for name, shape in members.items():
            sources = hf_name(name, family_of(config))
            missing = [source for source in sources if source not in tensors]
            if missing:
                raise ValueError(f"the tensor {missing[0]!r} is missing")
            state[name] = torch.cat([tensors[source] for source in sources])
            if tuple(state[name].shape) != shape:
                raise ValueError(
                    f"{sources[0]!r} gives the shape {list(state[name].shape)}, not {list(shape)}"
                )
    return state
