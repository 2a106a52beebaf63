"""The executor pool with the real engine: results and flags, limits, deaths, skills, folders."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import signal
import threading
import time

import pytest

from sage_jax.errors import ConfigError, DataRootError, WorkerDied, WorldOpenError
from sage_jax.world import server
from sage_jax.world.miniworld.references import load_reference
from sage_jax.world.pool import Limits, WorldPool
from sage_jax.world.server import _runs
from sage_jax.world.watch import descendants

LIMITS = Limits(output_chars=2000, memory_mb=400)


@dataclasses.dataclass(frozen=True)
class Skill:
    id: str
    name: str
    code: str


class Bench:
    """A pool whose event loop runs in a thread that is not the main one."""

    def __init__(self, root, outputs):
        self.loop = asyncio.new_event_loop()
        threading.Thread(target=self.loop.run_forever, daemon=True).start()
        self.root = root
        self.tasks = root.task_ids("train")
        self.pool = self.run(self._make(outputs))

    async def _make(self, outputs):
        pool = WorldPool(self.root.path, limits=LIMITS, outputs=outputs, max_open=16)
        await pool.start()
        return pool

    def run(self, coroutine):
        return asyncio.run_coroutine_threadsafe(coroutine, self.loop).result(900)

    def in_world(self, steps, task=0):
        """Runs `steps(world)` in a new world."""

        async def whole():
            world = await self.pool.open(self.tasks[task], experiment="unused", keep=False)
            try:
                return await steps(world)
            finally:
                await world.close()

        return self.run(whole())

    def execute(self, *codes, task=0):
        async def steps(world):
            return [await world.execute(code) for code in codes]

        return self.in_world(steps, task)

    def healthy(self):
        assert self.execute("print(1 + 1)")[0].text == "2\n"


@pytest.fixture
def short(bench):
    """Short limits for the tests that run into them; the others must not fail on a busy machine."""
    bench.pool.limits = dataclasses.replace(LIMITS, execute_s=1.5, grace_s=1.5, install_s=1.5)
    yield
    bench.pool.limits = LIMITS


@pytest.fixture(scope="module")
def bench(mini_root, tmp_path_factory):
    bench = Bench(mini_root, tmp_path_factory.mktemp("kept"))
    scratch = bench.pool._outputs.scratch
    yield bench
    pid = bench.pool.server_pid
    bench.run(bench.pool.close())
    bench.run(bench.pool.close())
    assert not scratch.exists()
    assert not os.path.exists(f"/proc/{pid}")


# Results and flags.


def test_result_of_a_step(bench):
    printed, silent, comment = bench.execute("print('hi')", "x = 1", "# nothing")
    assert (printed.text, printed.failed, printed.dropped, printed.limit) == ("hi\n", False, 0, None)
    assert silent.text == "Execution successful." and not silent.failed
    assert not comment.failed
    assert printed.seconds > 0, "measured in the trainer, where the clock runs"


@pytest.mark.parametrize(
    "code",
    [
        "1 / 0",
        "def f(:",
        "import subprocess",
        "import os\nos.kill(1, 0)",
        "raise SystemExit(0)",
        "raise KeyboardInterrupt",
        "raise BaseException('x')",
        "next(c for c in BaseException.__subclasses__() if c.__name__ == 'SystemExit')  and None\n"
        "raise next(c for c in BaseException.__subclasses__() if c.__name__ == 'SystemExit')(3)",
        "apis.spotify.no_such_api()",
        "x = '\0'",
        "x = '\ud800",
        "!ls",
        "def f():\n    return f()\nf()",
    ],
)
def test_failed_is_a_flag(bench, code):
    failed, after = bench.execute(code, "print('alive')")
    assert failed.failed and not failed.world_lost
    assert failed.text.startswith("Execution failed. Traceback:")
    assert after.text == "alive\n" and not after.failed


def test_failed_is_not_read_from_the_text(bench):
    (step,) = bench.execute("print('Execution failed. Traceback:')")
    assert not step.failed


def test_state_persists_between_steps(bench):
    steps = bench.execute(
        "import math\ndef a(): return math.pi\ndef b(): return a()",
        "print(b())",
        "s = [1, 2]; k = 2",
        "print([x * k for x in s])",
    )
    assert [step.text for step in steps][1::2] == ["3.141592653589793\n", "[2, 4]\n"]


def test_clock_of_the_task_in_the_world_and_of_the_machine_outside(bench):
    (step,) = bench.execute("import datetime, time\nprint(datetime.datetime.now().year, time.time())")
    assert step.text.startswith("2023 ")
    assert time.time() > 1.7e9


def test_output_is_cut_with_a_marker_and_encodes(bench):
    long, odd = bench.execute("print('a' * 5000 + 'b' * 5000)", "print('\\ud800', '\\u00e9\\U0001F600', 'x\\0y')")
    assert long.dropped == 10001 - 2000
    assert long.text.startswith("aaa") and long.text.endswith("bbb\n") and "8001 characters dropped" in long.text
    assert odd.text == "\\ud800 \u00e9\U0001f600 x\0y\n"
    odd.text.encode()


def test_same_draws_in_every_world(bench):
    code = "import random\nprint(random.random(), list({'a', 'b', 'c', 'd'}))"
    assert bench.execute(code)[0].text == bench.execute(code)[0].text


def test_process_of_a_world(bench):
    code = (
        "import builtins\nsys = builtins.__import__('sys')\nimport os\n"
        "print('jax' in sys.modules, sorted(k for k in os.environ if 'KEY' in k or 'TOKEN' in k), os.getpid() == os.getsid(0),"
        " len(os.environ) < 20)"
    )
    assert bench.execute(code)[0].text == "False [] True True\n"
    with open(f"/proc/{bench.pool.server_pid}/maps") as maps:
        assert "jaxlib" not in maps.read()


# Solving and scoring.


def test_completed_and_judged(bench):
    async def steps(world):
        reference = load_reference(bench.root.path, world.task_id)
        before = await world.completed()
        nothing = await world.evaluate()
        step = await world.execute(reference.function_solution)
        return before, nothing, step, await world.completed(), await world.evaluate()

    before, nothing, step, completed, judgement = bench.in_world(steps)
    assert not before and not nothing.success and not nothing.completed and nothing.total > 0
    assert step.completed and completed and not step.failed
    assert judgement.success and judgement.completed and judgement.passed == judgement.total == len(judgement.passes)


def test_completion_is_not_the_word_of_the_world(bench):
    async def steps(world):
        forged = (
            "gc = __import__('gc')\n"
            "judge = __import__('sys').modules['sage_jax.world.judge']\n"
            "judge.is_completed = lambda database: True"
        )
        step = await world.execute(forged)
        return step, await world.evaluate()

    step, judgement = bench.in_world(steps)
    assert not step.completed, "completion is looked up by the process that holds the world"
    assert not judgement.completed and not judgement.success


def test_sixteen_at_once_equal_one_by_one(bench):
    async def episode(task_id):
        world = await bench.pool.open(task_id, experiment="unused", keep=False)
        try:
            reference = load_reference(bench.root.path, task_id)
            texts = [(await world.execute(code)).text for code in (reference.lookup, reference.inline_solution)]
            return texts, await world.evaluate()
        finally:
            await world.close()

    async def together(task_ids):
        return await asyncio.gather(*map(episode, task_ids))

    task_ids = (bench.tasks * 4)[:16]
    at_once = bench.run(together(task_ids))
    for task_id, found in list(zip(task_ids, at_once))[:4]:
        assert found == bench.run(episode(task_id))
    assert all(judgement.success for _, judgement in at_once)


# Limits: the agent's doing.


@pytest.mark.parametrize("code", ["while True: pass", "import re\nre.match('(a+)+$', 'a' * 40 + 'b')"])
def test_time_limit_interrupts_and_the_world_lives(bench, short, code):
    step, after = bench.execute("y = 5\n" + code, "print(y)")
    assert step.limit == "time" and not step.world_lost
    assert step.failed and step.seconds > 1.4
    assert after.text == "5\n"


@pytest.fixture
def shortest(bench):
    bench.pool.limits = dataclasses.replace(LIMITS, execute_s=0.2, grace_s=8.0)
    yield
    bench.pool.limits = LIMITS


def test_time_limit_in_the_middle_of_api_calls(bench, shortest):
    """The late answer to an interrupted call is not taken for anything else."""
    loop = "requester.request_tracker.max_num_requests = None\nn = 0\nwhile True:\n    apis.supervisor.show_profile()\n    n += 1"
    found = bench.execute(*(loop, "print(n > 0, apis.supervisor.show_profile()['sex'] != '')") * 10)
    for cut, after in zip(found[::2], found[1::2]):
        assert cut.failed and cut.limit == "time" and not cut.world_lost
        assert after.text == "True True\n"


def test_threads_that_call_apis_in_and_after_a_step(bench):
    code = (
        "requester.request_tracker.max_num_requests = None\nimport time\nfound = []\n"
        "def f(n):\n    for _ in range(n): found.append(apis.supervisor.show_profile()['sex'])\n"
        "threads = [__import__('threading').Thread(target=f, args=(n,), daemon=True) for n in (20, 20, 100000)]\n"
        "for t in threads: t.start()\nfor t in threads[:2]: t.join()"
    )
    first, *more = bench.execute(code, *["print(apis.supervisor.show_profile()['sex'] == found[-1], len(set(found)))"] * 5)
    assert not first.failed, first.text
    assert [step.text for step in more] == ["True 1\n"] * 5


def test_what_an_app_raises_is_raised_inside_the_code(bench):
    raises = "apis.spotify.show_song(song_id=10**20)"
    failed, caught, after = bench.execute(raises, f"try:\n    {raises}\nexcept OverflowError as e: print('caught', e)", "print(apis.supervisor.show_profile()['sex'] != '')")
    assert failed.failed and not failed.world_lost and failed.text.rstrip().endswith("OverflowError: Python int too large to convert to SQLite INTEGER")
    assert caught.text.startswith("caught Python int") and after.text == "True\n"


def test_memory_that_is_taken_between_steps(bench):
    left = "posix = __import__('posix')\nfor _ in range(2):\n    if posix.fork() == 0:\n        __import__('select').select([], [], [], 0.3)\n        x = bytearray(300 * 10**6)\n        while True: __import__('select').select([], [], [], 1)"

    async def steps(world):
        first = await world.execute(left)
        for _ in range(100):
            await asyncio.sleep(0.1)
            if not descendants(world.pid)[1:]:
                break
        return first, await world.execute("print(1)")

    first, second = bench.in_world(steps)
    assert not first.failed
    assert second.world_lost and second.limit == "memory"
    bench.healthy()


@pytest.mark.parametrize(
    "code",
    [
        "while True:\n    try:\n        x = 1\n        while True: x += 1\n    except BaseException: x = 2",
        "sum(itertools.repeat(0))",
        "signal = __import__('signal')\nsignal.signal(signal.SIGALRM, signal.SIG_IGN)\nwhile True: pass",
    ],
)
def test_code_that_cannot_be_interrupted_is_killed(bench, short, code):
    (step,) = bench.execute(code)
    assert step.failed and step.world_lost and step.limit == "time"
    assert "1.5 seconds" in step.text and step.seconds > 2.9
    bench.healthy()


@pytest.mark.parametrize(
    "code, limit",
    [
        ("posix = __import__('posix')\nposix._exit(0)", "exit"),
        ("posix = __import__('posix')\nposix.kill(posix.getpid(), 15)", "signal"),
        ("posix = __import__('posix')\nposix.closerange(0, 100)", None),
    ],
)
def test_code_that_ends_its_process(bench, code, limit):
    async def steps(world):
        step = await world.execute(code)
        with pytest.raises(WorkerDied):
            await world.execute("print(1)")
        return step, await world.evaluate()

    step, judgement = bench.in_world(steps)
    assert step.failed and step.world_lost and not step.completed
    assert limit is None or step.limit == limit
    assert not judgement.success and not judgement.completed
    bench.healthy()


def test_swallowed_interrupt_is_still_a_failed_step(bench, short):
    (step,) = bench.execute("try:\n    x = 1\n    while True: x += 1\nexcept Exception: print('swallowed')")
    assert step.text == "swallowed\n" and step.failed and step.limit == "time" and not step.world_lost


def test_memory_bomb_hits_its_limit(bench):
    step, after = bench.execute("x = []\nwhile True: x.append(bytearray(10 ** 7))", "x = None\nprint('alive')")
    assert step.failed and step.limit == "memory" and not step.world_lost
    assert after.text == "alive\n"


def test_grandchildren_are_killed(bench):
    code = (
        "posix = __import__('posix')\n"
        "pid = posix.fork()\n"
        "if pid == 0:\n"
        "    posix.setsid()\n"
        "    second = posix.fork()\n"
        "    while True: __import__('select').select([], [], [], 1)\n"
        "print(pid)"
    )
    (step,) = bench.execute(code)
    pid = int(step.text)
    deadline = time.time() + 10
    while time.time() < deadline and descendants(bench.pool.server_pid)[1:]:
        time.sleep(0.05)
    assert not os.path.exists(f"/proc/{pid}")
    assert not descendants(bench.pool.server_pid)[1:]
    bench.healthy()


# Deaths from outside: infrastructure.


def test_killed_from_outside_while_idle(bench):
    async def steps():
        worlds = [await bench.pool.open(bench.tasks[i], experiment="unused", keep=False) for i in (0, 1)]
        os.kill(worlds[0].pid, signal.SIGKILL)
        await asyncio.sleep(0.3)
        with pytest.raises(WorkerDied, match="SIGKILL"):
            await worlds[0].execute("print(1)")
        with pytest.raises(WorkerDied):
            await worlds[0].evaluate()
        other = await worlds[1].execute("print('other')")
        for world in worlds:
            await world.close()
            await world.close()
        return other

    assert bench.run(steps()).text == "other\n"


def test_killed_server_is_replaced(bench):
    async def steps():
        world = await bench.pool.open(bench.tasks[0], experiment="unused", keep=False)
        left = await world.execute("posix = __import__('posix')\nif (pid := posix.fork()) == 0:\n    posix.setsid()\n    while True: __import__('select').select([], [], [], 1)\nprint(pid)")
        running = asyncio.ensure_future(world.execute("while True: pass"))
        await asyncio.sleep(0.3)
        pid = int(left.text)
        assert os.path.exists(f"/proc/{pid}")
        os.kill(bench.pool.server_pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await running
        await world.close()
        return pid

    starts = bench.pool.server_starts
    pid = bench.run(steps())
    bench.healthy()
    assert bench.pool.server_starts > starts
    assert not _runs(pid), "also what no kernel ends with its parent"


@pytest.mark.slow
def test_a_server_that_hangs_is_not_waited_for(bench, monkeypatch):
    monkeypatch.setattr(server, "_DEATH_S", 0.5)

    async def steps(world):
        os.kill(bench.pool.server_pid, signal.SIGSTOP)
        os.kill(world.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied, match="the fork server ended"):
            await asyncio.wait_for(world.execute("print(1)"), 20)

    bench.in_world(steps)
    bench.healthy()


def test_cancelled_call_ends_the_world(bench):
    async def steps(world):
        running = asyncio.ensure_future(world.execute("while True: pass"))
        await asyncio.sleep(0.2)
        running.cancel()
        with pytest.raises(asyncio.CancelledError):
            await running
        await asyncio.sleep(0.5)
        with pytest.raises(WorkerDied):
            await world.execute("print(1)")

    bench.in_world(steps)
    bench.healthy()


# Skills.


def test_only_installed_skills_can_have_been_called(bench):
    forged = (
        "m = __import__('sys').modules['sage_jax.world.shell']\n"
        "m.Shell.do_execute = lambda self, **k: {'text': '', 'dropped': 0, 'failed': False, 'limit': None, 'skill_calls': ['good', 'bad', 'other', 'good']}"
    )

    async def steps(world):
        verdicts = await world.install([Skill("good", "good", "def good(): return 1"), Skill("bad", "bad", "def bad(:")])
        await world.execute(forged)
        return verdicts, await world.execute("1")

    verdicts, step = bench.in_world(steps)
    assert [v.ok for v in verdicts] == [True, False]
    assert step.skill_calls == ("good",)


_LOOKUP = "def names():\n    '''All apps.'''\n    return [a['name'] for a in apis.api_docs.show_app_descriptions()]"


def test_skill_calls(bench):
    outer = Skill("outer@1", "outer", "def outer(x: int = 2) -> int:\n    'Doc of outer.'\n    return inner(x) + 1")
    inner = Skill("inner@1", "inner", "def inner(x):\n    if x < 0: raise ValueError('negative')\n    return x * 2")
    names = Skill("names@1", "names", _LOOKUP)

    async def steps(world):
        verdicts = await world.install([inner, outer, names])
        return verdicts, [
            await world.execute(code)
            for code in (
                "print(outer(3))",
                "x = 1",
                "alias = inner\nalias(1)\n1 / 0",
                "try:\n    inner(-1)\nexcept ValueError: pass",
                "inspect = __import__('inspect')\nprint(inspect.signature(outer), outer.__doc__, outer.__name__)",
                "print(len(names()))",
                "def inner(x): return 0\ninner(5)",
                "print(outer(3))",
            )
        ]

    verdicts, found = bench.in_world(steps)
    assert all(verdict.ok for verdict in verdicts), verdicts
    nested, nothing, alias, raised, looks, api, own, over_own = found
    assert nested.text == "7\n" and nested.skill_calls == ("inner@1", "outer@1")
    assert nothing.skill_calls == ()
    assert alias.failed and alias.skill_calls == ("inner@1",), "a later error does not undo the use"
    assert not raised.failed and raised.skill_calls == (), "a call that raised did not return"
    assert looks.text == "(x: int = 2) -> int Doc of outer. outer\n" and looks.skill_calls == ()
    assert api.skill_calls == ("names@1",)
    assert own.skill_calls == (), "the episode's own function of that name is no skill"
    assert over_own.text == "1\n" and over_own.skill_calls == ("outer@1",)


def test_skill_that_is_a_helper_of_another(bench):
    """A skill that carries another one's text keeps its own version of it, and a nested call of the same text counts."""
    old = "def login(app):\n    return 'old ' + app"
    new = "def login(app):\n    return 'new ' + app"
    top = "def top(app):\n    return login(app) + '!'"

    async def steps(world, skills):
        verdicts = await world.install(skills)
        return verdicts, [await world.execute(f"print({call})") for call in ("login('a')", "top('a')", "part()")]

    def run(*texts):
        skills = [Skill(name, name, code) for name, code in texts]
        verdicts, found = bench.in_world(lambda world: steps(world, skills))
        assert all(v.ok for v in verdicts), verdicts
        return [(step.text, step.skill_calls) for step in found[:2]]

    same = run(("login", old), ("top", f"{old}\n{top}"))
    assert same == [("old a\n", ("login",)), ("old a!\n", ("login", "top"))]
    assert run(("top", f"{old}\n{top}"), ("login", old)) == [("old a\n", ("login",)), ("old a!\n", ("login", "top"))]
    assert run(("top", f"{old}\n{top}"), ("login", new)) == [("new a\n", ("login",)), ("old a!\n", ("top",))]
    assert run(("top", f"{old}\n{top}")) == [("old a\n", ()), ("old a!\n", ("top",))], "a helper that is shown can be called"


