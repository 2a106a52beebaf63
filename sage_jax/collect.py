"""Plays reference solutions and keeps what the judge passes: python -m sage_jax.collect --config=configs/sft_tiny.py --workdir=runs/sft"""

from sage_jax import entry


def main(config, workdir):
    from sage_jax.training.checks import check_collect
    from sage_jax.training.collecting import collect

    check_collect(config)
    entry.write_config(config, workdir)
    collect(config, workdir)


if __name__ == "__main__":
    entry.run(main, "sage_jax.collect")
