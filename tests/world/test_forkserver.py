"""The fork server's own ways out, without an engine: no process to be had, no user ids, ends that are told when all is over."""

from __future__ import annotations

import errno
import json
import os
import socket

import pytest

from sage_jax.world import forkserver, isolation, protocol
from sage_jax.world.watch import describe_status


def bare_server():
    server = object.__new__(forkserver._Server)
    ours, server.control = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    server.children = {}
    return server, ours


def test_a_child_that_cannot_be_forked_is_a_failed_opening(monkeypatch):
    server, ours = bare_server()
    child, theirs = socket.socketpair()

    def no_process():
        raise BlockingIOError(errno.EAGAIN, "Resource temporarily unavailable")

    monkeypatch.setattr(os, "fork", no_process)
    server._spawn({"id": 7, "role": "world", "spec": {}, "memory_bytes": 1}, theirs.detach())
    assert "Resource temporarily unavailable" in protocol.receive(child)["error"]
    assert protocol.receive(child) is None
    assert json.loads(ours.recv(1000)) == {"event": "exit", "id": 7, "status": 256}


def test_an_end_is_told_after_what_was_left_is_dead(monkeypatch):
    server, ours = bare_server()
    pid = os.fork()
    if pid == 0:
        os._exit(3)
    os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT)
    server.children[pid] = 5
    orphans = [[1_000_001], [1_000_002], []]

    def own_children():
        with pytest.raises(BlockingIOError):
            ours.recv(1000, socket.MSG_DONTWAIT)
        return orphans.pop(0)

    monkeypatch.setattr(forkserver, "_own_children", own_children)
    monkeypatch.setattr(forkserver, "_kill", lambda pid: None)
    monkeypatch.setattr(forkserver, "_kill_leftovers", lambda pid: None)
    waits = iter([(pid, 3 << 8)] + [(0, 0)] * 3)
    monkeypatch.setattr(os, "waitpid", lambda *a: next(waits))
    server._reap()
    assert not orphans and json.loads(ours.recv(1000)) == {"event": "exit", "id": 5, "status": 3 << 8}
    monkeypatch.undo()
    os.waitpid(pid, 0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
def test_without_unused_user_ids_the_layer_is_off(monkeypatch, tmp_path):
    def no_ids(*a, **k):
        raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(os, "chown", no_ids)
    plan, layers = forkserver._plan(str(tmp_path), [])
    assert plan.uid is None and "uid" in plan.off
    assert not layers["uid"].on and "Invalid argument" in layers["uid"].reason
    assert layers["limits"].on


@pytest.mark.parametrize(
    "layer, part",
    [
        ("session", (os, "setsid")), ("descriptors", (isolation, "_close_others")), ("limits", (isolation, "_limits")), ("uid", (isolation, "_change_user")),
        ("privileges", (isolation, "_prctl")), ("landlock", (isolation, "_landlock")), ("seccomp", (isolation, "_seccomp")), ("environment", None),
    ],
)  # fmt: skip
def test_each_layer_is_shown_by_its_effect(monkeypatch, tmp_path, layer, part):
    if layer == "uid" and os.geteuid() != 0:
        pytest.skip("needs root")
    for name in set(os.environ) - set(isolation.VARIABLES):
        monkeypatch.delenv(name)
    plan, layers = forkserver._plan(str(tmp_path), [])
    assert layers[layer].on, layers[layer].reason
    if part is None:
        monkeypatch.setenv("SOME_TOKEN", "x")
    else:
        monkeypatch.setattr(*part, lambda *a, **k: None)
    plan, layers = forkserver._plan(str(tmp_path), [])
    assert not layers[layer].on and layer in plan.off


def test_every_status_has_words():
    assert [describe_status(s) for s in (None, 9, 40, 64, 3 << 8)] == [
        "the fork server ended", "ended by signal SIGKILL", "ended by signal 40", "ended by signal SIGRTMAX", "exited with code 3",
    ]  # fmt: skip