def test_skills_that_fail_leave_nothing(bench, short):
    skills = [
        Skill("good", "good", "import math\nN = 3\ndef good(): return N"),
        Skill("raises", "bad", "N = 4\ndef bad(): return 1\n1 / 0"),
        Skill("syntax", "bad", "def bad(:"),
        Skill("other", "bad", "def other(): return 1"),
        Skill("guard", "bad", "import subprocess\ndef bad(): return 1"),
        Skill("calls", "bad", "T = apis.supervisor.complete_task()\ndef bad(): return 1"),
        Skill("slow", "bad", "while True: pass"),
        Skill("null", "bad", "def bad(): '\0'"),
        Skill("later", "later", "def later(): return good() + 1\nlater()"),
    ]

    async def steps(world):
        verdicts = await world.install(skills)
        probe = await world.execute("print(N, 'bad' in globals(), 'other' in globals(), 'T' in globals())")
        return verdicts, probe, await world.execute("print(later())"), await world.completed(), await world.install([])

    verdicts, probe, called, completed, none = bench.in_world(steps)
    assert [v.skill_id for v in verdicts] == [s.id for s in skills]
    assert [v.ok for v in verdicts] == [True] + [False] * 7 + [True]
    assert all(v.reason for v in verdicts if not v.ok)
    assert probe.text == "3 False False False\n" and probe.skill_calls == (), "calls of the installation do not count"
    assert set(called.skill_calls) == {"good", "later"}
    assert not completed and none == []


