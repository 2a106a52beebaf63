"""The policy: a Qwen-family decoder in flax nnx, its initialisation, and chunked token log-probs.

Each parameter's shape, logical axes and initialiser are stated once, in `Policy.__init__`; `sharding.py` maps the logical
axes to a mesh. Parameters of all layers are stacked and the layers are scanned: program size does not grow with depth.

Axes: B batch, T time, D hidden, L layers, N query heads, K key/value heads, H head size, M mlp, E experts, R adapter rank,
V vocabulary.
"""

from __future__ import annotations

import math
import zlib

import jax
import jax.numpy as jnp
from flax import nnx

from sage_jax.model.attention import attend, visible
from sage_jax.model.cache import Cache, attend_cached, cache_view, make_cache, write
from sage_jax.model.config import ModelConfig
from sage_jax.model.lora import LoraParam, scale
from sage_jax.model.moe import Load, balance_loss, mixture
from sage_jax.model.rope import phases, rotate
from sage_jax.model.rules import constrain

__all__ = ["Cache", "Policy", "make_cache", "mask_padded", "token_logprobs"]

UNROLL_CACHED = 8  # up to this depth the cached forward is unrolled: short decode steps pay for every loop trip

# Name -> what `jax.checkpoint` keeps of a layer for the backward pass; the rest is computed again. "none" keeps everything.
REMAT_POLICIES = {
    "full": jax.checkpoint_policies.nothing_saveable,
    "dots": jax.checkpoint_policies.dots_saveable,  # results of all matrix products
    "dots_no_batch": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,  # of those with weights only
}


