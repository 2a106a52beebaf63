"""From a config to the parts of a run: data root, executor pool, policy, sampler, the rules of episodes.

Library code below takes plain values; names and combinations are checked at start by `training.checks`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import hashlib
import json
import os
from collections.abc import Callable, Coroutine, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from ml_collections import ConfigDict

from sage_jax.agent.episode import EpisodeSpec
from sage_jax.agent.jax_policy import JaxPolicy
from sage_jax.agent.prompts import PromptSpec, opening
from sage_jax.agent.scripted import Script, ScriptedPolicy
from sage_jax.errors import ConfigError
from sage_jax.model.attention import check_available
from sage_jax.model.chat import ChatRenderer
from sage_jax.model.config import ModelConfig, pad_vocab
from sage_jax.model.hf import load_hf, no_bar
from sage_jax.model.lora import join, merged, split_trainable
from sage_jax.model.presets import preset
from sage_jax.model.sharding import abstract_params, create_adapters, create_params, make_mesh, place
from sage_jax.model.tokenizer import Tokenizer, load_tokenizer
from sage_jax.report.progress import bar
from sage_jax.sampling.engine import Engine
from sage_jax.skills.extract import extract
from sage_jax.skills.record import Origin, Skill
from sage_jax.training.checkpoints import Checkpoints
from sage_jax.world.isolation import describe as describe_layers
from sage_jax.world.miniworld.references import load_reference
from sage_jax.world.pool import Limits, WorldPool
from sage_jax.world.ray_pool import RayPool
from sage_jax.world.remote import RemotePool
from sage_jax.world.roots import DataRoot, resolve_root
from sage_jax.world.types import Task

BUNDLED = Path(__file__).resolve().parents[1] / "model" / "bundled"


@dataclasses.dataclass
class Loaded:
    """A policy's weights and what belongs to them."""

    cfg: ModelConfig
    graphdef: nnx.GraphDef
    params: nnx.State
    tokenizer: Tokenizer
    mesh: Mesh
    identity: str  # equal only for equal weights; "" where they change while the process runs


def data_root(config: ConfigDict, *, seed: int | None = None, check: bool = True) -> DataRoot:
    """The mini world (built on first use; `seed` in place of the config's) or the official root."""
    w = config.world
    return resolve_root(w.kind, w.path or None, scenarios=w.scenarios, seed=w.seed if seed is None else seed, check=check)


def world_pool(config: ConfigDict, root: DataRoot, outputs: Path | None) -> WorldPool | RemotePool | RayPool:
    w = config.world
    ray = w.remote == "ray" or w.remote.startswith("ray://")
    if w.remote and not ray:
        return RemotePool(w.remote, os.environ.get("SAGE_WORLDS_TOKEN", ""), root=root, allow_unisolated=w.allow_unisolated)
    limits = Limits(
        open_s=w.open_s, execute_s=w.execute_s, install_s=w.install_s, evaluate_s=w.evaluate_s, close_s=w.close_s,
        memory_mb=w.memory_mb, disk_mb=w.disk_mb, processes=w.processes, output_chars=w.output_chars,
    )
    options = {"limits": limits, "outputs": outputs, "max_open": w.max_open, "allow_unisolated": w.allow_unisolated}
    if ray:
        return RayPool("auto" if w.remote == "ray" else w.remote, root.path, **options)
    return WorldPool(root.path, **options)


class Session:
    """An event loop and an executor pool for a whole run: warming the pool's server takes seconds, so it is done once.

    Use as a context manager. `outputs`: where worlds opened with `keep=True` leave the engine's files.
    """

    def __init__(self, config: ConfigDict, root: DataRoot, outputs: Path | None):
        self._loop = asyncio.new_event_loop()
        self.pool = world_pool(config, root, outputs)

    def __enter__(self) -> Session:
        self.run(self.pool.start())
        self.isolation = describe_layers(self.pool.layers)
        print(self.isolation)
        return self

    def __exit__(self, *_) -> None:
        # After Ctrl-C coroutines are still suspended; they must end before the loop does.
        left = asyncio.all_tasks(self._loop)
        for task in left:
            task.cancel()
        if left:
            self._loop.run_until_complete(asyncio.gather(*left, return_exceptions=True))
        self.run(self.pool.close())
        self._loop.close()

    def run(self, coroutine: Coroutine) -> Any:
        return self._loop.run_until_complete(coroutine)


