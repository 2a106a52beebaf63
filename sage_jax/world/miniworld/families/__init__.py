"""The registry of scenario families: every module listed here exports `FAMILIES`."""

from __future__ import annotations

import importlib

from sage_jax.world.miniworld.family import Family

MODULES = ("spotify", "venmo", "phone", "notes", "todos", "mail", "files", "splitwise", "combos")


def all_families() -> tuple[Family, ...]:
    """All families in a fixed order. Raises ValueError if two share a name."""
    families = [f for m in MODULES for f in importlib.import_module(f"{__name__}.{m}").FAMILIES]
    names = [f.name for f in families]
    if len(set(names)) != len(names):
        raise ValueError(f"families share names: {sorted(n for n in set(names) if names.count(n) > 1)}")
    return tuple(families)


def families_of(role: str) -> tuple[Family, ...]:
    """The families of one role: "normal" or "challenge"."""
    return tuple(f for f in all_families() if f.role == role)
