"""Trains on a chat dataset: python -m sage_jax.sft --config=configs/sft_tiny.py --workdir=runs/sft (after sage_jax.collect)"""

from pathlib import Path

from sage_jax import entry


def main(config, workdir):
    from sage_jax.errors import ConfigError
    from sage_jax.training.checks import check_sft
    from sage_jax.training.experiment import supervised
    from sage_jax.training.setup import check_policy

    check_sft(config)
    dataset = Path(config.sft.dataset).expanduser() if config.sft.dataset else workdir / "dataset.jsonl"
    if not dataset.exists():
        raise ConfigError(
            f"{dataset} is missing: run `python -m sage_jax.collect` with the same --config and --workdir first, or set sft.dataset"
        )
    check_policy(config, source=config.sft.start, tokenizer_folder=dataset.parent / "tokenizer")
    entry.write_config(config, workdir)
    print(f"policy: {supervised(config, dataset, workdir)}")


if __name__ == "__main__":
    entry.run(main, "sage_jax.sft")
