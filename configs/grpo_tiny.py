"""The baseline beside the demo: plain GRPO without skills from the same start, as many steps and rollouts.

for s in 1 2 3; do python -m sage_jax.train --config=configs/grpo_tiny.py --config.seed=$s --workdir=runs/grpo_tiny_$s; done
"""

from configs import common, sage_demo


def get_config(arg=None):
    c = sage_demo.get_config()
    c.agent.kind = "plain"
    c.rl.reward = "outcome"
    c.rl.advantage = "std"
    c.run.name = "GRPO"
    return common.with_arg(c, arg, runlocal=sage_demo.runlocal)
