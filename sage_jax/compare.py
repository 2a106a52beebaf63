"""One table over several runs: python -m sage_jax.compare --baseline=start --arm=start=runs/start/eval/bundled --arm=SAGE=runs/s1/eval/SAGE ...

An arm's name may be given several times, e.g. once a seed; its runs are then taken together. Greedy and sampled runs get rows of their
own; below them, for every other arm, the difference to the baseline paired by scenario, with a 95 per cent bootstrap interval. Prints Markdown.
"""

from absl import app, flags

from sage_jax.errors import SageError

ARM = flags.DEFINE_multi_string("arm", [], "NAME=FOLDER, a folder workdir/eval/ARM; repeat it.")
BASELINE = flags.DEFINE_string("baseline", "", "Name of the arm that the others are compared with; empty: the first.")
SPLITS = flags.DEFINE_list("splits", ["test_normal", "test_challenge"], "Splits; one that an arm has not measured is left out for it.")
METRICS = flags.DEFINE_list("metrics", ["tgc", "sgc", "solved_with_skill"], "Metrics of the differences.")


def main(argv):
    if len(argv) > 1:
        raise app.UsageError(f"unexpected arguments: {argv[1:]}")
    from sage_jax.training.comparison import compare

    try:
        print(compare(ARM.value, BASELINE.value, SPLITS.value, METRICS.value))
    except SageError as error:
        raise app.UsageError(str(error)) from error


if __name__ == "__main__":
    app.run(main)
