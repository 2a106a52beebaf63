"""Runs SAGE (or a baseline): python -m sage_jax.train --config=configs/quickstart.py --workdir=runs/quickstart"""

from absl import flags

from sage_jax import entry

PROFILE_STEPS = flags.DEFINE_string("profile_steps", "", "first:last, steps (from 0) of which a JAX profile goes to workdir/profile.")


def main(config, workdir):
    from sage_jax.training.experiment import run_experiment

    run_experiment(config, workdir, profile=profile_steps(PROFILE_STEPS.value))


def profile_steps(text: str) -> tuple[int, int] | None:
    """(first, last) of "first:last" or of a single step; None for "". Raises ConfigError for anything else."""
    from sage_jax.errors import ConfigError

    if not text:
        return None
    first, _, last = text.partition(":")
    last = last or first
    if not (first.isdigit() and last.isdigit() and int(first) <= int(last)):
        raise ConfigError(f"--profile_steps={text!r} must be first:last, two step numbers from 0, e.g. 3:4")
    return int(first), int(last)


if __name__ == "__main__":
    entry.run(main, "sage_jax.train")
