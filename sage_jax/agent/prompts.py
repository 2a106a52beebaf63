"""The text that an agent sees: the system prompt, the task with its library, demonstrations, observations.

Owns the templates (agent/templates). Knows nothing of tokens beyond a counting function, and nothing of worlds beyond
`Task`. Two agents (`skill`, and `plain` as the baseline without a library) in two styles each (`short` for tiny
policies, `full` for large ones).
"""

from __future__ import annotations

import dataclasses
import functools
import json
import re
from collections.abc import Callable, Sequence
from importlib import resources

import jinja2

from sage_jax.agent.code_blocks import quote
from sage_jax.errors import ConfigError
from sage_jax.skills.record import Skill
from sage_jax.skills.render import STYLES as SKILL_STYLES
from sage_jax.skills.render import render
from sage_jax.world.types import Task

AGENTS = ("skill", "plain")
STYLES = ("short", "full")
NO_CODE = "No code available to execute."
# A printed address differs from run to run and tells the agent nothing; fixed text keeps runs repeatable.
_ADDRESS = re.compile(r"\b0x[0-9a-fA-F]{6,16}\b")


@dataclasses.dataclass(frozen=True)
class PromptSpec:
    """How prompts and observations are worded.

    skill_tokens: budget for the rendered library. observation_chars: an observation longer than this is cut in the
    middle. reminder: text appended to every observation; empty for none. demonstrations: number of static examples.
    """

    agent: str
    style: str
    demonstrations: int
    skill_tokens: int
    skill_style: str
    observation_chars: int
    reminder: str

    def __post_init__(self):
        if self.agent not in AGENTS:
            raise ConfigError(f"agent {self.agent!r} is unknown; valid: {', '.join(AGENTS)}")
        if self.style not in STYLES:
            raise ConfigError(f"prompt style {self.style!r} is unknown; valid: {', '.join(STYLES)}")
        if self.skill_style not in SKILL_STYLES:
            raise ConfigError(f"skill_style {self.skill_style!r} is unknown; valid: {', '.join(SKILL_STYLES)}")
        if self.skill_tokens < 0:
            raise ConfigError(f"skill_tokens={self.skill_tokens} must not be negative")
        available = len(_demonstrations(self.agent))
        if not 0 <= self.demonstrations <= available:
            raise ConfigError(f"demonstrations={self.demonstrations}: the {self.agent} agent has 0 to {available}")
        if self.observation_chars < 40:
            raise ConfigError(f"observation_chars={self.observation_chars} leaves no room for the cut marker; use >= 40")


def opening(task: Task, skills: Sequence[Skill], spec: PromptSpec, count: Callable[[str], int]) -> tuple[list[dict], tuple[Skill, ...]]:
    """The messages before the first response, and the skills that fitted the budget (only these are offered).

    Args:
      task: the task; its supervisor facts and allowed apps go into the prompt.
      skills: installed and working skills, in the library's order.
      spec: wording and budgets.
      count: text -> number of tokens, for the budget.
    """
    text, shown = "", ()
    if spec.agent == "skill" and skills:
        rendered = render(skills, budget=spec.skill_tokens, count=count, style=spec.skill_style)
        text, shown = rendered.text, tuple(rendered.shown)
    system = _template(f"{spec.agent}_{spec.style}").render(apps=task.app_descriptions)
    user = _template(f"task_{spec.style}").render(person=task.supervisor, skills=text, instruction=task.instruction)
    demonstrations = [m for d in _demonstrations(spec.agent)[: spec.demonstrations] for m in d]
    return [{"role": "system", "content": system}, *demonstrations, {"role": "user", "content": user}], shown


def observation(text: str, spec: PromptSpec) -> tuple[str, int]:
    """(what the agent reads, characters left out): addresses blanked, line ends at the end left off, the middle cut, the reminder appended."""
    text = _ADDRESS.sub("0x0", text).rstrip("\n")
    limit, dropped = spec.observation_chars, 0
    if len(text) > limit:
        # The head says what was printed, the tail what went wrong: keep both.
        head = limit * 2 // 3
        tail = limit - head
        dropped = len(text) - limit
        text = f"{text[:head]}\n[... {dropped} characters cut ...]\n{text[-tail:]}"
    if spec.style == "full":
        text = f"Output:\n{quote(text)}"
    return (f"{text}\n{spec.reminder}" if spec.reminder else text), dropped


def rough_tokens(text: str) -> int:
    """Words and punctuation marks: stands in for a token count where there is no tokenizer."""
    return len(re.findall(r"\w+|[^\w\s]", text))


@functools.cache
def _template(name: str) -> jinja2.Template:
    environment = jinja2.Environment(
        loader=jinja2.PackageLoader("sage_jax.agent"), undefined=jinja2.StrictUndefined, trim_blocks=True,
        autoescape=False, keep_trailing_newline=False,
    )
    return environment.get_template(f"{name}.jinja")


@functools.cache
def _demonstrations(agent: str) -> list[list[dict]]:
    text = resources.files("sage_jax.agent").joinpath("templates/demonstrations.json").read_text()
    return json.loads(text)[agent]