def load_policy(config: ConfigDict, *, source: str | None = None, tokenizer_folder: Path | None = None, adapters: bool = False) -> Loaded:
    """Weights on the mesh: the bundled ones, a Hugging Face folder, a checkpoint of a run, or new ones from a preset and the seed.

    Args:
      source: "bundled", "random", a Hugging Face folder, or WORKDIR/checkpoints/last, /best or /STEP of a run of `sage_jax.train`;
        default: model.source.
      tokenizer_folder: what model.tokenizer="workdir" means, for new weights.
      adapters: with the new adapters that config.lora asks for, to be trained. Without, those of a checkpoint are merged.

    Raises:
      ConfigError: a source that is none of these; a mesh that the devices cannot form.
      CheckpointError: the checkpoint is not there or damaged.
    """
    m = config.model
    source = source or m.source
    check_policy(config, source=source, tokenizer_folder=tokenizer_folder)
    if checkpoint := _checkpoint(source):
        loaded = _from_checkpoint(config, checkpoint)
        return _with_adapters(config, loaded) if adapters and config.lora.rank else loaded
    mesh, fields = _mesh(config), _fields(config, adapters)
    if source == "random":
        tokenizer = load_tokenizer(_tokenizer_place(config, tokenizer_folder), thinking=m.thinking)
        cfg = preset(m.preset, vocab_size=pad_vocab(tokenizer.vocab_size), **fields)
        graphdef, params = create_params(cfg, mesh, config.seed)
        return Loaded(cfg, graphdef, params, tokenizer, mesh, f"random {cfg} seed {config.seed}")
    folder = _folder(source)
    if mesh.size > 1 and ModelConfig.from_hf(json.loads((folder / "config.json").read_text())).num_experts:
        raise ConfigError("a mixture of experts on a mesh of several devices is refused for now: its gradient differs from that of one device by some per cent")
    cfg, graphdef, params = load_hf(folder, mesh, seed=config.seed, bar=bar if _large(folder) else no_bar, **fields)
    return Loaded(cfg, graphdef, params, load_tokenizer(folder, thinking=m.thinking), mesh, folder_identity(folder))


def check_policy(config: ConfigDict, *, source: str, tokenizer_folder: Path | None = None) -> None:
    """What can be known of a policy before anything is loaded: mesh, preset, folders. Arguments and errors as in `load_policy`."""
    m = config.model
    mesh, fields = _mesh(config), _fields(config, adapters=True)
    lengths = (*config.rl.row_tokens, *config.sft.row_tokens)
    if checkpoint := _checkpoint(source):
        _of_run(checkpoint)
    elif source == "random":
        where = _tokenizer_place(config, tokenizer_folder)
        if m.tokenizer != "workdir" and not where.exists():  # that of a workdir may be still to be made
            raise ConfigError(f"model.tokenizer={m.tokenizer!r}: there is no {where}; give 'bundled', a folder or a SentencePiece file")
        ids = _check_template(config, where) if where.exists() else max(config.collect.vocab_size, 1)
        _check_fits(preset(m.preset, vocab_size=pad_vocab(ids), **fields), mesh, lengths)
    else:
        folder = _folder(source)
        if not (folder / "config.json").is_file():
            raise ConfigError(
                f"policy {source!r} is neither 'bundled', 'random', a Hugging Face folder (there is no {folder}/config.json) nor "
                "WORKDIR/checkpoints/last, /best or /STEP of a training run"
            )
        _check_fits(ModelConfig.from_hf(json.loads((folder / "config.json").read_text()), **fields), mesh, lengths)
        _check_template(config, folder)


