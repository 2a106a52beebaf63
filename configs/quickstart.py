"""What launch/quickstart.sh runs: the first steps of the demo, with evaluations before and after.

python -m sage_jax.train --config=configs/quickstart.py --workdir=runs/quickstart
python -m sage_jax.train --config=configs/quickstart.py:smoke --workdir=runs/smoke          (a few minutes)
python -m sage_jax.train --config=configs/quickstart.py:from_scratch --workdir=runs/scratch (SFT too, live: an hour more)
"""

from configs import common, sage_demo, sft_tiny


def get_config(arg=None):
    c = sage_demo.get_config()
    c.run.base = True
    c.run.splits = ("test_normal",)
    c.rl.steps = 4
    c.eval.scenarios = 16
    c.eval.runs = 0
    c.eval.every = 2
    c.eval.keep_outputs = True
    return common.with_arg(c, arg, from_scratch=from_scratch, smoke=smoke, runlocal=smoke)


def smoke(c):
    if c.run.from_scratch:
        sft_tiny.runlocal(c)
    c.world.scenarios = 12
    c.rl.steps = 3
    c.rl.scenarios_per_step = 2
    c.eval.every = 3


def from_scratch(c):
    recipe = sft_tiny.get_config()
    c.run.from_scratch = True
    c.model, c.collect, c.sft = recipe.model, recipe.collect, recipe.sft
