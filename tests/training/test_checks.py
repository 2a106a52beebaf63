"""Wrong names and impossible combinations raise before anything is built."""

import dataclasses

import numpy as np
import pytest

from configs import quickstart, sage_demo, sft_tiny
from sage_jax.agent.chain import Rollout
from sage_jax.agent.trajectory import End, Episode
from sage_jax.errors import ConfigError, DataRootError, SageError
from sage_jax.rl.batch import RowShape, pack
from sage_jax.skills.library import Library
from sage_jax.train import profile_steps
from sage_jax.training import checks, rl_loop, setup
from sage_jax.training.experiment import run_experiment
from sage_jax.world.types import Judgement


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("rl.reward", "skills", "skill_integrated, outcome, chain"),
        ("rl.advantage", "grpo", "mean, loo, std"),
        ("rl.detector", "name", "called"),
        ("rl.normaliser", "tokens", "sequence, token, constant"),
        ("rl.old_logprobs", "old", "recomputed, sampler"),
        ("rl.group", 0, "at least 1"),
        ("rl.row_tokens", (64,), "must hold a whole episode"),
        ("rl.rows", 3, "rl.rows=3 rows.*use a multiple"),
        ("sampler.slots", 31, r"sampler.slots=31 rows do not divide by mesh.data \* mesh.fsdp = 2"),
        ("mesh.sequence", 7, r"rl.row_tokens=\(768,\): rows of 768 tokens do not divide by mesh.sequence = 7"),
        ("chain.source", "random", "scenario, similarity"),
        ("chain.length", 0, "at least 1"),
        ("optim.schedule", "linear", "constant, cosine"),
        ("optim.b1", 1.0, "out of range"),
        ("agent.kind", "agent", "skill"),
        ("agent.style", "long", "short"),
        ("agent.skill_style", "signatures", "source, signature"),
        ("agent.early_stop_share", 1.5, "early_stop"),
        ("agent.early_stopped", "none", "zero, drop"),
        ("eval.library", "none at all", "chain, none, reference"),
        ("eval.greedy", False, "nothing to evaluate"),
        ("run.name", "SFT", "three different names"),
        ("sampler.temperature", 0.0, "above 0"),
        ("sampler.slots", 0, r"sampler\.slots=0 must be at least 1"),
        ("sampler.top_p", 0.0, r"sampler\.top_p=0.0 must be above 0"),
        ("sampler.top_k", -1, r"sampler\.top_k=-1"),
        ("agent.episode_retries", -1, "episode_retries=-1"),
        ("rl.negative_weight", -0.5, "rl.negative_weight=-0.5 must be in"),
        ("rl.mini_batches", 49, "rl.mini_batches=49 is more than .* 48 rollouts"),
        ("world.scenarios", 2, "world.scenarios=2: .*at least 4"),
        ("world.kind", "mini", "miniworld, official"),
        ("collect.vocab_size", 100, "collect.vocab_size=100 must be 0 .* or at least 293"),
        ("collect.vocab_size", 0, "needs collect.vocab_size"),
        ("sft.save_dtype", "bf16", "bfloat16"),
        ("sft.normaliser", "constant", "sequence, token"),
        ("sft.renamed_copies", 0, r"sft.weights .*'call': 0.5.* relative to sft.renamed_copies"),
    ],
)
def test_wrong_values_raise_at_start(key, value, message):
    config = quickstart.get_config("from_scratch")
    config.mesh.fsdp = 2
    config.agent.early_stop_turn = 2
    config.sft.weights.call = 0.5
    checks.check_train(config)
    config.update_from_flattened_dict({key: value})
    with pytest.raises(ConfigError, match=message):
        checks.check_train(config)


def test_splits_and_steps_that_the_root_does_not_have(mini_root):
    config = quickstart.get_config("from_scratch")
    config.collect.split = "training"
    with pytest.raises(DataRootError, match=r"no split 'training': the mini world has train, dev"):
        checks.check_train(config)
    config = sage_demo.get_config()
    config.world.path = str(mini_root.path)
    with pytest.raises(DataRootError, match="no split 'deb'"):
        checks.check_split_names(config, ["dev", "deb"])
    config.rl.scenarios_per_step = 99
    with pytest.raises(ConfigError, match=rf"rl.scenarios_per_step=99 is more than the {len(mini_root.scenarios('train'))} scenarios of split 'train'"):
        checks.check_chains(config, mini_root)
    config.world.kind = "official"
    for key, value in (("reuse", True), ("library", "reference")):
        wrong = config.copy_and_resolve_references()
        wrong.eval[key] = value
        with pytest.raises(ConfigError, match="only the mini world has them"):
            checks.check_evaluation(wrong)
    with pytest.raises(ConfigError, match="only the mini world has solutions"):
        checks.check_collect(config)