def _check_fits(cfg: ModelConfig, mesh: Mesh, lengths: tuple[int, ...]) -> None:
    """Raises ConfigError if the attention cannot run here or a parameter does not divide over the mesh."""
    check_available(cfg, lengths)
    place(abstract_params(cfg)[1], mesh)


def _check_template(config: ConfigDict, where: Path) -> int:
    """The number of ids. Raises ConfigError if the tokenizer's chat template cannot be rendered turn by turn, or has no switch for
    model.thinking=False."""
    try:
        tokenizer = load_tokenizer(where, thinking=config.model.thinking)
        ChatRenderer(tokenizer)
    except ConfigError as error:
        raise ConfigError(f"{where} (model.thinking={config.model.thinking}): {error}") from error
    return tokenizer.vocab_size


def _mesh(config: ConfigDict) -> Mesh:
    m = config.mesh
    return make_mesh({"data": m.data, "fsdp": m.fsdp, "tensor": m.tensor, "expert": m.expert, "sequence": m.sequence})


def _fields(config: ConfigDict, adapters: bool) -> dict[str, Any]:
    """Fields of the policy's ModelConfig that the config decides, not its folder."""
    m, lora = config.model, config.lora
    fields = {"dtype": m.dtype, "remat": m.remat, "attention": m.attention}
    if adapters and lora.rank:
        fields |= {"lora_rank": lora.rank, "lora_alpha": lora.alpha, "lora_targets": tuple(lora.targets), "param_dtype": lora.base_dtype}
    return fields


def _large(folder: Path) -> bool:
    return sum(f.stat().st_size for f in folder.glob("*.safetensors")) > 1 << 28


def _folder(source: str) -> Path:
    return BUNDLED if source == "bundled" else Path(source).expanduser()


def _tokenizer_place(config: ConfigDict, workdir_tokenizer: Path | None) -> Path:
    name = config.model.tokenizer
    if name == "workdir" and workdir_tokenizer is None:
        raise ConfigError("model.tokenizer='workdir' has no meaning here; give 'bundled', a folder or a SentencePiece file")
    return {"bundled": BUNDLED, "workdir": workdir_tokenizer}.get(name) or Path(name).expanduser()


def untrained(config: ConfigDict, like: Loaded) -> Loaded:
    """New weights of the same shape, with the same tokenizer."""
    cfg = like.cfg.replace(lora_rank=0)
    graphdef, params = create_params(cfg, like.mesh, config.seed)
    return dataclasses.replace(like, cfg=cfg, graphdef=graphdef, params=params, identity=f"random {cfg} seed {config.seed}")


def base_name(config: ConfigDict, workdir: Path) -> str:
    """The folder of the policy that a run starts from, or "random"."""
    if config.run.from_scratch:
        return str(workdir / "sft" / "policy")
    source = config.model.source
    return source if source == "random" else str(_folder(source))


def _checkpoint(source: str) -> Path | None:
    """The path, if it names a checkpoint of a run; a model folder that happens to lie there is none."""
    path = Path(source).expanduser()
    named = path.parent.name == "checkpoints" and (path.name in ("best", "last") or path.name.isdigit())
    return path if named and not (path / "config.json").exists() else None


def _of_run(checkpoint: Path) -> tuple[dict[str, str], dict[str, Any]]:
    """({source, preset, tokenizer, thinking} of the policy that the checkpoint's run started from, its adapters). Raises ConfigError if there is no such run."""
    workdir = checkpoint.parent.parent
    try:
        of_run = json.loads((workdir / "config.json").read_text())
        start = str(workdir / "sft" / "policy") if of_run["run"]["from_scratch"] else of_run["model"]["source"]
        return {"source": start, **{k: of_run["model"][k] for k in ("preset", "tokenizer", "thinking")}}, of_run["lora"]
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"policy {checkpoint}: {workdir} is no run of sage_jax.train ({type(error).__name__}: {error})") from error


