"""The slot engine: many conversations, a fixed number of cache rows, one thread that extends and decodes.

Owns the cache, which conversation holds which slot, and the order of device calls. A conversation keeps its slot and its
cached keys between its requests until `release`; conversations beyond the slots wait in order of arrival. The last id
of a conversation is never in the cache: it is fed with what follows (`kernels.py`).

What a request gets depends on its own ids, settings and key alone (bit for bit in float32 on one machine): chunks of its
prompt come from its own length, decode always runs all slots, noise is a function of the key and the token's index.

Not here: texts and messages (the agent's `JaxPolicy`), eviction of idle slots, caches that grow.
"""

from __future__ import annotations

import asyncio
import collections
import concurrent.futures
import contextlib
import functools
import threading
import time
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from sage_jax.errors import ConfigError, InfrastructureError, SamplingError
from sage_jax.model.config import ModelConfig
from sage_jax.model.qwen import make_cache
from sage_jax.model.rules import on
from sage_jax.model.sharding import abstract_params
from sage_jax.sampling import kernels
from sage_jax.sampling.automaton import ByteAutomaton, compile_for
from sage_jax.sampling.conversation import Conversation, Job, device_rows, prompt_chunks
from sage_jax.sampling.request import NoiseKey, Result, Sampling, checked_ids, key_data
from sage_jax.sampling.stats import Stats
from sage_jax.sampling.weights import cache_sharding, check_params, named, slot_parts

GATHER_S = 0.002  # an idle engine waits this long for the rest of a burst before it starts with a single row


