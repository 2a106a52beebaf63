"""The recipe of the bundled policy: verified demonstrations of the train scenarios, then SFT from new weights in two stages,
then a finish on demonstrations of which RL can choose.

python -m sage_jax.collect --config=configs/sft_tiny.py --workdir=runs/sft_tiny
python -m sage_jax.sft --config=configs/sft_tiny.py --workdir=runs/sft_tiny
python -m sage_jax.collect --config=configs/sft_tiny.py:finish --config.sft.start=runs/sft_tiny/policy --workdir=runs/sft_finish
python -m sage_jax.sft --config=configs/sft_tiny.py:finish --config.sft.start=runs/sft_tiny/policy --workdir=runs/sft_finish
rm -r sage_jax/model/bundled && cp -r runs/sft_finish/policy sage_jax/model/bundled      (to make it the bundled one)
"""

from configs import common


def get_config(arg=None):
    c = common.base()
    c.model.source = "random"
    c.model.tokenizer = "workdir"  # trained by `collect` on the collected text
    c.collect.vocab_size = 1024
    # Worlds of other seeds than the demo's: more names and titles to copy, and none of the demo's people is seen.
    c.collect.seeds = (1, 2, 3, 4)
    c.collect.passes = 1
    # What one is in a hurry to write reads the first page; what is kept for later tasks reads all. RL can tell them apart.
    c.collect.first_page = 0.8
    c.collect.modes.inline = 0.45
    c.collect.modes.function = 0.35
    c.collect.modes.lookup_function = 0.04
    c.collect.modes.lookup_inline = 0.04
    c.collect.modes.repair_function = 0.06
    c.collect.modes.repair_inline = 0.06
    c.world.max_open = 12
    c.sft.steps = 550
    c.sft.short_steps = 250
    c.sft.batch = 32
    c.sft.second_steps = 400
    c.sft.weights.call = 0.5
    return common.with_arg(c, arg, finish=finish, runlocal=runlocal)


def finish(c):
    """Hurried statements read three entries only, and nearly all are hurried: they pass in half of the tasks that read lists."""
    c.seed = 1
    c.model.source = "bundled"
    c.sft.start = "bundled"  # stands for the policy of the first recipe: give --config.sft.start
    c.collect.vocab_size = 0
    c.collect.first_page = 0.9
    c.collect.page_limit = 3
    c.collect.modes.inline = 0.55
    c.collect.modes.function = 0.3
    c.sft.steps = 300
    c.sft.short_steps = 0
    c.sft.second_steps = 0
    c.sft.lr = 2e-3
    c.sft.weights.call = 1.0


def runlocal(c):
    c.world.scenarios = 12
    c.collect.seeds = (1,)
    c.collect.passes = 1
    c.sft.steps = 6
    c.sft.short_steps = 2
    c.sft.second_steps = 3
    c.sft.warmup = 1
    c.sft.batch = 4
