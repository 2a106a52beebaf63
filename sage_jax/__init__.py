"""SAGE (Skill Augmented GRPO for self-Evolution) on JAX."""

__version__ = "0.1.0"