class Engine:
    """See the module. All methods may be called from any thread.

    Args:
      graphdef, cfg: of the policy; its weights come with `set_params`.
      mesh: where weights and cache live; None for the default device.
      tokenizer: `vocab_size` real ids (those at or above it are banned) and `token_bytes` for automata.
      slots: conversations that can be live at once (B). context: cache positions of each, sampled ids included (S).
      extend_buckets: lengths to which the chunks of a prompt are padded (`prompt_chunks`).
      decode_chunk: tokens per row between two looks at the queue.
    """

    def __init__(
        self,
        graphdef: nnx.GraphDef,
        cfg: ModelConfig,
        mesh: Mesh | None,
        tokenizer,
        *,
        slots: int,
        context: int,
        extend_buckets: Sequence[int],
        decode_chunk: int,
    ):
        for name, value in (("slots", slots), ("context", context - 1), ("decode_chunk", decode_chunk), ("extend_buckets", len(extend_buckets))):
            if value < 1:
                raise ConfigError(f"{name} is too small: slots, decode_chunk and extend_buckets need at least 1, context at least 2")
        if min(extend_buckets) < 1:
            raise ConfigError(f"extend_buckets={tuple(extend_buckets)} must be at least 1")
        if tokenizer.vocab_size > cfg.vocab_size:
            raise ConfigError(f"the tokenizer has {tokenizer.vocab_size} ids and the policy only {cfg.vocab_size} embedding rows")
        self.slots, self.context, self.decode_chunk = slots, context, decode_chunk
        self.buckets = tuple(sorted({min(b, context) for b in extend_buckets}))
        self.stats = Stats(slots)
        self._cfg, self._mesh, self._tokenizer = cfg, mesh, tokenizer
        self._expected = named(abstract_params(cfg)[1])
        self._shardings: dict | None = None  # of the first weights, by name
        sharding = cache_sharding(cfg, mesh, slots, context)
        self._cache = jax.jit(lambda: make_cache(cfg, slots, context), out_shardings=sharding)()
        self._kernels = kernels.build(
            graphdef, chunk=decode_chunk, vocab=tokenizer.vocab_size, cache_sharding=sharding, parts=slot_parts(mesh)
        )
        self._on = functools.partial(on, mesh) if mesh is not None else lambda run: run
        self._warm_shapes: int | None = None
        self._automaton: ByteAutomaton | None = None
        self.use_automaton(None)

        self._wake = threading.Condition()
        self._inbox: collections.deque[Callable[[], None]] = collections.deque()
        self._closed = False
        self._error: BaseException | None = None
        self._open_futures: set[concurrent.futures.Future] = set()
        # Below: the engine thread's own.
        self._params, self._version = None, 0
        self._conversations: dict[str, Conversation] = {}
        self._waiting: collections.deque[Conversation] = collections.deque()
        self._free = list(range(slots))[::-1]
        self._prompts: dict[tuple[int, ...], int] = {}  # first prompt -> a row that still holds its keys
        self._thread = threading.Thread(target=self._run, name="sampler", daemon=True)
        self._thread.start()

    # ---- called from outside

    def use_automaton(self, automaton: ByteAutomaton | None) -> None:
        """The stop condition of requests with `stop_at_accept`; once for all of them.

        Setting the same one again does nothing; another one while requests may be under way raises ConfigError.
        """
        if self._automaton is not None:
            same = automaton is not None and np.array_equal(self._automaton.transition, automaton.transition)
            if same and (self._automaton.start, self._automaton.accept) == (automaton.start, automaton.accept):
                return
            raise ConfigError("the engine has another automaton already: one engine follows one stop condition")
        self._automaton = automaton
        if automaton is None:
            table, self._start, accept = np.zeros((0, self._cfg.vocab_size), np.int16), 0, -1
        else:
            table = compile_for(automaton, self._tokenizer, self._cfg.vocab_size)
            self._start, accept = automaton.start, automaton.accept
        self._no_automaton = len(table)
        none = np.full((1, table.shape[1]), len(table), np.int16)  # a state that no token leaves
        self._table, self._accept = jnp.asarray(np.concatenate([table, none])), np.int32(accept)

    def set_params(self, params: nnx.State, version: int) -> None:
        """Takes new weights between two chunks and returns once they are in use; nothing is copied.

        Keys that live conversations have in the cache stay those of the weights that made them. Raises ConfigError with
        both sides if tree, shape, dtype or (against the first weights given) sharding differ.
        """
        self._shardings = check_params(params, self._expected, self._shardings)

        def take():
            self._params, self._version = params, int(version)
            self._prompts.clear()

        self._call(take).result()

    def submit(self, uid: str, ids: Sequence[int], sampling: Sampling, key: NoiseKey, *, after: int | None = None) -> concurrent.futures.Future:
        """Continues conversation `uid` with the new `ids` and samples; a future of `Result`.

        `ids` follow all ids given and sampled before in this conversation; `after`, if given, is how many the caller
        thinks these are, and another number in the engine is a SamplingError. The future raises SamplingError for a request
        that cannot be served (other requests go on, and the conversation stays as it was) and InfrastructureError if the
        engine stopped. Cancelling it takes the request back as if it had not been made.
        """
        return self._request(uid, ids, sampling, key, after).future

    async def sample(self, uid: str, ids: Sequence[int], sampling: Sampling, key: NoiseKey, *, after: int | None = None) -> Result:
        """`submit` for asyncio; cancelling the awaiting task takes the request back, even if it has just been answered."""
        job = self._request(uid, ids, sampling, key, after)
        try:
            return await asyncio.wrap_future(job.future)
        except asyncio.CancelledError:
            if not job.future.cancel():  # answered, and nobody will see the answer
                with contextlib.suppress(InfrastructureError):
                    self._post(lambda: self._undo(uid, job))
            raise

    def release(self, uid: str) -> None:
        """Ends a conversation and frees its slot; a request still open is cancelled. Unknown or ended ones are no error."""
        with contextlib.suppress(InfrastructureError):  # a stopped engine holds no slots
            self._post(lambda: self._release(uid))

    def warm_up(self, progress: Callable[[int, int, str], None] | None = None) -> None:
        """Compiles every shape there is. progress(done, total, what) is called before each and at the end."""

        def compile_all():
            total = len(self.buckets) + 2
            for done, bucket in enumerate(self.buckets):
                if progress:
                    progress(done, total, f"extend {bucket}")
                self._cache = self._on(self._kernels.extend)(self._cache, self._params, np.zeros(bucket, np.int32), np.int32(0), np.int32(0), np.int32(0))
            if progress:
                progress(total - 2, total, f"decode {self.decode_chunk}")
            self._decode([])
            if progress:
                progress(total - 1, total, "copy")
            self._copy(0, 0)
            jax.block_until_ready(self._cache)
            self._warm_shapes = self._kernels.compiled_shapes()
            if progress:
                progress(total, total, "done")

        self._need_params()
        self._call(compile_all).result()

    @property
    def compiled_shapes(self) -> int:
        """Programs compiled so far; at most len(buckets) + 2 unless something retraced."""
        return self._kernels.compiled_shapes()

    @property
    def retraces(self) -> int:
        """Programs compiled beyond the known set: one an extend bucket, decode, copy; after `warm_up`, any at all."""
        known = len(self.buckets) + 2 if self._warm_shapes is None else self._warm_shapes
        return max(0, self.compiled_shapes - known)

    def close(self) -> None:
        """Stops the thread and waits for it; open requests fail with InfrastructureError. May be called twice."""
        with self._wake:
            self._closed = True
            self._wake.notify()
        self._thread.join()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_) -> None:
        self.close()

    # ---- between the threads

    def _need_params(self) -> None:
        if self._shardings is None:
            raise ConfigError("the engine has no weights yet: call set_params first")

    def _request(self, uid: str, ids: Sequence[int], sampling: Sampling, key: NoiseKey, after: int | None) -> Job:
        job = Job([], sampling, key_data(key.seed, key.path), concurrent.futures.Future(), time.monotonic())
        try:
            sampling.check()
            if sampling.stop_at_accept and self._automaton is None:
                raise SamplingError("stop_at_accept without an automaton: call use_automaton first")
            job.ids = checked_ids(ids, self._tokenizer.vocab_size)
        except SamplingError as error:
            job.future.set_exception(error)
        else:
            self._post(lambda: self._take(uid, job, after), job.future)
        return job

    def _post(self, call: Callable[[], None], future: concurrent.futures.Future | None = None) -> None:
        with self._wake:
            if self._closed or self._error is not None:
                error = InfrastructureError(f"the sampler has stopped: {self._error or 'closed'}")
                if future is None:
                    raise error
                future.set_exception(error)
                return
            if future is not None:
                self._open_futures.add(future)
            self._inbox.append(call)
            self._wake.notify()

    def _call(self, call: Callable[[], None]) -> concurrent.futures.Future:
        """Runs `call` on the engine thread between two chunks."""
        future = concurrent.futures.Future()

        def run():
            try:
                call()
            except Exception as error:  # the caller's; what it broke of the engine shows at the next device call
                self._deliver(future, error)
            else:
                self._deliver(future, None)

        self._post(run, future)
        return future

    def _deliver(self, future: concurrent.futures.Future, value) -> bool:
        """False if the future was cancelled a moment ago."""
        self._open_futures.discard(future)
        try:
            future.set_exception(value) if isinstance(value, BaseException) else future.set_result(value)
        except concurrent.futures.InvalidStateError:
            return False
        return True

    def _run(self) -> None:
        try:
            with jax.set_mesh(self._mesh) if self._mesh is not None else contextlib.nullcontext():
                while self._step():
                    pass
        except BaseException as error:
            self._error = error
        finally:
            with self._wake:
                self._closed = True
                self._inbox.clear()
            stopped = InfrastructureError(f"the sampler has stopped: {type(self._error).__name__}: {self._error}" if self._error else "the sampler was closed")
            stopped.__cause__ = self._error
            for future in list(self._open_futures):
                self._deliver(future, stopped)
            self._cache = self._params = None

    # ---- the engine thread

    def _step(self) -> bool:
        """One round: take what came in, extend, decode a chunk, deliver. False once closed."""
        idle = not self._jobs()
        with self._wake:
            while idle and not self._inbox and not self._closed:
                self._wake.wait()
            if self._closed:
                return False
        if idle:
            time.sleep(GATHER_S)
        with self._wake:
            calls, self._inbox = self._inbox, collections.deque()
        started = time.monotonic()
        for call in calls:
            call()
        self._drop_cancelled()
        self._admit()
        for conversation in self._jobs():
            if not conversation.job.extended:
                self._extend(conversation)
        rows = self._jobs()
        if rows:
            self._collect(rows, self._decode(rows))
        self.stats.busy_s += time.monotonic() - started
        self.stats.waiting = len(self._waiting)
        return True

    def _jobs(self) -> list[Conversation]:
        return [c for c in self._conversations.values() if c.slot is not None and c.job is not None]

    def _take(self, uid: str, job: Job, after: int | None) -> None:
        error = self._place(uid, job, after)
        if error:
            self._deliver(job.future, SamplingError(error))

    def _place(self, uid: str, job: Job, after: int | None) -> str:
        """Gives a request to its conversation; returns why it cannot be served, or nothing."""
        self._drop_cancelled()  # the request before may have been cancelled to make room for this one
        conversation = self._conversations.get(uid) or Conversation(uid)
        if self._params is None:
            return "the engine has no weights yet: call set_params first"
        if conversation.job is not None:
            return f"conversation {uid!r} has an open request: one at a time"
        held = conversation.length + len(conversation.tail)
        if after is not None and after != held:
            return f"conversation {uid!r} holds {held} ids, not {after} as the request says"
        job.prompt = held + len(job.ids)
        if job.prompt == 0:
            return "empty prompt: at least one id is needed"
        if job.prompt + 1 > self.context:
            return f"a prompt of {job.prompt} ids and one new token do not fit the context of {self.context}"
        job.before = (conversation.length, list(conversation.tail))
        job.cached = conversation.length
        job.limit = min(job.sampling.max_new_tokens, self.context - job.prompt)
        job.state = self._start if job.sampling.stop_at_accept else self._no_automaton
        conversation.job = job
        if uid not in self._conversations:
            self._conversations[uid] = conversation
            self._waiting.append(conversation)
        return ""

    def _release(self, uid: str) -> None:
        conversation = self._conversations.pop(uid, None)
        if conversation is None:
            return
        if conversation.job is not None:
            conversation.job.future.cancel()
            self._open_futures.discard(conversation.job.future)
        if conversation.slot is None:
            self._waiting.remove(conversation)
        else:
            self._free.append(conversation.slot)

    def _drop_cancelled(self) -> None:
        for conversation in list(self._conversations.values()):
            job = conversation.job
            if job is None or not job.future.cancelled():
                continue
            self._open_futures.discard(job.future)
            self._take_back(conversation, job)

    def _undo(self, uid: str, job: Job) -> None:
        conversation = self._conversations.get(uid)
        if conversation is not None and conversation.last is job:
            self._take_back(conversation, job)

    def _take_back(self, conversation: Conversation, job: Job) -> None:
        """As if the request had not been made; keys beyond `length` are never seen and will be overwritten."""
        conversation.length, conversation.tail = job.before
        conversation.job = conversation.last = None
        if conversation.slot is None or conversation.length == 0:  # nothing of it was ever answered
            self._release(conversation.uid)

    def _admit(self) -> None:
        while self._waiting and self._free:
            conversation = self._waiting.popleft()
            conversation.slot = self._free.pop()
            # The row is about to be overwritten: nobody may copy from it any more.
            self._prompts = {ids: row for ids, row in self._prompts.items() if row != conversation.slot}
            self.stats.wait_s += time.monotonic() - conversation.job.submitted

    def _extend(self, conversation: Conversation) -> None:
        """Brings all known ids but the last into the cache."""
        job = conversation.job
        known = conversation.tail + job.ids
        feed, conversation.tail = known[:-1], known[-1:]
        job.extended = True
        first = conversation.length == 0
        shared = self._prompts.get(tuple(feed)) if first else None
        if shared is not None:  # same ids through the same shapes: a copy is what extending would give, bit for bit
            self._copy(shared, conversation.slot)
            job.cached = len(feed)
            self.stats.shared_tokens += len(feed)
        else:
            start = 0
            for count, bucket in prompt_chunks(len(feed), self.buckets):
                ids = np.zeros(bucket, np.int32)
                ids[:count] = feed[start : start + count]
                position = np.int32(conversation.length + start)
                self._cache = self._on(self._kernels.extend)(self._cache, self._params, ids, np.int32(conversation.slot), position, np.int32(count))
                start += count
            self.stats.prefilled_tokens += len(feed)
            if first and feed:
                self._prompts[tuple(feed)] = conversation.slot
        conversation.length += len(feed)

    def _copy(self, source: int, target: int) -> None:
        self._cache = self._on(self._kernels.copy)(self._cache, np.int32(source), np.int32(target))

    def _decode(self, conversations: list[Conversation]) -> kernels.Chunk:
        """One chunk for all slots; host arrays."""
        rows = device_rows(conversations, self.slots, idle_state=self._no_automaton)
        self._cache, chunk = self._on(self._kernels.decode)(self._cache, self._params, self._table, self._accept, rows, np.int32(self.decode_chunk))
        return jax.device_get(chunk)

    def _collect(self, conversations: list[Conversation], chunk: kernels.Chunk) -> None:
        for c in conversations:
            job, i = c.job, c.slot
            count = int(chunk.index[i]) - len(job.out)
            if count < 1:
                raise AssertionError(f"an active row sampled nothing in {int(chunk.steps)} steps")
            job.out.extend(chunk.ids[i, :count].tolist())
            job.logprobs.append(chunk.logprobs[i, :count])
            job.versions.extend([self._version] * count)
            job.state = int(chunk.state[i])
            c.length, c.tail = c.length + count, [job.out[-1]]
            self.stats.sampled_tokens += count
            if chunk.finish[i]:
                c.job, c.last = None, job
                if not self._deliver(job.future, job.result(kernels.FINISH[chunk.finish[i]])):
                    self._take_back(c, job)
                self.stats.requests += 1
        self.stats.decode_steps += int(chunk.steps)
