"""Every kind of mesh computes, updates and samples what one device does, and nothing is replicated that the rules shard."""

import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

from sage_jax.errors import ConfigError
from sage_jax.model.rules import MESH_AXES, RULES, constrain, mesh_axes, on, spec
from sage_jax.model.sharding import make_mesh
from tests.training import mesh_program


@pytest.mark.slow
def test_eight_devices_equal_one_and_nothing_is_replicated():
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=8", "JAX_PLATFORMS": "cpu", "PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run([sys.executable, mesh_program.__file__], env=env, capture_output=True, text=True, timeout=900)
    assert done.returncode == 0, done.stdout + done.stderr[-3000:]
    assert done.stdout.strip().endswith(f"cases {len(mesh_program.CASES)}")


def test_rules_name_axes_of_the_mesh():
    assert {a for axis in RULES for a in mesh_axes(axis)} == set(MESH_AXES)
    with pytest.raises(ConfigError, match="unknown logical axis 'width': valid are vocab, embed"):
        mesh_axes("width")
    with pytest.raises(ConfigError, match="unknown mesh axes \\['model'\\]: valid are data, fsdp, tensor, expert, sequence"):
        make_mesh({"model": 2})


def test_specs_of_experts_and_of_two_mesh_axes():
    class Eight:
        shape = {"data": 2, "fsdp": 2, "tensor": 2, "expert": 2, "sequence": 1}  # noqa: RUF012

    assert spec(("layers", "expert", "embed", "expert_mlp"), (3, 4, 8, 6), Eight) == P(None, "expert", "fsdp", "tensor")
    assert spec(("batch", None), (8, 3), Eight) == P(("data", "fsdp"), None)
    with pytest.raises(ConfigError, match=r"axis 'expert' of size 5 does not divide over mesh axes \('expert',\) of size 2"):
        spec(("expert",), (5,), Eight)


def test_one_device_is_left_alone():
    mesh = make_mesh({}, jax.devices()[:1])
    assert on(mesh, len) is len
    x = jnp.arange(6.0).reshape(2, 3)
    assert constrain(x, "batch", "sequence") is x
    np.testing.assert_array_equal(jax.jit(lambda x: constrain(x, "batch") + 1)(x), x + 1)