def _from_checkpoint(config: ConfigDict, path: Path) -> Loaded:
    workdir = path.parent.parent
    config = config.copy_and_resolve_references()
    start, lora = _of_run(path)
    config.model.update(start)
    config.lora.update(lora)
    loaded = load_policy(config, tokenizer_folder=workdir / "tokenizer", adapters=True)  # for its shape and tokenizer
    trainable, frozen = trained_part(loaded)
    with Checkpoints(workdir / "checkpoints", keep=1, best_metric="") as checkpoints:
        state, _ = checkpoints.restore_params(trainable, path.name)
    params = state.params if frozen is None else join(state.params, frozen)
    return without_adapters(dataclasses.replace(loaded, params=params, identity=f"{path} step {state.step}"))


def _with_adapters(config: ConfigDict, loaded: Loaded) -> Loaded:
    """The same policy with the new adapters of config.lora."""
    cfg = loaded.cfg.replace(**_fields(config, adapters=True))
    base = jax.tree.map(lambda x: x.astype(cfg.param_dtype), loaded.params)
    params = join(create_adapters(cfg, loaded.mesh, config.seed), base)
    return dataclasses.replace(loaded, cfg=cfg, graphdef=abstract_params(cfg)[0], params=params)


def trained_part(loaded: Loaded) -> tuple[nnx.State, nnx.State | None]:
    """(parameters that train, the frozen rest or None where all train)."""
    return split_trainable(loaded.params) if loaded.cfg.lora_rank else (loaded.params, None)


def without_adapters(loaded: Loaded) -> Loaded:
    """The same policy with its adapters merged into the weights."""
    if not loaded.cfg.lora_rank:
        return loaded
    cfg, params = merged(loaded.cfg, loaded.params)
    graphdef, abstract = abstract_params(cfg)
    return dataclasses.replace(loaded, cfg=cfg, graphdef=graphdef, params=jax.device_put(params, place(abstract, loaded.mesh)))


def for_sampling(config: ConfigDict, loaded: Loaded) -> tuple[Loaded, Callable[[nnx.State], nnx.State]]:
    """(policy that the sampler is built for, whose own weights are not to be used; parameters that train -> its weights)."""
    _, frozen = trained_part(loaded)
    if frozen is None:
        return loaded, lambda params: params
    if not config.lora.merge_for_sampling:
        return loaded, lambda params: join(params, frozen)
    cfg = loaded.cfg.replace(lora_rank=0)
    graphdef, abstract = abstract_params(cfg)
    with_lora = loaded.cfg
    merge = jax.jit(lambda params, frozen: merged(with_lora, join(params, frozen))[1], out_shardings=place(abstract, loaded.mesh))
    return dataclasses.replace(loaded, cfg=cfg, graphdef=graphdef), lambda params: merge(params, frozen)


def folder_identity(folder: Path) -> str:
    """A digest of a policy folder's files: of their bytes, or of size and time for those above 256 MiB."""
    digest = hashlib.sha256()
    for file in sorted(p for p in folder.iterdir() if p.suffix in (".json", ".safetensors", ".model")):
        about = file.stat()
        large = about.st_size > 1 << 28
        digest.update(f"{file.name} {about.st_size} {about.st_mtime_ns if large else ''}".encode())
        digest.update(b"" if large else file.read_bytes())
    return digest.hexdigest()[:16]


def sampler(config: ConfigDict, loaded: Loaded) -> Engine:
    s = config.sampler
    engine = Engine(
        loaded.graphdef, loaded.cfg, loaded.mesh, loaded.tokenizer, slots=s.slots, context=s.context,
        extend_buckets=tuple(s.extend_buckets), decode_chunk=s.decode_chunk,
    )
    engine.set_params(loaded.params, version=0)
    return engine


