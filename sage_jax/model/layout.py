"""How our parameters lie in a Hugging Face or PEFT folder: names, shapes and the order of axes.

Ours are [layers, (experts,) in..., out...] with heads apart; stored are one tensor a layer (and expert), [out, in] with heads
merged. So a stored tensor, with its heads taken apart, is a permutation of the axes of one entry of ours.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from sage_jax.model.config import ModelConfig

PREFIX = "model."
HEAD = "lm_head.weight"
_TOP = {"embed": "embed_tokens.weight", "final_norm": "norm.weight"}
_LAYER = {
    "attn_norm": "input_layernorm.weight",
    "q": "self_attn.q_proj.weight",
    "k": "self_attn.k_proj.weight",
    "v": "self_attn.v_proj.weight",
    "o": "self_attn.o_proj.weight",
    "q_norm": "self_attn.q_norm.weight",
    "k_norm": "self_attn.k_norm.weight",
    "q_bias": "self_attn.q_proj.bias",
    "k_bias": "self_attn.k_proj.bias",
    "v_bias": "self_attn.v_proj.bias",
    "mlp_norm": "post_attention_layernorm.weight",
    "gate": "mlp.gate_proj.weight",
    "up": "mlp.up_proj.weight",
    "down": "mlp.down_proj.weight",
    "router": "mlp.gate.weight",
    "expert_gate": "mlp.experts.{e}.gate_proj.weight",
    "expert_up": "mlp.experts.{e}.up_proj.weight",
    "expert_down": "mlp.experts.{e}.down_proj.weight",
}
# Leading axes of ours, after layers and experts, that are inputs; what is not named here is stored in our order.
_INPUTS = {"q": 1, "k": 1, "v": 1, "o": 2, "gate": 1, "up": 1, "down": 1, "router": 1, "expert_gate": 1, "expert_up": 1, "expert_down": 1, "head": 1}


@dataclasses.dataclass(frozen=True)
class Layout:
    """One of our parameters in files: `names` has its leading axes (layers, experts), of which each entry is one tensor."""

    names: np.ndarray  # of str, shape = leading axes
    shape: tuple[int, ...]  # of each stored tensor
    order: tuple[int, ...]  # our axes after the leading ones in stored order

    @property
    def lead(self) -> int:
        return self.names.ndim

    @property
    def ours(self) -> tuple[int, ...]:
        """The stored axes in our order."""
        return tuple(int(n) for n in np.argsort(self.order))


def layout(cfg: ModelConfig, path: tuple, shape: tuple[int, ...], prefix: str = PREFIX) -> Layout:
    """Of the weight at `path` of a policy's State, whose shape it is."""
    name = path[-1]
    if path[0] != "layers":
        top = HEAD if name == "head" else prefix + _TOP[name]
        return _layout(np.array(top, object), shape, _INPUTS.get(name, 0))
    pattern = f"{prefix}layers.{{l}}.{_LAYER[name]}"
    if name.startswith("expert_"):
        names = np.array([[pattern.format(l=n, e=e) for e in range(cfg.num_experts)] for n in range(cfg.num_layers)], object)
    else:
        names = np.array([pattern.format(l=n) for n in range(cfg.num_layers)], object)
    return _layout(names, shape[names.ndim :], _INPUTS.get(name, 0))


def adapter_layout(cfg: ModelConfig, path: tuple, shape: tuple[int, ...]) -> Layout:
    """Of the adapter at `path`, as the peft package stores it: lora_A [rank, in], lora_B [out, rank]."""
    target, _, side = path[-1].rpartition("_lora_")
    module = _LAYER[target].removesuffix(".weight")
    names = [f"base_model.model.model.layers.{n}.{module}.lora_{side.upper()}.weight" for n in range(cfg.num_layers)]
    return _layout(np.array(names, object), shape[1:], _INPUTS[target] if side == "a" else 1)


def module_name(target: str) -> str:
    """q -> q_proj"""
    return _LAYER[target].split(".")[-2]


def file_order(layouts: dict[tuple, Layout]) -> list[tuple[str, tuple[int, ...]]]:
    """(name, shape) of all tensors, layer by layer, so that a file holds neighbouring layers."""
    keyed = []
    for n, (path, layout) in enumerate(layouts.items()):
        for at, name in np.ndenumerate(layout.names):
            where = (1, *at[:1]) if at else (0,) if path[-1] == "embed" else (2,)
            keyed.append((where, n, at, name, layout.shape))
    return [(name, shape) for *_, name, shape in sorted(keyed)]


def _layout(names: np.ndarray, shape: tuple[int, ...], inputs: int) -> Layout:
    outputs = tuple(range(inputs, len(shape)))
    order = (*outputs, *range(inputs))
    if inputs:
        stored = (math.prod(shape[inputs:]), math.prod(shape[:inputs]))
    elif len(shape) == 2 and names.ndim:
        stored = (math.prod(shape),)  # biases of heads
    else:
        stored = tuple(shape)
    return Layout(names, stored, order)