def test_a_command_put_right_runs_in_the_same_workdir(tmp_path):
    """What is refused leaves no config.json behind, which would refuse the next try too."""
    for key, value, error in (
        ("model.source", "/no/such/model", "neither 'bundled'"), ("mesh.data", 3, r"needs 3 devices.*--config\.mesh\.data=1 --config\.rl\.rows=1"),
        ("rl.split", "trian", "no split 'trian'"), ("run.splits", ("tests",), "no split 'tests'"),
    ):  # fmt: skip
        config = sage_demo.get_config()
        if key == "mesh.data":
            config.rl.rows, config.sampler.slots = 3, 33
        config.update_from_flattened_dict({key: value})
        with pytest.raises(SageError, match=error):
            run_experiment(config, tmp_path)
    config = sage_demo.get_config()
    config.model.update(source="random", preset="tinny")
    with pytest.raises(ConfigError, match="unknown model preset 'tinny'"):
        run_experiment(config, tmp_path)
    assert not list(tmp_path.iterdir())


def test_recipes_pass_the_checks():
    for module, arg in ((sage_demo, None), (sage_demo, "runlocal"), (quickstart, None), (quickstart, "smoke"), (quickstart, "from_scratch,smoke")):
        checks.check_train(module.get_config(arg))
    for arg in (None, "runlocal"):
        config = sft_tiny.get_config(arg)
        checks.check_collect(config)
        checks.check_sft(config)


def test_a_prompt_that_does_not_fit_raises(mini_root):
    config = sage_demo.get_config()
    tokenizer = setup.load_tokenizer(setup.BUNDLED)
    checks.check_prompts(config, mini_root, "dev", tokenizer)
    config.agent.style = "full"
    with pytest.raises(ConfigError, match=r"no room for a response\. Raise sampler\.context"):
        checks.check_prompts(config, mini_root, "dev", tokenizer)


def test_an_episode_without_tokens_counts_and_trains_nothing():
    """The prompt did not fit the context: nothing was sampled."""
    episode = Episode(
        task_id="t_1", scenario_id="t", split="train", difficulty=1, instruction="", rollout="r", position=1, messages=[], turns=[],
        end=End.CONTEXT_LENGTH, judgement=None, offered=(), verdicts=(), defined=(), tokens=None,
    )
    assert episode.valid
    rollouts = [Rollout(chain=0, index=i, tasks=("t_1",), episodes=[dataclasses.replace(episode)], library=Library()) for i in range(2)]
    packed = pack(rl_loop._samples(rollouts, [True, True], [np.array([0.5]), np.array([-0.5])]), [RowShape(1, 8)])
    assert packed.denominator == 2 and packed.trained_tokens == 0 and packed.idle == 2


def test_a_dev_evaluation_with_lost_tasks_chooses_no_checkpoint():
    """The lost ones could have been those that the policy fails."""
    solved = [
        Episode(
            f"{s}_{k}", s, "dev", 1, "", f"dev/{s}", k, [], [], End.COMPLETED, Judgement(1, 1, True, True, (), ()), (), (), (), None
        )
        for s in ("a", "b") for k in (1, 2, 3)
    ]  # fmt: skip
    whole = rl_loop.dev_metrics([solved], 6)
    assert whole["eval_dev/sgc"] == 1.0 and whole["eval_dev/infrastructure_errors"] == 0
    lost = dataclasses.replace(solved[4], end=End.INFRASTRUCTURE_ERROR, judgement=None)
    short = rl_loop.dev_metrics([[*solved[:4], lost]], 6)
    assert "eval_dev/sgc" not in short and short["eval_dev/tgc"] == 1.0 and short["eval_dev/infrastructure_errors"] == 1


def test_profile_steps():
    assert profile_steps("") is None and profile_steps("3") == (3, 3) and profile_steps("3:5") == (3, 5)
    for wrong in ("5:3", "a", "1:b", "-1"):
        with pytest.raises(ConfigError, match="first:last"):
            profile_steps(wrong)
