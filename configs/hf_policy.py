"""SAGE on a policy of your own: a Hugging Face folder of Qwen2, Qwen2.5 or Qwen3 (dense), with full prompts. Not tuned; a place to start.

python -m sage_jax.train --config=configs/hf_policy.py --config.model.source=/path/to/Qwen3-8B --config.mesh.fsdp=8 --workdir=runs/qwen
"""

from configs import common


def get_config(arg=None):
    c = common.base()
    c.model.source = "folder"  # to be given
    c.model.dtype = "bfloat16"
    c.model.remat = "full"
    c.agent.style = "full"
    c.agent.demonstrations = 1
    c.agent.skill_tokens = 2000
    c.agent.observation_chars = 12_000
    c.agent.max_turns = 30
    c.sampler.context = 16_384
    c.sampler.extend_buckets = (128, 512, 2048, 8192)
    c.sampler.max_new_tokens = 1536
    c.rl.steps = 200
    c.rl.scenarios_per_step = 16
    c.rl.group = 8
    c.rl.rows = 8
    c.rl.row_tokens = (4096, 16_384)
    c.optim.lr = 1e-6
    c.optim.weight_decay = 0.01
    c.run.base = False
    return common.with_arg(c, arg, runlocal=runlocal)


def runlocal(c):
    """The same prompts and turns on the tiny policy, which cannot do much with them: a dry run of the plumbing."""
    c.world.scenarios = 12
    c.model.source = "bundled"
    c.model.dtype = "float32"
    c.agent.demonstrations = 0
    c.agent.max_turns = 2
    c.sampler.context = 3072
    c.sampler.extend_buckets = (128, 2048)
    c.sampler.max_new_tokens = 64
    c.rl.steps = 1
    c.rl.scenarios_per_step = 1
    c.rl.group = 2
    c.rl.rows = 1
    c.rl.row_tokens = (3072,)
    c.eval.scenarios = 1
    c.eval.every = 0
