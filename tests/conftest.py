"""Fixtures that several rooms share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from sage_jax.world.roots import DataRoot, open_root


@pytest.fixture(scope="session")
def mini_cache(tmp_path_factory) -> Path:
    """Cache folder of the tests' mini world: SAGE_TEST_CACHE (kept between runs), else a temporary one of all test processes."""
    if kept := os.environ.get("SAGE_TEST_CACHE"):
        return Path(kept)
    base = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        base = base.parent  # whoever comes second waits for the first one's build
    return base / "cache"


@pytest.fixture(scope="session")
def mini_root(mini_cache) -> DataRoot:
    """A mini world of 12 scenarios, built once a session; its build-time checks are a test of their own."""
    from sage_jax.world.miniworld.build import build
    from sage_jax.world.roots import SMOKE_SCENARIOS

    return open_root(build(SMOKE_SCENARIOS, seed=0, cache=mini_cache, check=False, quiet=True))
