"""The arrows between rooms: what may import what."""

import ast
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1] / "sage_jax"
ALLOWED = {
    "world": {"errors", "world", "skills"},
    "skills": {"errors", "skills"},
    "model": {"errors", "model"},
    "sampling": {"errors", "model", "sampling"},
    "rl": {"errors", "model", "rl", "skills", "training"},
    "sft": {"errors", "model", "sft", "rl", "training", "report"},
    "agent": {"errors", "agent", "model", "sampling", "skills", "world"},
}
NO_JAX = ("world", "skills")
RECORDS = {"sage_jax.world.types", "sage_jax.skills.record", "sage_jax.agent.trajectory", "sage_jax.agent.policy"}  # plain data


def imports(path):
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            yield node.module
        elif isinstance(node, ast.Import):
            yield from (a.name for a in node.names)


def test_arrows_point_one_way():
    wrong = []
    for room, allowed in ALLOWED.items():
        for path in (PACKAGE / room).rglob("*.py"):
            if path.name == "__main__.py":
                continue
            for module in imports(path):
                parts = module.split(".")
                if parts[0] == "sage_jax" and len(parts) > 1 and parts[1] not in allowed and module not in RECORDS:
                    wrong.append(f"{path.relative_to(PACKAGE)} imports {module}")
                if room in NO_JAX and parts[0] in ("jax", "flax", "optax", "jaxlib"):
                    wrong.append(f"{path.relative_to(PACKAGE)} imports {module}")
    assert not wrong, "\n".join(wrong)
