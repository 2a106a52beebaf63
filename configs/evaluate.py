"""Evaluates a policy greedily on a split of the mini world.

python -m sage_jax.evaluate --config=configs/evaluate.py --workdir=runs/eval --split=test_normal --policy=bundled
python -m sage_jax.evaluate --config=configs/evaluate.py:reuse --workdir=runs/reuse   (what a working skill is worth)
"""

from configs import common


def get_config(arg=None):
    c = common.base()
    return common.with_arg(c, arg, reuse=reuse, runlocal=runlocal)


def reuse(c):
    c.eval.reuse = True
    c.eval.runs = 4
    c.eval.keep_outputs = False


def runlocal(c):
    c.world.scenarios = 12
    c.eval.scenarios = 1
