"""Runs SAGE (or a baseline): python -m sage_jax.train --config=configs/quickstart.py --workdir=runs/quickstart"""

from sage_jax import entry


def main(config, workdir):
    from sage_jax.training.experiment import run_experiment

    run_experiment(config, workdir)


if __name__ == "__main__":
    entry.run(main, "sage_jax.train")
