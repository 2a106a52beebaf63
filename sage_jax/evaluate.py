"""Evaluates any policy: python -m sage_jax.evaluate --config=configs/evaluate.py --workdir=runs/eval --split=test_normal

--policy: scripted, bundled, a Hugging Face folder, a checkpoint of a training run (WORKDIR/checkpoints/best, /last or /STEP), or
empty for the config's model.source.
"""

from absl import flags

from sage_jax import entry

SPLIT = flags.DEFINE_string("split", "", "Split, or a text file of scenario ids; test_normal@1,2: of these difficulties only; empty: the config's eval.split.")
POLICY = flags.DEFINE_string("policy", "", "scripted, bundled, random, a Hugging Face folder, WORKDIR/checkpoints/best (last, STEP); empty: the config's model.source.")


def main(config, workdir):
    from sage_jax.training.evaluate_command import evaluate_command

    evaluate_command(config, workdir, split=SPLIT.value, policy=POLICY.value)


if __name__ == "__main__":
    entry.run(main, "sage_jax.evaluate")
