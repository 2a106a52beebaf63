"""One optimizer update over any number of micro-batches: a jitted accumulate step and a jitted apply step.

The loop over micro-batches runs on the host, so the number of compiled programs is the number of row shapes plus two,
whatever the number of micro-batches. Everything is donated; nothing is divided before the last micro-batch is in.
Shared by RL and SFT.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from sage_jax.errors import ConfigError
from sage_jax.model.lora import join
from sage_jax.model.rules import RULES, on
from sage_jax.rl.batch import TrainBatch
from sage_jax.training.state import TrainState

DATA_AXES = RULES["batch"]  # mesh axes over which rows are spread


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Stats:
    """What a loss function reports of a micro-batch, by how it combines over micro-batches. All float32."""

    sums: dict[str, jax.Array]
    mins: dict[str, jax.Array]
    maxs: dict[str, jax.Array]

    def merge(self, other: Stats) -> Stats:
        return Stats(
            {k: v + other.sums[k] for k, v in self.sums.items()},
            {k: jnp.minimum(v, other.mins[k]) for k, v in self.mins.items()},
            {k: jnp.maximum(v, other.maxs[k]) for k, v in self.maxs.items()},
        )


# (params, batch) -> (weighted sum of the losses, float32 [], Stats)
LossFn = Callable[[Any, TrainBatch], tuple[jax.Array, Stats]]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Totals:
    """Running sums of one update."""

    grads: Any  # float32, like params
    loss: jax.Array  # float32 []
    denominator: jax.Array  # float32 []
    stats: Stats


def batch_sharding(mesh: Mesh) -> NamedSharding:
    """Rows over the data axes that the mesh has; a row is never split."""
    return NamedSharding(mesh, PartitionSpec(tuple(a for a in DATA_AXES if a in mesh.axis_names) or None))


def put_batch(batch: TrainBatch, sharding: NamedSharding) -> TrainBatch:
    """Places a host batch on the mesh.

    Raises:
      ConfigError: if the rows do not divide by the devices along the data axes.
    """
    axes = sharding.spec[0] or ()
    parts = 1
    for axis in axes:
        parts *= sharding.mesh.shape[axis]
    if batch.shape[0] % parts:
        raise ConfigError(f"{batch.shape[0]} rows of a micro-batch do not divide by {parts} devices of the axes {axes}")
    return jax.device_put(batch, sharding)


class UpdateStep:
    """`step(state, micro_batches) -> (state, loss and optimizer metrics, Stats)` for one loss function.

    Shardings of parameters and optimizer state are taken from the first state and kept. `frozen`: the part of the parameters that does
    not train (the base under adapters); the loss sees both joined, gradients exist for those of the state alone.
    """

    def __init__(self, loss_fn: LossFn, tx: optax.GradientTransformation, state: TrainState, mesh: Mesh, frozen: Any = None):
        self._loss_fn, self._frozen, self._mesh = loss_fn, frozen, mesh
        self._sharding = batch_sharding(mesh)
        replicated = NamedSharding(mesh, PartitionSpec())
        params_at, opt_at = (jax.tree.map(lambda x: x.sharding, t) for t in (state.params, state.opt_state))
        totals_at = Totals(params_at, replicated, replicated, replicated)

        def start(params: Any, frozen: Any, batch: TrainBatch) -> Totals:
            return self._totals(params, frozen, batch)

        def add(params: Any, frozen: Any, batch: TrainBatch, totals: Totals) -> Totals:
            new = self._totals(params, frozen, batch)
            return Totals(
                jax.tree.map(jnp.add, totals.grads, new.grads),
                totals.loss + new.loss,
                totals.denominator + new.denominator,
                totals.stats.merge(new.stats),
            )

        def zero(params: Any, frozen: Any, batch: TrainBatch) -> Totals:
            stats = jax.eval_shape(start, params, frozen, batch).stats

            def full(tree: Any, fill: float) -> Any:
                return jax.tree.map(lambda x: jnp.full(x.shape, fill, x.dtype), tree)

            return Totals(
                jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params),
                jnp.float32(0),
                jnp.float32(0),
                Stats(full(stats.sums, 0.0), full(stats.mins, jnp.inf), full(stats.maxs, -jnp.inf)),
            )

        def apply(params: Any, opt_state: Any, totals: Totals) -> tuple[Any, Any, dict[str, jax.Array]]:
            scale = 1 / jnp.where(totals.denominator > 0, totals.denominator, 1)
            loss, grads = totals.loss * scale, jax.tree.map(lambda g: g * scale, totals.grads)
            norm = optax.tree.norm(grads)
            ok = jnp.isfinite(loss) & jnp.isfinite(norm) & (totals.denominator > 0)
            updates, new_opt = tx.update(grads, opt_state, params)

            def choose(new: Any, old: Any) -> Any:
                return jax.tree.map(lambda a, b: jnp.where(ok, a, b), new, old)

            metrics = {
                "loss": loss,
                "grad_norm": norm,
                "update_norm": jnp.where(ok, optax.tree.norm(updates), 0.0),
                "applied": ok,
            }
            return choose(optax.apply_updates(params, updates), params), choose(new_opt, opt_state), metrics

        self._zero = jax.jit(zero, out_shardings=totals_at)
        self._add = jax.jit(add, donate_argnums=3, out_shardings=totals_at)
        self._apply = jax.jit(apply, donate_argnums=(0, 1), out_shardings=(params_at, opt_at, replicated))

    def _totals(self, params: Any, frozen: Any, batch: TrainBatch) -> Totals:
        def loss_fn(trainable: Any) -> tuple[jax.Array, Stats]:
            return self._loss_fn(trainable if frozen is None else join(trainable, frozen), batch)

        (loss, stats), grads = jax.value_and_grad(loss_fn, has_aux=True)(params)
        return Totals(jax.tree.map(lambda g: g.astype(jnp.float32), grads), loss, batch.denominator.sum(), stats)

    def __call__(
        self, state: TrainState, micro_batches: Iterable[TrainBatch]
    ) -> tuple[TrainState, dict[str, float], Stats]:
        """One update. The parameters and optimizer state of `state` are donated.

        Returns:
          the new state; {"loss", "grad_norm" (before the clip), "update_norm", "applied" (0 or 1)}; and the merged
          Stats as numpy. A non-finite loss or gradient, or denominator 0, leaves parameters and optimizer unchanged.
        """
        return on(self._mesh, self._update)(state, micro_batches)

    def _update(self, state: TrainState, micro_batches: Iterable[TrainBatch]) -> tuple[TrainState, dict[str, float], Stats]:
        totals = None
        for batch in micro_batches:
            batch = put_batch(batch, self._sharding)
            if totals is None:
                totals = self._zero(state.params, self._frozen, batch)
            totals = self._add(state.params, self._frozen, batch, totals)
        if totals is None:
            raise ValueError("an update needs at least one micro-batch (it may be empty)")
        stats = totals.stats
        params, opt_state, metrics = self._apply(state.params, state.opt_state, totals)
        metrics, stats = jax.device_get((metrics, totals.stats))
        metrics = {k: float(v) for k, v in metrics.items()}
        return state.after_update(params, opt_state, bool(metrics["applied"])), metrics, stats

    def compiled(self) -> int:
        """Programs compiled so far, over all three steps."""
        return sum(f._cache_size() for f in (self._zero, self._add, self._apply))
