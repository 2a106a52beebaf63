"""Layers of isolation: what each does, and what happens where one is missing."""

from __future__ import annotations

import asyncio
import os
import platform
import struct

import pytest

from sage_jax.errors import ConfigError
from sage_jax.world.isolation import LAYERS, Layer, describe, readable_paths
from sage_jax.world.pool import Limits, WorldPool
from sage_jax.world.seccomp import IsolationError, seccomp_program


def run(root, *codes, **options):
    """(a step for each code, layers); each code in a world of its own."""

    async def whole():
        async with WorldPool(root.path, limits=Limits(execute_s=3.0, grace_s=2.0), outputs=None, max_open=1, **options) as pool:
            steps = []
            for code in codes:
                world = await pool.open(root.task_ids("dev")[0], experiment="e", keep=False)
                steps.append(await world.execute(code))
                await world.close()
            return steps, pool.layers

    return asyncio.run(whole())


def truth(root):
    return f"{root.path}/data/tasks/{root.task_ids('dev')[0]}/ground_truth/answer.json"


def test_without_the_file_layer_a_pool_does_not_start(mini_root):
    with pytest.raises(ConfigError, match=r"world\.allow_unisolated=True"):
        run(mini_root, "1", layers_off=["landlock"])


def test_without_it_and_allowed_the_rest_still_holds(mini_root):
    (read, sock), layers = run(
        mini_root, f"print(__import__('io').FileIO({truth(mini_root)!r}).read())", "__import__('_socket').socket()", layers_off=["landlock", "uid"], allow_unisolated=True
    )
    assert not layers["landlock"].on and layers["seccomp"].on
    assert describe(layers).startswith("WORLDS ARE NOT ISOLATED")
    assert not read.failed, "this is what the layer is for"
    assert "not permitted" in sock.text


MANY = "posix = __import__('posix')\nfor _ in range(40):\n    if posix.fork() == 0: break\nwhile True: __import__('select').select([], [], [], 1)"


@pytest.mark.parametrize("off", [["uid"], ["seccomp", "limits", "privileges"]])
def test_the_file_layer_holds_without_others(mini_root, off):
    path = truth(mini_root)
    codes = [f"print(__import__('io').FileIO({path!r}).read())", f"__import__('posix').chmod({path!r}, 0o777)", f"__import__('posix').utime({path!r})"]
    (*steps, many), layers = run(mini_root, *codes, MANY, layers_off=off)
    assert off != ["uid"] or (many.world_lost and many.limit == "processes"), "no limit counts them, so that they are watched"
    assert all(step.failed and ("ermission" in step.text or "not permitted" in step.text) for step in steps), [s.text for s in steps]
    assert [name for name in off if layers[name].on] == []
    assert describe(layers).startswith("isolation of worlds:") and f"{off[0]} is off (switched off)" in describe(layers)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_each_world_has_a_user_of_its_own(mini_root):
    async def whole():
        async with WorldPool(mini_root.path, limits=Limits(), outputs=None, max_open=3) as pool:
            worlds = [await pool.open(mini_root.task_ids("dev")[0], experiment="e", keep=False) for _ in range(3)]
            uids = [(await w.execute("print(__import__('posix').getuid())")).text for w in worlds]
            for w in worlds:
                await w.close()
            return uids

    uids = asyncio.run(whole())
    assert len(set(uids)) == 3 and all(int(u) >= 1_000_000_000 for u in uids)


def test_readable_paths_leave_our_own_sources_out(tmp_path):
    paths = readable_paths(tmp_path / "sage_jax")
    assert not [p for p in paths if "sage_jax" in os.path.basename(p)]
    assert any(os.path.basename(p) == "appworld" or p.endswith("site-packages") for p in paths)


def _run_filter(program, number, arguments, arch=0xC000003E):
    """A classic BPF machine, as far as the filter uses it."""
    data = struct.pack("=IIQ6Q", number, arch, 0, *arguments, *[0] * (6 - len(arguments)))
    code = [struct.unpack_from("=HBBI", program, at) for at in range(0, len(program), 8)]
    at, a = 0, 0
    while True:
        op, yes, no, k = code[at]
        at += 1
        if op == 0x20:
            (a,) = struct.unpack_from("=I", data, k)
        elif op == 0x54:
            a &= k
        elif op == 0x06:
            return k
        else:
            hit = {0x15: a == k, 0x45: bool(a & k), 0x35: a >= k}[op]
            at += yes if hit else no


def test_the_filter_line_by_line():
    program = seccomp_program(4711, guard_attributes=True, machine="x86_64")
    allow, deny, missing = 0x7FFF0000, 0x00050001, 0x00050026
    for number, arguments, wanted in (
        (0, [], allow), (1, [], allow), (53, [], allow),  # read, write, socketpair
        (41, [], deny), (59, [], deny), (101, [], deny), (90, [], deny), (272, [], deny),  # socket, execve, ptrace, chmod, unshare
        (62, [4711, 15], allow), (62, [4711, 9], deny), (62, [4711, 19], deny), (62, [4712, 15], deny), (62, [2**32 - 1, 9], deny),  # kill
        (234, [4711, 4711, 6], allow), (234, [4711, 4711, 9], deny), (234, [1, 1, 6], deny),  # tgkill
        (56, [0x01200011], allow), (56, [0x003D0F00], allow), (56, [0x10000000], deny), (56, [0x02000000], deny), (435, [], missing),  # clone, clone3
        (56, [0x8011], deny), (56, [9], deny), (56, [0x01200009], deny),  # a child of its parent's; SIGKILL at a child's end
        (160, [0], deny), (222, [], deny), (72, [3, 1], allow), (72, [3, 8], deny), (72, [3, 15], deny), (72, [3, 10], deny),  # setrlimit, timer_create, fcntl
        (16, [3, 0x5401], allow), (16, [3, 0x8901], deny), (16, [3, 0x8902], deny),  # ioctl
        (9, [0, 1, 3, 0x22], allow), (9, [0, 1, 3, 0x01], allow), (9, [0, 1, 3, 0x21], deny), (9, [0, 1, 3, 0x23], deny),  # mmap
        (0x40000000, [], missing),  # x32
    ):  # fmt: skip
        assert _run_filter(program, number, arguments) == wanted, (number, arguments)
    assert _run_filter(program, 0, [], arch=0x40000003) == deny
    assert _run_filter(seccomp_program(1, guard_attributes=False, machine="x86_64"), 90, []) == allow
    assert _run_filter(seccomp_program(1, guard_attributes=True, machine="aarch64"), 198, [], arch=0xC00000B7) == deny
    with pytest.raises(IsolationError, match="not known; known: x86_64, aarch64"):
        seccomp_program(1, guard_attributes=True, machine="vax")


def test_layers_are_all_named():
    assert set(LAYERS) == set(describe({name: Layer(True) for name in LAYERS}).split(": ")[1].split(", "))
    assert platform.machine() in ("x86_64", "aarch64")
