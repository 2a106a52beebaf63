"""The policy that samples with our own engine: messages in, exact ids out.

Owns how a conversation becomes ids turn by turn. Ids, mask and log-probs of the record grow together; what was sampled
is never decoded and encoded again, and the next prompt is the ids so far plus the newly rendered messages.
"""

from __future__ import annotations

import copy
import dataclasses

from sage_jax.agent.code_blocks import fence_automaton
from sage_jax.agent.policy import Conversation, Key, Response, Usage
from sage_jax.agent.trajectory import TokenRecord
from sage_jax.errors import ConfigError, SamplingError
from sage_jax.model.chat import ChatRenderer
from sage_jax.sampling.engine import Engine
from sage_jax.sampling.request import Sampling

_FINISH = {"accept": "block", "stop_id": "end_of_turn", "length": "length"}


class JaxPolicy:
    """A `Policy` over an engine, which it does not own (closing it is the caller's).

    temperature 0 is greedy; top_k 0 and top_p 1 are off; max_new_tokens is the cap of one turn. Raises ConfigError for values
    outside their range.
    """

    has_ids = True

    def __init__(self, engine: Engine, tokenizer, *, temperature: float, top_k: int, top_p: float, max_new_tokens: int):
        self.engine = engine
        self.tokenizer = tokenizer
        self.sampling = self._sampling(temperature=temperature, top_k=top_k, top_p=top_p, max_new_tokens=max_new_tokens)
        self._renderer = ChatRenderer(tokenizer)
        self._live: set[str] = set()  # conversations whose ids the engine holds
        # Where the generation prompt has opened a think block, a response begins inside it: fences in it are not code.
        fences = fence_automaton()
        engine.use_automaton(dataclasses.replace(fences, start=fences.run(self._renderer.opened.encode())))

    def with_sampling(self, **changes) -> JaxPolicy:
        """A view of the same engine with other settings: temperature, top_k, top_p, max_new_tokens."""
        names = ("temperature", "top_k", "top_p", "max_new_tokens")
        unknown = set(changes) - set(names)
        if unknown:
            raise ConfigError(f"unknown sampling settings {sorted(unknown)}; valid: {', '.join(names)}")
        view = copy.copy(self)  # of the same live conversations
        view.sampling = self._sampling(**{n: changes.get(n, getattr(self.sampling, n)) for n in names})
        return view

    def _sampling(self, **settings) -> Sampling:
        sampling = Sampling(**settings, stop_ids=tuple(sorted(self.tokenizer.stop_ids)), stop_at_accept=True)
        try:
            sampling.check()
        except SamplingError as error:
            raise ConfigError(str(error)) from error
        return sampling

    async def respond(self, conversation: Conversation, key: Key) -> Response:
        """Samples one turn; see `Policy`. A think block that the template has opened already is opened in the text too.

        With finish "context" nothing is sampled and conversation and record stay as they are. A conversation that the engine does
        not hold (any more) is prefilled from its record.

        Raises:
          SamplingError: the request is impossible; InfrastructureError: the engine stopped. Both leave the record as it was.
        """
        record = conversation.tokens or TokenRecord()
        new = self._render(conversation, record)
        prompt = len(record.ids) + len(new)
        if prompt + 1 > self.engine.context:
            return Response(text="", finish="context", ids=(), logprobs=(), usage=Usage(prompt=prompt))
        live = conversation.uid in self._live
        if not live:
            self.engine.release(conversation.uid)  # what an earlier conversation of this name left
        ids, after = (new, len(record.ids)) if live else (record.ids + new, 0)
        result = await self.engine.sample(conversation.uid, ids, self.sampling, key, after=after)
        self._live.add(conversation.uid)

        record.append(new, mask=0)
        record.turn_starts.append(len(record.ids))
        record.append(result.ids, mask=1, logprobs=result.logprobs)
        version = int(result.versions[0])
        record.versions.append(version)
        conversation.tokens = record
        finish = _FINISH[result.finish]
        text = self._renderer.opened + self._text(result.ids[:-1] if finish == "end_of_turn" else result.ids)
        conversation.add("assistant", text)
        conversation.rendered = len(conversation.messages)
        return Response(
            text=text, finish=finish, ids=result.ids, logprobs=tuple(map(float, result.logprobs)), version=version,
            usage=Usage(prompt=prompt, cached=result.cached, generated=len(result.ids)),
        )  # fmt: skip

    def release(self, conversation: Conversation) -> None:
        """Frees the conversation's slot; may be called more than once."""
        self._live.discard(conversation.uid)
        self.engine.release(conversation.uid)

    def _render(self, conversation: Conversation, record: TokenRecord) -> list[int]:
        """Template ids that close the last response, then the messages since, then the opening of the next response."""
        ids: list[int] = []
        if record.turn_starts:
            ids += self._renderer.close_turn(record.ids[-1] == self.tokenizer.end_of_turn_id)
        return ids + self._renderer.open_turn(conversation.messages[conversation.rendered :], first=not record.ids)

    def _text(self, ids) -> str:
        """Text of the sampled bytes as the stop automaton saw them; bytes that are no UTF-8 become U+FFFD."""
        return b"".join(self.tokenizer.token_bytes(i) for i in ids).decode("utf-8", errors="replace")
