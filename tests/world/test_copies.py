"""Copies of live worlds: an API call of every app in the copy and then in the original, and nothing crosses over."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import os
import signal
import time

import pytest
from contract import running

from sage_jax.errors import WorkerDied, WorldOpenError
from sage_jax.world.miniworld.references import load_reference
from sage_jax.world.pool import Limits
from sage_jax.world.watch import descendants, tree_memory

LIMITS = Limits(output_chars=5000)
LOGIN = (
    "me = apis.supervisor.show_profile()\n"
    "tokens = {}\n"
    "for account in apis.supervisor.show_account_passwords():\n"
    "    for name in (me['email'], me['phone_number']):\n"
    "        try: tokens[account['account_name']] = apis[account['account_name']].login(username=name, password=account['password'])['access_token']\n"
    "        except Exception: pass\n"
)
# One reading call of every app, whatever it is called: by the documentation, without required parameters but the token.
EVERY_APP = (
    "def one_call(app):\n"
    "    for api in apis.api_docs.show_api_descriptions(app_name=app):\n"
    "        doc = apis.api_docs.show_api_doc(app_name=app, api_name=api['name'])\n"
    "        required = [p['name'] for p in doc['parameters'] if p['required']]\n"
    "        if doc['method'] == 'GET' and set(required) <= {'access_token'}:\n"
    "            kw = {'access_token': tokens[app]} if required else {}\n"
    "            return api['name'], len(str(apis[app][api['name']](**kw)))\n"
    "print({app: one_call(app) for app in sorted(tokens)})"
)
NOTES = "print(len(apis.simple_note.search_notes(access_token=tokens['simple_note'], page_limit=20)))"
WRITE = "apis.simple_note.create_note(access_token=tokens['simple_note'], title='t', content='c')\n" + NOTES


@pytest.fixture(scope="module", autouse=True)
def shared(mini_root):
    with running(mini_root, LIMITS) as _SHARED[:]:
        yield


_SHARED: list = []


def with_world(root, steps):
    loop, pool = _SHARED

    async def whole():
        world = await pool.open(root.task_ids("dev")[0], experiment="e", keep=False)
        try:
            return await steps(pool, world)
        finally:
            await world.close()

    return loop.run_until_complete(whole())


def test_every_app_answers_in_the_copy_and_then_in_the_original(mini_root):
    async def steps(pool, world):
        await world.execute(LOGIN)
        copy = await world.fork()
        texts = [(await w.execute(EVERY_APP)).text for w in (copy, world, copy)]
        await copy.close()
        return texts, (await world.execute(EVERY_APP)).text

    (first, original, again), after = with_world(mini_root, steps)
    assert first == original == again == after and not first.startswith("Execution failed")
    apps = ast.literal_eval(first)
    assert len(apps) >= 9 and all(apps.values()), apps


def test_a_copy_leaves_no_trace(mini_root):
    async def steps(pool, world):
        await world.execute(LOGIN)
        before = int((await world.execute("x = [1]\n" + NOTES)).text)
        copy = await world.fork()
        assert int((await copy.execute("x.append(2)\n" + WRITE)).text) == before + 1
        assert (await world.execute("print(x)\n" + NOTES)).text == f"[1]\n{before}\n"
        assert int((await world.execute("x.append(3)\n" + WRITE)).text) == before + 1
        inner = await copy.fork()
        await copy.close()
        assert (await inner.execute("print(len(x))\n" + NOTES)).text == f"2\n{before + 1}\n", "the copy of a copy outlives it"
        await inner.close()
        return (await world.execute("print(len(x))\n" + NOTES)).text == f"2\n{before + 1}\n"

    assert with_world(mini_root, steps)


def test_a_copy_is_judged_by_itself(mini_root):
    async def steps(pool, world):
        reference = load_reference(mini_root.path, world.task_id)
        solved, idle = await world.fork(), await world.fork()
        await solved.execute(reference.function_solution)
        judgements = [await w.evaluate() for w in (solved, idle, world)]
        await solved.close()
        await idle.close()
        return [(j.success, j.completed) for j in judgements]

    assert with_world(mini_root, steps) == [(True, True), (False, False), (False, False)]


def test_the_original_may_be_closed_first_and_copies_may_die(mini_root):
    async def steps(pool, world):
        copy, dying = await world.fork(), await world.fork()
        lost = await dying.execute("__import__('posix')._exit(3)")
        assert lost.world_lost and lost.limit == "exit"
        await dying.evaluate()
        await dying.close()
        await world.close()
        with pytest.raises(RuntimeError, match="closed"):
            await world.execute("print(1)")
        assert (await copy.execute("print(apis.supervisor.show_profile()['sex'] != '')")).text == "True\n"
        pids = [world.pid, copy.pid]
        await copy.close()
        for _ in range(200):
            if not any(os.path.exists(f"/proc/{p}") for p in pids):
                break
            await asyncio.sleep(0.02)
        assert not [p for p in pids if os.path.exists(f"/proc/{p}")]
        assert not pool._worlds and not pool._outputs._slots

    with_world(mini_root, steps)


def test_a_hostile_copy_cannot_reach_the_original(mini_root):
    async def steps(pool, world):
        copy = await world.fork()
        step = await copy.execute("posix = __import__('posix')\nfor s in (15, 9, 19, 14): \n    try: posix.kill(posix.getppid(), s)\n    except OSError as e: print(e)")
        assert step.text.count("not permitted") == 4
        await copy.close()
        return (await world.execute("print(1)")).text

    assert with_world(mini_root, steps) == "1\n"


def test_what_copies_hold_is_not_the_original_s(mini_root):
    async def steps(pool, world):
        copies = [await world.fork() for _ in range(2)]
        for copy in copies:
            assert not (await copy.execute("x = bytearray(150 * 10**6)\nwith __import__('io').FileIO('f', 'w') as f: f.write(bytes(10**7))")).failed
        await asyncio.sleep(1.2)  # two looks at the idle ones
        texts = [(await w.execute("print('lives')")).text for w in (world, *copies)]
        for copy in copies:
            await copy.close()
        return texts

    pool = _SHARED[1]
    pool.limits = dataclasses.replace(LIMITS, memory_mb=200, disk_mb=16)
    try:
        assert with_world(mini_root, steps) == ["lives\n"] * 3
    finally:
        pool.limits = LIMITS


def test_a_copy_brings_its_files_and_refuses_what_cannot_be_copied(mini_root):
    write = (
        "io, posix = __import__('io'), __import__('posix')\n"
        "posix.mkdir('d')\nposix.symlink('/etc/shadow', 'd/link')\n"
        "with io.FileIO('d/f', 'w') as f: f.write(b'one')"
    )
    read = "io, posix = __import__('io'), __import__('posix')\nprint(io.FileIO('d/f').read(), posix.readlink('d/link'), posix.stat('d/f').st_uid == posix.getuid(), posix.listdir('..'))"

    async def steps(pool, world):
        await world.execute(write)
        copy = await world.fork()
        first = (await copy.execute(read)).text
        await copy.execute("with __import__('io').FileIO('d/f', 'w') as f: f.write(b'two')")
        inner = await copy.fork()
        texts = [(await w.execute("print(__import__('io').FileIO('d/f').read())")).text for w in (inner, copy, world)]
        await inner.close()
        await copy.close()
        # Something in the way of its folder is an error of the copy alone.
        await world.execute(f"for n in range(1, {pool._outputs._serial + 20}):\n    try: posix.mkdir(f'../{{n}}')\n    except OSError: pass")
        with pytest.raises(WorldOpenError, match="files could not be copied"):
            await world.fork()
        return first, texts, (await world.execute("print('lives')")).text

    first, texts, lives = with_world(mini_root, steps)
    assert first.startswith("b'one' /etc/shadow True")
    assert texts == ["b'two'\n", "b'two'\n", "b'one'\n"] and lives == "lives\n"


@pytest.mark.skipif(os.geteuid() != 0, reason="without a user of its own, a world's processes are counted, not bounded")
def test_a_copy_without_a_process_left_is_refused_and_the_world_lives(mini_root):
    children = "posix = __import__('posix')\nfor _ in range(40):\n    try:\n        if posix.fork() == 0:\n            while True: __import__('select').select([], [], [], 1)\n    except BlockingIOError: break"

    async def steps(pool, world):
        assert not (await world.execute(children)).failed
        with pytest.raises(WorldOpenError, match="temporarily unavailable"):
            await world.fork()
        assert pool._copy_slots._value == 4
        return (await world.execute("print('lives')")).text

    assert with_world(mini_root, steps) == "lives\n"


def test_copies_end_with_the_pool_and_with_the_server(mini_root):
    async def steps(pool, world):
        copy = await world.fork()
        os.kill(pool.server_pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await copy.execute("while True: pass")
        for _ in range(200):
            if not os.path.exists(f"/proc/{copy.pid}"):
                return True
            await asyncio.sleep(0.02)
        return False

    assert with_world(mini_root, steps)


# Whose doing an end is.


def _agent_pid(world):
    with open(f"/proc/{world.pid}/task/{world.pid}/children") as children:
        return int(children.read().split()[0])


def test_a_kill_from_outside_is_no_doing_of_the_agent(mini_root):
    async def steps(pool, world):
        running = asyncio.ensure_future(world.execute("while True: pass"))
        await asyncio.sleep(0.5)
        os.kill(_agent_pid(world), signal.SIGKILL)
        with pytest.raises(WorkerDied, match="killed from outside"):
            await running
        with pytest.raises(WorkerDied):
            await world.execute("print(1)")

    with_world(mini_root, steps)


def test_a_kill_of_the_engines_side_takes_the_code_along(mini_root):
    async def steps(pool, world):
        agent = _agent_pid(world)
        running = asyncio.ensure_future(world.execute("while True: pass"))
        await asyncio.sleep(0.5)
        os.kill(world.pid, signal.SIGKILL)
        with pytest.raises(WorkerDied):
            await running
        for _ in range(200):
            if not os.path.exists(f"/proc/{agent}"):
                return True
            time.sleep(0.02)
        return False

    assert with_world(mini_root, steps)


def test_memory_of_a_tree_counts_children_once():
    import subprocess
    import sys

    with subprocess.Popen([sys.executable, "-c", "x = bytearray(50_000_000)\nprint(1, flush=True)\ninput()"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        child.stdout.readline()
        held = tree_memory(descendants(child.pid))
        assert 50e6 < held < 120e6 and tree_memory([child.pid], 30_000_000) == held - 30_000_000
        child.stdin.close()