# Folders and openings.


def test_two_worlds_of_one_task_share_nothing(bench):
    async def steps():
        one, two = [await bench.pool.open(bench.tasks[0], experiment="same", keep=False) for _ in range(2)]
        assert one.place.folder != two.place.folder
        reference = load_reference(bench.root.path, one.task_id)
        await one.execute(reference.function_solution)
        found = await one.evaluate(), await two.evaluate()
        folders = [one.place.folder, two.place.folder]
        await one.close()
        await two.close()
        return found, folders

    (solved, untouched), folders = bench.run(steps())
    assert solved.success and not untouched.success and not untouched.completed
    assert not any(folder.exists() for folder in folders)


def test_wrong_openings(bench):
    async def kept_twice():
        world = await bench.pool.open(bench.tasks[0], experiment="twice", keep=True)
        try:
            with pytest.raises(ConfigError, match="already open"):
                await bench.pool.open(bench.tasks[0], experiment="twice", keep=True)
        finally:
            await world.close()

    async def opened(task_id, experiment, keep):
        await bench.pool.open(task_id, experiment=experiment, keep=keep)

    bench.run(kept_twice())
    for task_id, experiment in (("nope_1", "e"), ("../x", "e"), (bench.tasks[0], "../e"), (bench.tasks[0], "/e")):
        with pytest.raises(ConfigError):
            bench.run(opened(task_id, experiment, True))
    bench.healthy()


