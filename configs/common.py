"""Defaults of every recipe: each key is read somewhere, and unknown keys raise.

A recipe starts from `base()` and changes what it is about. Placeholders stand where a value may be given but need not.
"""

from ml_collections import ConfigDict


def base() -> ConfigDict:
    """The tiny policy on the mini world, on one CPU device."""
    c = ConfigDict()
    c.seed = 0

    c.world = ConfigDict()
    c.world.kind = "miniworld"  # "miniworld" (built on first use) or "official" (needs path or APPWORLD_ROOT)
    c.world.path = ""  # root with data/; empty: APPWORLD_ROOT for "official", the cache for "miniworld"
    c.world.scenarios = 180
    c.world.seed = 0
    c.world.max_open = 32  # worlds open at once
    c.world.open_s = 60.0  # limits in seconds of the trainer's clock
    c.world.execute_s = 20.0
    c.world.install_s = 20.0
    c.world.evaluate_s = 60.0
    c.world.close_s = 20.0
    c.world.memory_mb = 1024  # of the code of one world and all its processes, on top of what it shares with the server
    c.world.disk_mb = 64  # of files that the code of one world may write
    c.world.processes = 16  # of the code of one world
    c.world.allow_unisolated = False  # run also where the kernel has no Landlock: the code could then read the ground truth
    c.world.remote = ""  # http://HOST:PORT of a `sage_jax.world.serve` (token in SAGE_WORLDS_TOKEN), or "ray", ray://HEAD:PORT; empty: here
    c.world.output_chars = 20_000  # of one step; head and tail are kept

    c.model = ConfigDict()
    c.model.source = "bundled"  # "bundled", "random" (preset + tokenizer), or a Hugging Face folder
    c.model.preset = "tiny"  # used by "random"
    c.model.tokenizer = "bundled"  # used by "random": "bundled", a folder, a SentencePiece .model file, "workdir" (made by collect)
    c.model.thinking = True  # False: an empty think block in front of every response, for templates with that switch (Qwen3)
    c.model.dtype = "float32"  # compute; master weights are float32
    c.model.attention = "auto"  # over whole sequences: "auto", "heads", "xla", "chunked", "cudnn", "splash" (see model/attention.py)
    c.model.remat = "none"  # kept of a layer for the backward pass: "none" all, "dots", "dots_no_batch" (matrix products), "full" nothing

    c.lora = ConfigDict()  # adapters: only they train, in SFT and RL
    c.lora.rank = 0  # 0: off, all weights train
    c.lora.alpha = 16.0
    c.lora.targets = ("q", "k", "v", "o", "gate", "up", "down")
    c.lora.base_dtype = "float32"  # of the frozen weights
    c.lora.merge_for_sampling = False  # True: a merged copy of the weights after every update; else the sampler adds the adapters

    c.mesh = ConfigDict()  # sizes multiply to the number of devices
    c.mesh.data = 1
    c.mesh.fsdp = 1
    c.mesh.tensor = 1
    c.mesh.expert = 1
    c.mesh.sequence = 1

    c.sampler = ConfigDict()
    c.sampler.slots = 32
    c.sampler.context = 768
    c.sampler.extend_buckets = (32, 64, 128, 256, 512)
    c.sampler.decode_chunk = 16
    c.sampler.temperature = 1.0
    c.sampler.top_k = 0  # 0: off
    c.sampler.top_p = 1.0
    c.sampler.max_new_tokens = 320  # a turn

    c.agent = ConfigDict()
    c.agent.kind = "skill"  # "skill" or "plain" (no library)
    c.agent.style = "short"  # "short" for tiny policies, "full" for large ones
    c.agent.demonstrations = 0
    c.agent.skill_tokens = 300  # budget of the rendered library
    c.agent.skill_style = "source"  # "source" or "signature"
    c.agent.observation_chars = 160
    c.agent.reminder = ""
    c.agent.max_turns = 4
    c.agent.max_no_code_turns = 1
    c.agent.episode_tokens = 0  # sampled tokens of an episode, 0: no limit
    c.agent.episode_retries = 2
    c.agent.early_stop_turn = 0  # 0: off
    c.agent.early_stop_share = 0.1
    c.agent.early_stopped = "zero"  # an episode that was stopped: "zero" (r = 0), or "drop" (its rollout is no sample; LOOP)

    c.chain = ConfigDict()
    c.chain.length = 2
    c.chain.source = "scenario"  # "scenario", or "similarity" (nearest train tasks by n-grams)

    c.rl = ConfigDict()
    c.rl.steps = 40
    c.rl.split = "train"  # a split, or a file of scenario ids; "train@1,2": of these difficulties only (so for every split below)
    c.rl.scenarios_per_step = 8
    c.rl.group = 4  # rollouts of a chain
    c.rl.reward = "skill_integrated"  # "skill_integrated", "outcome", "chain"
    c.rl.detector = "called"  # "called" or "lexical"
    c.rl.no_code_reward = -1.0
    c.rl.advantage = "mean"  # "mean" (SAGE), "loo" (LOOP), "std" (GRPO)
    c.rl.negative_weight = 1.0  # factor of the negative advantages, 0 to 1; below 1 less is learned from failures
    c.rl.normaliser = "sequence"  # "sequence" (SAGE), "token", "constant"
    c.rl.constant = 1024.0  # used by normaliser "constant"
    c.rl.clip_low = 0.2
    c.rl.clip_high = 0.2
    c.rl.old_logprobs = "recomputed"  # with the weights that sampled, or "sampler"
    c.rl.epochs = 1
    c.rl.mini_batches = 1
    c.rl.row_tokens = (768,)  # lengths of packed rows; the longest holds a whole episode
    c.rl.rows = 2  # rows of a micro-batch; few, so that on a CPU they stay in its cache
    c.rl.max_bad_updates = 3  # skipped (non-finite) updates in a row before the run stops

    c.optim = ConfigDict()
    c.optim.lr = 1e-4  # 3e-4 takes the tiny policy apart within 10 steps (docs/log.md)
    c.optim.schedule = "constant"  # "constant" or "cosine"
    c.optim.warmup = 3  # updates
    c.optim.horizon = 0  # updates until the end of the cosine; 0: those of the run
    c.optim.b1 = 0.9
    c.optim.b2 = 0.99
    c.optim.eps = 1e-8
    c.optim.weight_decay = 0.0
    c.optim.clip_norm = 1.0

    c.eval = ConfigDict()
    c.eval.split = "test_normal"
    c.eval.runs = 0  # sampled runs (seeds 1..runs) beside the greedy one
    c.eval.temperature = 1.0  # of the sampled runs
    c.eval.greedy = True
    c.eval.scenarios = 0  # only the first N scenarios, 0: all
    c.eval.library = "chain"  # "chain" (skills of earlier tasks), "none", "reference" (a working skill is given)
    c.eval.reuse = False  # evaluate only: what a working skill is worth, tasks 2 and 3 with and without it
    c.eval.dev_split = "dev"  # during training
    c.eval.every = 10  # steps; 0: never
    c.eval.keep_outputs = True  # official folder layout below workdir/experiments/outputs

    c.collect = ConfigDict()
    c.collect.split = "train"
    c.collect.passes = 2  # times that every task is played
    c.collect.plain_share = 0.25  # of the scenarios, once more with the plain agent's prompt and without functions
    c.collect.seeds = ()  # mini worlds to collect in, by seed; (): the one of world.seed
    c.collect.vocab_size = 0  # of a tokenizer to train on what was collected; 0: none
    c.collect.modes = ConfigDict()  # relative frequency at a task without a usable skill
    c.collect.modes.inline = 0.45
    c.collect.modes.function = 0.35
    c.collect.modes.lookup_function = 0.05
    c.collect.modes.lookup_inline = 0.05
    c.collect.modes.repair_function = 0.05
    c.collect.modes.repair_inline = 0.05
    c.collect.reuse = 1.0  # probability of calling a skill that is there
    c.collect.first_page = 0.0  # probability that statements without a function read the first page of a list only
    c.collect.page_limit = 5  # entries of such a page (5 is the apps' default)
    c.collect.train_failed_turns = False

    c.sft = ConfigDict()
    c.sft.start = "random"  # "random", "bundled", or a Hugging Face folder
    c.sft.dataset = ""  # chat dataset (JSON lines) of sage_jax.sft; empty: dataset.jsonl in the workdir, as collect leaves it
    c.sft.renamed_copies = 8  # copies of each conversation with random names in place of its own; 0: train on it as it is
    c.sft.weights = ConfigDict()  # mode -> copies of its conversations, relative to renamed_copies
    for mode in ("call", "inline", "function", "lookup_inline", "lookup_function", "repair_inline", "repair_function"):
        c.sft.weights[mode] = 1.0
    c.sft.short_steps = 0  # of the steps, the first ones, on short forms: instruction and call alone (see sft/short.py); 0: none
    c.sft.second_steps = 0  # updates of a second stage: the same conversations with other names, from the first stage's policy
    c.sft.second_lr = 2e-3
    c.sft.save_dtype = "bfloat16"
    c.sft.steps = 900
    c.sft.batch = 16  # conversations an update
    c.sft.rows = 2  # rows of a micro-batch
    c.sft.row_tokens = (768,)
    c.sft.normaliser = "sequence"  # "sequence" or "token"
    c.sft.lr = 3e-3
    c.sft.schedule = "cosine"
    c.sft.warmup = 20
    c.sft.b1 = 0.9
    c.sft.b2 = 0.99
    c.sft.eps = 1e-8
    c.sft.weight_decay = 0.0
    c.sft.clip_norm = 1.0
    c.sft.held_out = 0.03  # share of the conversations' scenarios
    c.sft.eval_every = 100
    c.sft.checkpoint_every = 100
    c.sft.keep = 1
    c.sft.max_bad_updates = 3

    c.run = ConfigDict()  # phases of sage_jax.train
    c.run.name = "SAGE"  # row of the trained policy
    c.run.start_name = "SFT"  # row of the policy it starts from
    c.run.from_scratch = False  # collect and SFT first, live
    c.run.base = True  # evaluate an untrained policy of the same shape too
    c.run.start = True
    c.run.splits = ("test_normal",)

    c.checkpoint = ConfigDict()
    c.checkpoint.every = 1  # steps
    c.checkpoint.keep = 2
    return c


def with_arg(config: ConfigDict, arg: str | None, **switches) -> ConfigDict:
    """Applies `name[,name...]` after the config's colon; each names a function config -> None. Unknown names raise.

    They are applied in the order in which the recipe lists its switches, whatever the order in `arg`.
    """
    names = {n for n in (arg or "").split(",") if n}
    if unknown := sorted(names - switches.keys()):
        raise ValueError(f"config argument {unknown[0]!r} is unknown; valid: {', '.join(switches) or 'none'}")
    for name, switch in switches.items():
        if name in names:
            switch(config)
    return config
