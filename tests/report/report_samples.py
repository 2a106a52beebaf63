"""Episodes and metrics as a run would leave them, for the report's tests."""

import math
import random

from sage_jax.agent.trajectory import End, Episode, Turn
from sage_jax.report import tables
from sage_jax.skills.extract import extract
from sage_jax.skills.record import Origin
from sage_jax.world.types import InstallVerdict, Judgement

EVIL = "</script><script>document.title='owned'</script><!-- <img src=x onerror=\"document.title='owned'\">"
RUN = 8  # scenarios an arm
CODE = '''def top_song(playlist: str, n: int = 1) -> list[str]:
    """Titles of the n most liked songs of a playlist."""
    # like counts are integers
    songs = apis.music.show_playlist(title=playlist)["songs"]
    songs.sort(key=lambda s: -s["like_count"])
    return [s["title"] for s in songs[:n]]
'''


def sample_episodes(evil=False):
    """{"base", "SFT", "SAGE"} -> RUN scenarios of three tasks each."""
    draw = random.Random(0)
    made = {}
    for arm, luck in (("base", 0.0), ("SFT", 0.5), ("SAGE", 0.85)):
        made[arm] = []
        for n in range(RUN):
            name, rollout = f"{n:07x}", f"eval/test_normal/run0/chain{n}"
            skill = extract([(0, CODE)], Origin(f"{name}_1", 0, rollout, 1), created=0.0).skills[0]
            for k in (1, 2, 3):
                solved = draw.random() < luck
                made[arm].append(_episode(name, k, rollout, solved, skill, arm != "base", evil))
    return made


def _episode(name, k, rollout, solved, skill, skilled, evil):
    first, later = skilled and k == 1, skilled and k > 1
    code = (CODE if first else "") + f'answer = top_song("Morning {k}")\napis.supervisor.complete_task(answer=answer)\n'
    note = EVIL if evil else "Message: Execution successful."
    turns = [
        Turn("Let me look.\n```python\nprint(apis.api_docs.show_app_descriptions())\n```", "print(apis.api_docs.show_app_descriptions())", '[{"name": "music", "description": "..."}]', False, False, (), "block", 21, seconds_policy=0.4, seconds_world=0.02),
        Turn(f"```python\n{code}```", code, note if solved else f"NameError: top_song\n{note}", not solved, solved, (skill.id,) if later else (), "block", 96, dropped=0 if solved else 120, seconds_policy=1.2, seconds_world=0.05),
    ]
    instruction = f"What is the most liked song of my playlist Morning {k}? " + (EVIL if evil else "")
    messages = [{"role": "system", "content": "You write Python against app APIs."}, {"role": "user", "content": instruction}]
    for t in turns:
        messages += [{"role": "assistant", "content": t.response}, {"role": "user", "content": t.observation}]
    judged = Judgement(3 if solved else 1, 3, solved, solved, ("the answer was given",) + ("no model changed", "the answer is right") * solved, () if solved else ("the answer is right", "the task was completed " + EVIL * evil))
    end = End.COMPLETED if solved else End.MAX_TURNS
    return Episode(
        f"{name}_{k}", name, "test_normal", 1 + int(name, 16) % 3, instruction, rollout, k, messages, turns, end, judged, (skill,) if later else (),
        (InstallVerdict(skill.id, True),) if later else (), (skill,) if first else (), None, seconds=2.5,
    )


def sample_rows(episodes):
    return [tables.score([group], arm) for arm, group in episodes.items()]


def sample_steps(n=60):
    """Metric rows of n steps."""
    draw = random.Random(1)
    rows = []
    for step in range(n):
        rise = 1 - math.exp(-step / 20)
        row = {
            "step": step, "reward/mean": 0.4 + rise + draw.gauss(0, 0.08), "reward/outcome_mean": 0.4 + 0.4 * rise + draw.gauss(0, 0.04),
            "success/mean": 0.3 + 0.5 * rise + draw.gauss(0, 0.04), "skill/called_share": 0.2 + 0.6 * rise + draw.gauss(0, 0.03),
            "skill/paid_share": 0.1 + 0.5 * rise + draw.gauss(0, 0.03), "turns/mean": 4 - 2 * rise + draw.gauss(0, 0.1), "tokens/generated_mean": 300 - 120 * rise + draw.gauss(0, 8),
            "update/entropy_nats": 0.3 * math.exp(-step / 30) + 0.05, "update/gap_mean_nats": 1e-5 * (1 + draw.random()), "update/gap_p99_nats": 1e-4 * (1 + draw.random()), "update/gap_max_nats": 1e-3 * (1 + draw.random()),
        }
        if step % 10 == 0:
            row |= {"eval_dev/tgc": 0.4 + 0.4 * rise, "eval_dev/sgc": 0.2 + 0.5 * rise, "eval_dev/skill_use_share": 0.3 + 0.5 * rise}
        rows.append(row)
    return rows