class Policy(nnx.Module):
    """A decoder. Metadata `logical_axes` of each parameter names its axes.

    Initialisation: normal with std 1/sqrt(fan-in); the two projections that write into the residual stream are scaled by
    1/sqrt(2 L) more; norms one, biases zero; adapters A like the weight's input, B zero. Each parameter's key depends on the
    seed and its name only.
    """

    def __init__(self, cfg: ModelConfig, rngs: nnx.Rngs):
        self.cfg = cfg
        root = rngs.params()
        d, n, k, h, m, v, depth = (
            cfg.hidden_size, cfg.num_heads, cfg.num_kv_heads, cfg.head_dim, cfg.mlp_size, cfg.vocab_size, cfg.num_layers,
        )  # fmt: skip
        out_scale = (2 * depth) ** -0.5

        def param(
            name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], std: float | None, fill: float = 0.0, kind: type = nnx.Param
        ) -> nnx.Param:
            if std is None:
                value = jnp.full(shape, fill, jnp.float32)
            else:
                key = jax.random.fold_in(root, zlib.crc32(name.encode()))
                value = std * jax.random.normal(key, shape, jnp.float32)
            return kind(value.astype("float32" if kind is LoraParam else cfg.param_dtype), logical_axes=axes)

        def stacked(name: str, shape: tuple[int, ...], axes: tuple[str | None, ...], std: float | None, fill: float = 0.0, **kind) -> nnx.Param:
            return param(name, (depth, *shape), ("layers", *axes), std, fill, **kind)

        self.embed = param("embed", (v, d), ("vocab", "embed"), cfg.embed_init_std)
        layers = {
            "attn_norm": stacked("attn_norm", (d,), (None,), None, 1.0),
            "q": stacked("q", (d, n, h), ("embed", "heads", "head_dim"), d**-0.5),
            "k": stacked("k", (d, k, h), ("embed", "kv_heads", "head_dim"), d**-0.5),
            "v": stacked("v", (d, k, h), ("embed", "kv_heads", "head_dim"), d**-0.5),
            "o": stacked("o", (n, h, d), ("heads", "head_dim", "embed"), (n * h) ** -0.5 * out_scale),
            "mlp_norm": stacked("mlp_norm", (d,), (None,), None, 1.0),
        }
        if cfg.num_experts:
            e, w = cfg.num_experts, cfg.expert_size
            layers["router"] = stacked("router", (d, e), ("embed", None), d**-0.5)
            layers["expert_gate"] = stacked("expert_gate", (e, d, w), ("expert", "embed", "expert_mlp"), d**-0.5)
            layers["expert_up"] = stacked("expert_up", (e, d, w), ("expert", "embed", "expert_mlp"), d**-0.5)
            layers["expert_down"] = stacked("expert_down", (e, w, d), ("expert", "expert_mlp", "embed"), w**-0.5 * out_scale)
        else:
            layers["gate"] = stacked("gate", (d, m), ("embed", "mlp"), d**-0.5)
            layers["up"] = stacked("up", (d, m), ("embed", "mlp"), d**-0.5)
            layers["down"] = stacked("down", (m, d), ("mlp", "embed"), m**-0.5 * out_scale)
        if cfg.qk_norm:
            layers["q_norm"] = stacked("q_norm", (h,), (None,), None, 1.0)
            layers["k_norm"] = stacked("k_norm", (h,), (None,), None, 1.0)
        if cfg.attention_bias:
            layers["q_bias"] = stacked("q_bias", (n, h), ("heads", "head_dim"), None)
            layers["k_bias"] = stacked("k_bias", (k, h), ("kv_heads", "head_dim"), None)
            layers["v_bias"] = stacked("v_bias", (k, h), ("kv_heads", "head_dim"), None)
        for name in cfg.lora_targets if cfg.lora_rank else ():
            (_, *shape), (_, *axes) = layers[name].get_value().shape, layers[name].get_metadata()["logical_axes"]
            inputs = 2 if name == "o" else 1
            fan_in = math.prod(shape[:inputs])
            r = cfg.lora_rank
            layers[f"{name}_lora_a"] = stacked(f"{name}_lora_a", (*shape[:inputs], r), (*axes[:inputs], None), fan_in**-0.5, kind=LoraParam)
            layers[f"{name}_lora_b"] = stacked(f"{name}_lora_b", (r, *shape[inputs:]), (None, *axes[inputs:]), None, kind=LoraParam)
        self.layers = nnx.Dict(layers)
        self.final_norm = param("final_norm", (d,), (None,), None, 1.0)
        if not cfg.tie_embeddings:
            self.head = param("head", (d, v), ("embed", "vocab"), d**-0.5)

    def __call__(
        self,
        ids: jax.Array,
        positions: jax.Array,
        *,
        segment_ids: jax.Array | None = None,
        cache: Cache | None = None,
        cache_lengths: jax.Array | None = None,
    ) -> tuple[jax.Array, Cache | None]:
        """Hidden states after the final norm, in the compute dtype [B, T, D], and the cache with this call's keys.

        ids, positions: int32 [B, T]. Without a cache a query sees keys of its own segment (`segment_ids` int32 [B, T],
        0 = padding) at the same or an earlier position. With a cache (slot index == position) the new keys are written
        at `positions`, and a query sees all slots up to its own position; positions < 0 or >= S are padding, which
        writes nothing and whose output is finite and meaningless. Within a row the valid positions of one call must
        differ. `cache_lengths` int32 [B]: slots at or beyond it that this call does not write are not seen (default:
        all slots up to the query's position are).
        """
        if cache is not None and segment_ids is not None:
            raise ValueError("segment_ids and cache exclude each other: cached rows hold one sequence each")
        if cache is None:
            return self._whole(ids, positions, segment_ids)[0], None
        cfg = self.cfg
        cos, sin = phases(positions, cfg)
        x, stack = self._start(ids)
        view = cache_view(positions, cache.length, cache_lengths)

        def cached_layer(x, inputs):
            index, w = inputs
            w = jax.tree.map(lambda a: a.astype(cfg.dtype), w)
            q, k, v = self._qkv(x, w, cos, sin)
            x = x + self._linear(attend_cached(q, k, v, cache, index, view), w, "o", "btnh,nhd->btd")
            return x + self._mlp(x, w, None)[0], (k, v)

        depth = cfg.num_layers
        unroll = depth if depth <= UNROLL_CACHED else 1
        x, (keys, values) = jax.lax.scan(cached_layer, x, (jnp.arange(depth), stack), unroll=unroll)
        # The last layer's read of the old cache does not feed the write; without an order between the two XLA copies the
        # whole cache. `0 * x` is that order: it is not folded, being NaN where x is.
        after = (0 * x[:, :, :1, None]).astype(cfg.dtype)
        keys, values = keys + after, values + after
        return _rms(x, self.final_norm[...], cfg.rms_eps), write(cache, keys, values, view)

    def logits(self, hidden: jax.Array) -> jax.Array:
        """hidden [..., D] -> float32 [..., V]; V counts padded ids too, see `mask_padded`."""
        if self.cfg.tie_embeddings:
            return jnp.einsum("...d,vd->...v", hidden, self.embed[...].astype(hidden.dtype), preferred_element_type=jnp.float32)
        return jnp.einsum("...d,dv->...v", hidden, self.head[...].astype(hidden.dtype), preferred_element_type=jnp.float32)

    def with_aux(self, ids: jax.Array, positions: jax.Array, segment_ids: jax.Array | None = None) -> tuple[jax.Array, jax.Array]:
        """(hidden states as above without a cache, load-balancing loss of the routers float32 []); 0 for a dense policy."""
        hidden, load = self._whole(ids, positions, segment_ids)
        return hidden, jnp.float32(0) if load is None else balance_loss(load)

    def _start(self, ids: jax.Array) -> tuple[jax.Array, dict[str, jax.Array]]:
        """(embeddings in the compute dtype, stacked parameters of the layers)."""
        return jnp.take(self.embed[...], ids, axis=0).astype(self.cfg.dtype), {name: p[...] for name, p in self.layers.items()}

    def _whole(self, ids: jax.Array, positions: jax.Array, segment_ids: jax.Array | None) -> tuple[jax.Array, Load | None]:
        cfg = self.cfg
        cos, sin = phases(positions, cfg)
        x, stack = self._start(ids)
        x = constrain(x, "batch", "sequence", None)
        see = visible(cfg, positions, segment_ids)
        counts = None if segment_ids is None else segment_ids > 0

        def layer(x, w):
            w = jax.tree.map(lambda a: a.astype(cfg.dtype), w)
            q, k, v = self._qkv(x, w, cos, sin)
            # A row's attention needs all of its keys: along the sequence axis of the mesh everything else is split, not this.
            q, k, v = constrain(q, "batch", None, "heads"), constrain(k, "batch", None, "kv_heads"), constrain(v, "batch", None, "kv_heads")
            x = constrain(x + self._linear(attend(q, k, v, see), w, "o", "btnh,nhd->btd"), "batch", "sequence", None)
            y, load = self._mlp(x, w, counts)
            return constrain(x + y, "batch", "sequence", None), load

        if cfg.remat != "none":
            layer = jax.checkpoint(layer, policy=REMAT_POLICIES[cfg.remat])
        x, loads = jax.lax.scan(layer, x, stack)
        return _rms(x, self.final_norm[...], cfg.rms_eps), jax.tree.map(lambda a: a.sum(0), loads)

    def _linear(self, x: jax.Array, w: dict, name: str, form: str) -> jax.Array:
        """x times the weight `name`, and its adapter if it has one."""
        y = jnp.einsum(form, x, w[name])
        if f"{name}_lora_a" not in w:
            return y
        inputs, out = form.split("->")
        left, right = inputs.split(",")
        shared = "".join(c for c in right if c in left)
        low = jnp.einsum(f"{left},{shared}r->btr", x, w[f"{name}_lora_a"])
        return y + scale(self.cfg) * jnp.einsum(f"btr,r{right.translate({ord(c): None for c in shared})}->{out}", low, w[f"{name}_lora_b"])

    def _qkv(self, x: jax.Array, w: dict, cos: jax.Array, sin: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        x = _rms(x, w["attn_norm"], self.cfg.rms_eps)
        q, k, v = (self._linear(x, w, name, "btd,dnh->btnh") for name in ("q", "k", "v"))
        if self.cfg.attention_bias:
            q, k, v = q + w["q_bias"], k + w["k_bias"], v + w["v_bias"]
        if self.cfg.qk_norm:
            q, k = _rms(q, w["q_norm"], self.cfg.rms_eps), _rms(k, w["k_norm"], self.cfg.rms_eps)
        return rotate(q, cos, sin), rotate(k, cos, sin), v

    def _mlp(self, x: jax.Array, w: dict, counts: jax.Array | None) -> tuple[jax.Array, Load | None]:
        x = _rms(x, w["mlp_norm"], self.cfg.rms_eps)
        if self.cfg.num_experts:
            return mixture(x, w, self.cfg, counts)
        gate, up = (self._linear(x, w, name, "btd,dm->btm") for name in ("gate", "up"))
        return self._linear(jax.nn.silu(gate) * up, w, "down", "btm,md->btd"), None


def mask_padded(logits: jax.Array, vocab_size_real: int) -> jax.Array:
    """Logits [..., V] in which the ids that the tokenizer does not have can neither be sampled nor take probability."""
    if vocab_size_real > logits.shape[-1]:
        raise ValueError(f"the tokenizer has {vocab_size_real} ids and the embedding {logits.shape[-1]} rows")
    return jnp.where(jnp.arange(logits.shape[-1]) < vocab_size_real, logits, -jnp.inf)


def token_logprobs(
    policy: Policy,
    ids: jax.Array,
    positions: jax.Array,
    segment_ids: jax.Array | None,
    temperature: float | jax.Array,
    vocab_size_real: int,
    chunk: int = 128,
) -> tuple[jax.Array, jax.Array]:
    """Log-prob of each next token and the entropy in nats of its distribution, float32 [B, T-1].

    ids, positions, segment_ids int32 [B, T]. Both are taken at `temperature` over the real vocabulary. Where the next token
    belongs to another segment or to padding both are 0 and carry no gradient. Logits are computed for `chunk` time steps
    at once and again in the backward pass: the logits of the whole batch never exist.
    """
    hidden, _ = policy(ids, positions, segment_ids=segment_ids)
    batch, steps = ids.shape[0], ids.shape[1] - 1
    chunk = min(chunk, steps)
    pad = -steps % chunk

    def cut(a: jax.Array) -> jax.Array:  # [B, chunks * chunk, ...] -> [chunks, B, chunk, ...]
        return jnp.moveaxis(a.reshape(batch, -1, chunk, *a.shape[2:]), 1, 0)

    h = cut(jnp.pad(hidden[:, :-1], ((0, 0), (0, pad), (0, 0))))
    target = cut(jnp.pad(ids[:, 1:], ((0, 0), (0, pad))))

    @jax.checkpoint
    def head(_, inputs):
        h, target = inputs
        logits = policy.logits(h) / temperature
        real = jnp.arange(logits.shape[-1]) < vocab_size_real
        logits = jnp.where(real, logits, -1e30)  # finite: 0 * log 0 must be 0 in the entropy
        logp = jax.nn.log_softmax(logits, axis=-1)
        entropy = -jnp.sum(jnp.where(real, jnp.exp(logp) * logp, 0.0), axis=-1)
        return None, (jnp.take_along_axis(logp, target[..., None], axis=-1)[..., 0], entropy)

    _, (logp, entropy) = jax.lax.scan(head, None, (h, target))
    logp, entropy = (jnp.moveaxis(a, 0, 1).reshape(batch, -1)[:, :steps] for a in (logp, entropy))
    if segment_ids is not None:
        inside = (segment_ids[:, 1:] == segment_ids[:, :-1]) & (segment_ids[:, 1:] > 0)
        logp, entropy = jnp.where(inside, logp, 0.0), jnp.where(inside, entropy, 0.0)
    return logp, entropy


def _rms(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    """Root-mean-square norm over the last axis, computed in float32."""
    y = x.astype(jnp.float32)
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * scale.astype(jnp.float32)).astype(x.dtype)