def test_two_hosts_with_pools_of_their_own_share_a_folder(bench, mini_root):
    """As the processes of a run on several hosts do: same root, same outputs, other tasks."""

    async def solve(pool, task_id):
        world = await pool.open(task_id, experiment="shared", keep=True)
        await world.execute(load_reference(mini_root.path, task_id).function_solution)
        judgement = await world.evaluate()
        await world.close()
        return judgement.success, (world.place.folder / "logs" / "api_calls.jsonl").is_file()

    async def whole():
        async with WorldPool(mini_root.path, limits=LIMITS, outputs=bench.pool._outputs.kept, max_open=2) as other:
            assert other.server_pid != bench.pool.server_pid
            return await asyncio.gather(*(solve((bench.pool, other)[n % 2], t) for n, t in enumerate(bench.tasks[:6])))

    assert bench.run(whole()) == [(True, True)] * 6
    bench.healthy()


def test_openings_wait_in_order(mini_root):
    async def whole():
        async with WorldPool(mini_root.path, limits=LIMITS, outputs=None, max_open=1) as pool:
            task_id = mini_root.task_ids("train")[0]
            order = []

            async def episode(number):
                world = await pool.open(task_id, experiment="e", keep=False)
                order.append(number)
                await world.execute("print(1)")
                await world.close()

            await asyncio.gather(*(episode(number) for number in range(3)))
            held = await pool.open(task_id, experiment="e", keep=False)
            with pytest.raises(TimeoutError):
                await asyncio.wait_for(pool.open(task_id, experiment="e", keep=False), 0.3)
            await held.close()
            await (await pool.open(task_id, experiment="e", keep=False)).close()
            return order

    assert asyncio.run(whole()) == [0, 1, 2]


def test_start_that_cannot_work(tmp_path):
    async def start(root):
        async with WorldPool(root, limits=LIMITS, outputs=None, max_open=1):
            pass

    with pytest.raises(DataRootError, match="holds no tasks"):
        asyncio.run(start(tmp_path))
    (tmp_path / "data" / "tasks" / "abc1234_1").mkdir(parents=True)
    (tmp_path / "data" / "tasks" / "abc1234_1" / "specs.json").write_text("{}")
    with pytest.raises(WorldOpenError, match="could not warm up"):
        asyncio.run(start(tmp_path))
