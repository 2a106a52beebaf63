"""AdamW with warm-up, decay and global-norm clipping; its moments are float32 and sharded like the parameters."""

from __future__ import annotations

import re
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sage_jax.errors import ConfigError

SCHEDULES = ("constant", "cosine")
NO_DECAY = re.compile(r"norm|scale|bias", re.IGNORECASE)  # by name: stacked layers give norms two axes


def make_schedule(kind: str, peak: float, warmup: int, total: int, final_share: float = 0.1) -> optax.Schedule:
    """Learning rate as a function of the number of updates applied before.

    Linear from peak/(warmup + 1) at update 0 to the peak at update `warmup`; then constant, or a cosine that reaches
    `final_share` of the peak at update `total` and stays there.

    Raises:
      ConfigError: for an unknown kind, or a warm-up that is not shorter than `total`.
    """
    if kind not in SCHEDULES:
        raise ConfigError(f"unknown schedule {kind!r}; choices: {', '.join(SCHEDULES)}")
    if warmup < 0 or total < 1 or (kind == "cosine" and warmup >= total):
        raise ConfigError(f"a {kind} schedule needs 0 <= warmup < total updates, got warmup={warmup}, total={total}")
    if kind == "constant":
        after = optax.constant_schedule(peak)
    else:
        after = optax.cosine_decay_schedule(peak, total - warmup, alpha=final_share)
    return optax.join_schedules([optax.linear_schedule(peak / (warmup + 1), peak, max(warmup, 1)), after], [warmup])


def decay_mask(params: Any) -> Any:
    """True where weight decay applies: everything but norms, scales and biases."""
    return jax.tree_util.tree_map_with_path(lambda path, _: not NO_DECAY.search(jax.tree_util.keystr(path)), params)


def make_optimizer(
    schedule: optax.Schedule,
    *,
    b1: float = 0.9,
    b2: float = 0.99,
    eps: float = 1e-8,
    weight_decay: float = 0.0,
    clip_norm: float = 1.0,
) -> optax.GradientTransformation:
    """Global-norm clip (0: off), then AdamW (Loshchilov and Hutter 2019) with float32 first moments.

    Raises:
      ConfigError: for values outside their ranges.
    """
    if not (0 <= b1 < 1 and 0 <= b2 < 1 and eps > 0 and weight_decay >= 0 and clip_norm >= 0):
        raise ConfigError(
            f"optimizer out of range: b1={b1}, b2={b2} in [0, 1), eps={eps} > 0, weight_decay={weight_decay} >= 0, "
            f"clip_norm={clip_norm} >= 0"
        )
    adamw = optax.adamw(
        schedule, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay, mask=decay_mask, mu_dtype=jnp.float32
    )
    return optax.chain(optax.clip_by_global_norm(clip_norm) if clip_norm else optax.identity(), adamw)


def opt_shardings(tx: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """Shardings of the optimizer state: moments like their parameter, counts replicated."""
    replicated = NamedSharding(mesh, PartitionSpec())
    shardings = jax.tree.map(lambda x: x.sharding, params)
    abstract = jax.eval_shape(tx.init, params)
    return optax.tree_utils.tree_map_params(
        tx, lambda _, sharding: sharding, abstract, shardings, transform_non_params=lambda _: replicated
    )


def init_opt_state(tx: optax.GradientTransformation, params: Any, mesh: Mesh) -> Any:
    """The optimizer's first state, created sharded: zeros have no data dependence on the parameters, so without
    explicit shardings XLA would put every moment whole on the first device.

    Raises:
      ConfigError: if a parameter is not float32. Smaller types lose small updates for good.
    """
    wrong = sorted({str(x.dtype) for x in jax.tree.leaves(params) if x.dtype != jnp.float32})
    if wrong:
        raise ConfigError(f"master weights must be float32, got {', '.join(wrong)}; set the compute dtype instead")
    return jax.jit(tx.init, out_shardings=opt_shardings(tx, params, mesh))(params)
