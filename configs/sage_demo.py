"""The demo whose table is in the README: SAGE from the bundled policy, measured on test_normal and test_challenge.

for s in 1 2 3; do python -m sage_jax.train --config=configs/sage_demo.py --config.seed=$s --workdir=runs/sage_demo_$s; done
"""

from configs import common


def get_config(arg=None):
    c = common.base()
    c.run.base = False
    c.run.splits = ("test_normal", "test_challenge")
    c.eval.runs = 4
    c.eval.keep_outputs = False
    # Sampled at 0.6, where fewer failures are slips of single characters, so that more of the signal is about what to write.
    c.sampler.temperature = 0.6
    c.eval.temperature = 0.6
    c.rl.steps = 16
    c.rl.scenarios_per_step = 12
    # A large eps: weights whose gradient is mostly noise stand still. See docs/log.md.
    c.optim.lr = 2e-4
    c.optim.eps = 1e-4
    c.optim.schedule = "cosine"
    c.optim.horizon = 16
    return common.with_arg(c, arg, runlocal=runlocal)


def runlocal(c):
    c.world.scenarios = 12
    c.rl.steps = 2
    c.rl.scenarios_per_step = 2
    c.rl.group = 2
    c.eval.runs = 0
    c.eval.scenarios = 1
