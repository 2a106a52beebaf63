"""A policy that plays reference solutions turn by turn, through the very same episode code as a model.

Used to collect verified demonstrations, to test the agent without a model, and as an upper bound in evaluations. It
reads its reference from the conversation's facts, decides from the prompt alone what is in the library, and has no ids.
"""

from __future__ import annotations

import dataclasses
import hashlib
import re
from collections.abc import Mapping

import numpy as np

from sage_jax.agent.code_blocks import first_block
from sage_jax.agent.policy import Conversation, Key, Response, Usage
from sage_jax.errors import ConfigError

MODES = ("inline", "function", "lookup_inline", "lookup_function", "repair_inline", "repair_function")


@dataclasses.dataclass(frozen=True)
class Script:
    """What a reference offers; built from a task's references outside this room.

    kind: "question" (the call's value is the answer) or "change". inline leaves the answer in `answer`.
    """

    function: str
    function_name: str
    call: str
    inline: str
    lookup: str | None
    kind: str
    other: str = ""  # the function of a task of another scenario, to be mistaken for this one's


class ScriptedPolicy:
    """Plays one of MODES per episode.

    Args:
      weights: mode -> relative frequency at a task without a usable skill. With one in the library the policy calls it
        with probability `reuse` and falls back to a mode without a function otherwise.
      reuse: in [0, 1].
      first_page: probability in [0, 1] that statements written for the task at hand read the first page of a list only. They
        pass where what is asked for happens to stand there; functions, written for later tasks too, read all pages.
      page_limit: entries of such a first page, at least 1.
      seed: of the choices; each depends on (seed, the key's path), never on order.
    """

    has_ids = False

    def __init__(self, weights: Mapping[str, float], *, reuse: float, seed: int, first_page: float = 0.0, page_limit: int = 5):
        unknown = set(weights) - set(MODES)
        if unknown:
            raise ConfigError(f"unknown demonstration mode {sorted(unknown)}; valid: {', '.join(MODES)}")
        if not sum(weights.values()) > 0 or min(weights.values()) < 0:
            raise ConfigError(f"demonstration weights must not be negative and not all zero, got {dict(weights)}")
        if page_limit < 1:
            raise ConfigError(f"collect.page_limit={page_limit} must be at least 1")
        self._modes = list(weights)
        total = sum(weights.values())
        self._p = np.array([weights[m] / total for m in self._modes])
        self._reuse, self._seed, self._first_page, self._page_limit = reuse, seed, first_page, page_limit
        self._plans: dict[str, list[str]] = {}

    async def respond(self, conversation: Conversation, key: Key) -> Response:
        plan = self._plans.get(conversation.uid)
        if plan is None:
            plan = self._plans[conversation.uid] = self._plan(conversation, key)
        text = plan.pop(0) if plan else _block("apis.supervisor.complete_task(status='fail')")
        conversation.add("assistant", text)
        return Response(text=text, finish="block", usage=Usage(generated=len(text.split())))

    def release(self, conversation: Conversation) -> None:
        self._plans.pop(conversation.uid, None)

    def _plan(self, conversation: Conversation, key: Key) -> list[str]:
        script: Script = conversation.facts["script"]
        name = "/".join(map(str, (self._seed, key.seed, *key.path[:-1])))
        rng = np.random.default_rng(int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big"))
        prompt = conversation.messages[-1]["content"]
        have = f"def {script.function_name}(" in prompt
        if have and rng.random() < self._reuse:
            conversation.labels["mode"] = "call"
            return [_block(_finish(script, script.call))]
        mode = str(rng.choice(self._modes, p=self._p))
        if have:  # a library that is ignored: no second definition of the same function
            mode = mode.replace("function", "inline")
        conversation.labels["mode"] = mode
        start, _, style = mode.rpartition("_")
        if style == "inline" and rng.random() < self._first_page:
            script = dataclasses.replace(script, inline=script.inline.replace("page_limit=20", f"page_limit={self._page_limit}"))
        code = (script.function + "\n\n" + _finish(script, script.call)) if style == "function" else _inline(script)
        plan = [_block(code)]
        if start == "lookup" and script.lookup:
            plan.insert(0, _block(script.lookup))
        elif start == "repair":
            plan.insert(0, f"```python\n{_break(script, style, rng)}\n```")
        return plan


def _finish(script: Script, call: str) -> str:
    if script.kind == "question":
        return f"apis.supervisor.complete_task(answer={call})"
    return f"{call}\napis.supervisor.complete_task()"


def _inline(script: Script) -> str:
    end = "apis.supervisor.complete_task(answer=answer)" if script.kind == "question" else "apis.supervisor.complete_task()"
    return f"{script.inline}\n{end}"


# Wrong keys and forgotten arguments.
_SLIPS = (
    ('["email"]', '["mail"]'),
    ('["access_token"]', '["token"]'),
    ('["phone_number"]', '["phone"]'),
    ('p["password"]', 'p["secret"]'),
    ("access_token=token, ", ""),
)


def _break(script: Script, style: str, rng: np.random.Generator) -> str:
    """A first try that fails as those of a weak policy do: a wrong key, a forgotten line, a bracket too few, a call of a name
    that is not defined, or another task's function. What is meant to raise before anything is changed in an app, and
    what the judge refuses all the same is not kept."""
    code = (script.function + "\n\n\n" + _finish(script, script.call)) if style == "function" else _inline(script)
    kinds = [_slip, _slip, _forget_line, _drop_bracket]
    if style == "function":
        kinds += [_misname, _misname, _other_function, _other_function]
    broken = kinds[int(rng.integers(len(kinds)))](script, code, rng)
    return broken if broken != code else f"profile\n{code}"


def _slip(script: Script, code: str, rng: np.random.Generator) -> str:
    fitting = [s for s in _SLIPS if s[0] in code]
    if not fitting:
        return code
    old, new = fitting[int(rng.integers(len(fitting)))]
    return code.replace(old, new, 1)


def _forget_line(script: Script, code: str, rng: np.random.Generator) -> str:
    lines = code.split("\n")
    places = [i for i, line in enumerate(lines) if re.match(r"\s*(\w+) = ", line) and line.count("(") == line.count(")")]
    if not places:
        return code
    del lines[places[int(rng.integers(len(places)))]]
    return "\n".join(lines)


def _drop_bracket(script: Script, code: str, rng: np.random.Generator) -> str:
    places = [m.start() for m in re.finditer(r"[)\]}]", code)]
    at = places[int(rng.integers(len(places)))]
    return code[:at] + code[at + 1 :]


def _misname(script: Script, code: str, rng: np.random.Generator) -> str:
    words = script.function_name.split("_")
    words.pop(int(rng.integers(len(words))))
    wrong = "_".join(words) or "solve"
    at = code.rindex(f"{script.function_name}(")  # the call, not the definition
    return code[:at] + wrong + code[at + len(script.function_name) :]


def _other_function(script: Script, code: str, rng: np.random.Generator) -> str:
    return script.other + "\n\n\n" + _finish(script, script.call) if script.other else code


def _block(code: str) -> str:
    text = f"```python\n{code}\n```"
    found, closed = first_block(text)
    if not closed or found is None or found.strip() != code.strip():
        raise ValueError(f"a reference does not survive as one Python block:\n{code}")
    return text