def jax_policy(config: ConfigDict, engine: Engine, loaded: Loaded, *, temperature: float) -> JaxPolicy:
    s = config.sampler
    return JaxPolicy(
        engine, loaded.tokenizer, temperature=temperature, top_k=s.top_k, top_p=s.top_p, max_new_tokens=s.max_new_tokens,
    )


def episode_spec(config: ConfigDict, *, keep_outputs: bool, kind: str | None = None) -> EpisodeSpec:
    """The rules of an episode; `kind` overrides the config's agent."""
    a = config.agent
    return EpisodeSpec(
        prompt=PromptSpec(
            agent=kind or a.kind, style=a.style, demonstrations=a.demonstrations, skill_tokens=a.skill_tokens, skill_style=a.skill_style,
            observation_chars=a.observation_chars, reminder=a.reminder,
        ),
        max_turns=a.max_turns, max_no_code_turns=a.max_no_code_turns, episode_tokens=a.episode_tokens,
        episode_retries=a.episode_retries, keep_outputs=keep_outputs,
    )


def opening_tokens(config: ConfigDict, task: Task, tokenizer: Tokenizer) -> int:
    """Tokens of a task's prompt before anything is in the library."""
    spec = episode_spec(config, keep_outputs=False)
    messages, _ = opening(task, (), spec.prompt, lambda text: len(tokenizer.encode(text)))
    renderer = ChatRenderer(tokenizer)
    return len(renderer.open_turn(messages, first=True))


def scripted_policy(config: ConfigDict, modes: Mapping[str, float] | None = None) -> ScriptedPolicy:
    """The policy of `config.collect`, with other frequencies of modes if given. Raises ConfigError for unknown modes or bad frequencies."""
    c = config.collect
    return ScriptedPolicy(c.modes.to_dict() if modes is None else modes, reuse=c.reuse, seed=config.seed, first_page=c.first_page, page_limit=c.page_limit)


def scripts(root: DataRoot, task_ids: list[str]) -> dict[str, dict]:
    """Task id -> facts for the scripted policy. Raises ConfigError on a root without our references."""
    if root.kind != "miniworld":
        raise ConfigError(f"scripted solutions exist for the mini world only, and {root.path} is {root.kind}")
    references = {task_id: load_reference(root.path, task_id) for task_id in task_ids}
    functions = {ref.function_name: ref.function for ref in references.values()}
    facts = {}
    for task_id, ref in references.items():
        others = [name for name in functions if name != ref.function_name]
        seed = int.from_bytes(hashlib.sha256(task_id.encode()).digest()[:4], "big")
        facts[task_id] = {
            "script": Script(
                function=ref.function, function_name=ref.function_name, call=ref.call, inline=ref.inline, lookup=ref.lookup, kind=ref.kind,
                other=functions[others[seed % len(others)]] if others else "",
            )
        }
    return facts


def reference_skills(root: DataRoot, split: str) -> dict[str, Skill]:
    """Scenario id -> the reference function of its first task as a skill: the upper bound of what reuse can give."""
    skills = {}
    for scenario, task_ids in root.scenarios(split).items():
        origin = Origin(task_id=task_ids[0], turn=0, rollout="reference", position=1)
        extraction = extract([(0, load_reference(root.path, task_ids[0]).function)], origin)
        skills[scenario] = extraction.skills[-1]
    return skills


def describe(config: ConfigDict, loaded: Loaded) -> str:
    """One line: what runs on what."""
    size = sum(x.size for x in jax.tree.leaves(loaded.params))
    device = jax.devices()[0]
    return (
        f"policy {size / 1e6:.2f} M parameters ({loaded.cfg.dtype}), vocabulary {loaded.tokenizer.vocab_size}; "
        f"mesh {dict(loaded.mesh.shape)} of {device.platform}; {os.cpu_count()} cores; {config.world.max_open} worlds at once"
    )


def digest(config: ConfigDict) -> dict:
    """The resolved config as plain data, for checkpoints and reports."""
    return json.loads(config.to_json_best_effort())
