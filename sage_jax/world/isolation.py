"""What the process that runs model-written code may not do, as layers; each is on, or off with a reason.

The layers, in the order in which a child takes them on (nothing of this can be undone by the child):

  session      a session and process group of its own; dies with its parent
  descriptors  no descriptor but its one channel; standard streams are /dev/null
  environment  no variable of the trainer's but the few that the fork server was given
  limits       private memory, address space, file size, open files, processor time, no core dump; processes, where uid is on
  uid          as root: a user id that no file or process has, without capabilities (see READ_SEARCH below)
  privileges   no new privileges, not traceable, no dump
  landlock     files: reads the interpreter and the packages without this project's own, writes its own folder, runs no program;
               no TCP; no signal and no abstract socket out of the sandbox
  seccomp      no sockets, no signals but to itself and none that cannot be caught, nor such as the kernel would send for it, no tracing,
               no namespaces, no mounts, no programs, no shared memory without a file; without `uid` no change of modes, owners, times

`uid` and Landlock overlap on purpose: Landlock lets stat, chmod and utime through and RLIMIT_NPROC does not bind root, which the uid closes;
the uid alone would let the child read what all users may read. Where the interpreter lies in a folder that other users cannot enter
(/root), the child keeps the one capability CAP_DAC_READ_SEARCH, and only under Landlock, whose rules still hold.

Sources: landlock(7), seccomp(2), prctl(2), capabilities(7), getrlimit(2). System calls go through ctypes: no package for Landlock
is kept up. Runs in the fork server and its children; imports nothing heavy.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import os
import platform
import resource
import signal
import socket
import struct
import sys
import sysconfig
from collections.abc import Iterable, Mapping
from pathlib import Path

from sage_jax.errors import ConfigError
from sage_jax.world.seccomp import IsolationError, seccomp_program
from sage_jax.world.watch import limited_memory

LAYERS = ("session", "descriptors", "environment", "limits", "uid", "privileges", "landlock", "seccomp")
SWITCHABLE = ("limits", "uid", "privileges", "landlock", "seccomp")  # the others cannot be done without
VARIABLES = (  # of the environment, all that a fork server is given
    "PATH", "HOME", "TMPDIR", "IPYTHONDIR", "LANG", "TZ", "PYTHONPATH", "PYTHONHASHSEED", "APPWORLD_ROOT", "APPWORLD_CACHE", "CUDA_VISIBLE_DEVICES", "JAX_PLATFORMS",
)  # fmt: skip
CPU_S = 7200  # processor seconds of a process, over all steps
REQUIRED = "landlock"  # the file-system layer: without it a world can read the ground truth

_libc = ctypes.CDLL(None, use_errno=True)
PR_SET_PDEATHSIG = 1
_PR_SET_DUMPABLE, _PR_SET_KEEPCAPS, _PR_SET_SECCOMP, _PR_SET_NO_NEW_PRIVS = 4, 8, 22, 38
_PR_GET_DUMPABLE, _PR_GET_NO_NEW_PRIVS = 3, 39


@dataclasses.dataclass(frozen=True)
class Layer:
    """Whether a layer is on, and if not, why."""

    on: bool
    reason: str = ""


@dataclasses.dataclass(frozen=True)
class Plan:
    """What one child takes on. Plain data, made by the fork server.

    off: layers that are left out. uid: its user and group id; None without the layer. keep_read_search: see the module's text.
    readable: files and folders that it may read. writable: its own folder. memory_bytes: private memory on top of what it has when it begins.
    """

    off: tuple[str, ...]
    uid: int | None
    keep_read_search: bool
    readable: tuple[str, ...]
    writable: str
    memory_bytes: int
    file_bytes: int
    processes: int
    open_files: int = 128


def describe(layers: Mapping[str, Layer]) -> str:
    """One line: which layers are on, which are off and why; without the required one it begins with a warning."""
    on = ", ".join(name for name, layer in layers.items() if layer.on)
    off = "; ".join(f"{name} is off ({layer.reason})" for name, layer in layers.items() if not layer.on)
    warning = "" if layers.get(REQUIRED, Layer(False)).on else "WORLDS ARE NOT ISOLATED: their code can read the ground truth and this user's files. "
    return f"{warning}isolation of worlds: {on or 'none'}" + (f"; {off}" if off else "")


def refuse_unisolated(layers: Mapping[str, Layer], where: str, allowed: bool) -> None:
    """Raises ConfigError where the required layer is off and that is not allowed. `where`: e.g. "this machine"."""
    layer = layers.get(REQUIRED, Layer(False, "it is not named"))
    if not layer.on and not allowed:
        raise ConfigError(
            f"{where} has no {REQUIRED} ({layer.reason}), so model-written code could read every file of its user, the ground truth "
            "included. Use Linux 5.13 or newer, or accept that with world.allow_unisolated=True; it is named in every report"
        )


def readable_paths(project: Path) -> tuple[str, ...]:
    """The interpreter, its library and the installed packages, without `project` (our own sources, from which a mini world's
    solutions could be made again), and what the C library reads."""
    paths: list[str] = []
    for name in ("stdlib", "platstdlib", "purelib", "platlib"):
        folder = Path(sysconfig.get_path(name)).resolve()
        paths += _without(folder, project)
    paths += [str(Path(p).resolve()) for p in (sys.prefix, sys.base_prefix) if (Path(p) / "pyvenv.cfg").exists() for p in (f"{p}/pyvenv.cfg",)]
    paths += [str(Path(sys.executable).resolve())]
    paths += [p for p in ("/usr/lib", "/usr/lib64", "/lib", "/lib64", "/usr/share/zoneinfo", "/etc/localtime", "/etc/ld.so.cache", "/etc/mime.types") if os.path.exists(p)]
    paths += [p for p in ("/dev/null", "/dev/urandom", "/dev/random") if os.path.exists(p)]
    return tuple(dict.fromkeys(paths))


def _without(folder: Path, project: Path) -> list[str]:
    """The folder, or its entries one by one where `project` or an installed copy of it lies inside."""
    if not folder.is_dir():
        return []
    name = project.name
    inside = folder in project.parents or any(name in p.name for p in folder.iterdir())
    if not inside:
        return [str(folder)]
    return [str(p) for p in folder.iterdir() if name not in p.name and p.resolve() not in (project, *project.parents)]


def take_on(plan: Plan, parent: int, keep: Iterable[int]) -> None:
    """Takes on every layer of the plan, in this process, which must have one thread.

    Args:
      parent: process id that this child must still have as its parent.
      keep: descriptors that stay open.

    Raises:
      IsolationError: naming the layer; the process must end then.
    """
    off = plan.off
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGINT, signal.SIGTERM, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    _close_others(set(keep))
    if "limits" not in off:
        _limits(plan)
    if "uid" not in off and plan.uid is not None:
        _change_user(plan.uid, plan.keep_read_search and "landlock" not in off)
    _prctl("privileges", PR_SET_PDEATHSIG, signal.SIGKILL)  # after the change of user, which clears it
    if os.getppid() != parent:
        os._exit(1)
    if "privileges" not in off:
        _prctl("privileges", _PR_SET_DUMPABLE, 0)
    if not {"privileges", "landlock", "seccomp"} <= set(off):
        _prctl("privileges", _PR_SET_NO_NEW_PRIVS, 1)
    if "landlock" not in off:
        _landlock(plan.readable, plan.writable)
    if "seccomp" not in off:
        _seccomp(guard_attributes="uid" in off or plan.uid is None)


def narrow(parent: int) -> None:
    """In a copy of a process that has taken on its layers: a session of its own, dies with the original, sends signals to nobody."""
    os.setsid()
    _prctl("privileges", PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:
        os._exit(1)
    with contextlib.suppress(IsolationError):  # where seccomp is off
        _seccomp(guard_attributes=False)  # on top of the original's, which allows the original's number alone


def _prctl(layer: str, option: int, value: int) -> None:
    if _libc.prctl(option, ctypes.c_ulong(value), 0, 0, 0):
        raise _failed(layer, f"prctl({option})")


def _failed(layer: str, call: str) -> IsolationError:
    number = ctypes.get_errno()
    return IsolationError(number, f"{layer}: {call}: {os.strerror(number)}")


def _close_others(keep: set[int]) -> None:
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    start = 3
    for number in sorted(keep):
        os.closerange(start, number)
        start = number + 1
    os.closerange(start, 1 << 16)


def _limits(plan: Plan) -> None:
    data, size = limited_memory()
    wanted = {
        resource.RLIMIT_DATA: data + plan.memory_bytes,
        resource.RLIMIT_AS: size + 2 * plan.memory_bytes,
        resource.RLIMIT_FSIZE: plan.file_bytes,
        resource.RLIMIT_NOFILE: plan.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
        resource.RLIMIT_MEMLOCK: 0,
    }
    if "uid" not in plan.off and plan.uid is not None:  # it counts all processes of a user
        wanted[resource.RLIMIT_NPROC] = plan.processes
    for kind, value in wanted.items():
        _, hard = resource.getrlimit(kind)
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (value, value))
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    if hard == resource.RLIM_INFINITY or hard > CPU_S + 60:  # SIGXCPU first, and SIGKILL for code that ignores it
        resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 60))


_CAP_DAC_READ_SEARCH = 2
_CAP_VERSION_3 = 0x20080522


def _change_user(uid: int, keep_read_search: bool) -> None:
    if keep_read_search:
        _prctl("uid", _PR_SET_KEEPCAPS, 1)
    try:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(uid, uid, uid)
    except OSError as error:
        raise IsolationError(error.errno, f"uid: {error}") from error
    if keep_read_search:
        header = struct.pack("=Ii", _CAP_VERSION_3, 0)
        bit = 1 << _CAP_DAC_READ_SEARCH
        data = struct.pack("=6I", bit, bit, 0, 0, 0, 0)  # effective, permitted, inheritable; low and high words
        if _libc.capset(ctypes.c_char_p(header), ctypes.c_char_p(data)):
            raise _failed("uid", "capset")


# Landlock.

_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446  # the same on all architectures
_READ_FILE, _READ_DIR, _WRITE_FILE, _IOCTL_DEV = 1 << 2, 1 << 3, 1 << 1, 1 << 15
_TRUNCATE = 1 << 14
_FILE_ONLY = (1 << 0) | _WRITE_FILE | _READ_FILE | _TRUNCATE | _IOCTL_DEV


def landlock_version() -> int:
    """The kernel's Landlock ABI; 0 where there is none."""
    return max(0, _libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1))


def _handled(version: int) -> int:
    rights = (1 << 13) - 1
    for since, bit in ((2, 1 << 13), (3, _TRUNCATE), (5, _IOCTL_DEV)):
        rights |= bit if version >= since else 0
    return rights


def _landlock(readable: Iterable[str], writable: str) -> None:
    version = landlock_version()
    if version < 1:
        raise _failed("landlock", "landlock_create_ruleset")
    rights = _handled(version)
    fields = [rights, 0b11, 0b11][: 1 if version < 4 else 2 if version < 6 else 3]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _libc.syscall(_CREATE_RULESET, ctypes.c_char_p(attributes), ctypes.c_size_t(len(attributes)), 0)
    if ruleset < 0:
        raise _failed("landlock", "landlock_create_ruleset")
    try:
        for path in readable:
            allowed = _READ_FILE | _READ_DIR
            if path.startswith("/dev/"):
                allowed = _READ_FILE | _WRITE_FILE
            _allow(ruleset, path, allowed & rights)
        # Everything in its own folder but programs, devices and sockets.
        own = rights & ~((1 << 0) | (1 << 6) | (1 << 9) | (1 << 11) | _IOCTL_DEV)
        _allow(ruleset, writable, own)
        if _libc.syscall(_RESTRICT_SELF, ruleset, 0):
            raise _failed("landlock", "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: str, rights: int) -> None:
    try:
        at = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except FileNotFoundError:
        return  # a package that was removed since the list was made
    try:
        if not os.path.isdir(path):
            rights &= _FILE_ONLY
        rule = struct.pack("=Qi", rights, at)
        if _libc.syscall(_ADD_RULE, ruleset, 1, ctypes.c_char_p(rule), 0):
            raise _failed("landlock", f"landlock_add_rule {path}")
    finally:
        os.close(at)


# seccomp.

def _seccomp(*, guard_attributes: bool) -> None:
    program = seccomp_program(os.getpid(), guard_attributes=guard_attributes, machine=platform.machine())
    buffer = ctypes.create_string_buffer(program)

    class Filter(ctypes.Structure):
        _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]

    filter = Filter(len(program) // 8, ctypes.addressof(buffer))
    if _libc.prctl(_PR_SET_SECCOMP, 2, ctypes.byref(filter), 0, 0):
        raise _failed("seccomp", "prctl(PR_SET_SECCOMP)")


# Finding out what this machine can do.


def survey(plan: Plan, without: Mapping[str, str]) -> dict[str, Layer]:
    """Tries every layer in a child of this process and says which are on, each shown by its effect.

    Args:
      plan: what a child would take on; `off` is decided here.
      without: layers that are not to be tried, of `SWITCHABLE`, each with the reason.
    """
    found = {name: Layer(False, without[name]) if name in without else Layer(True) for name in LAYERS}
    for name in LAYERS:
        if found[name].on:
            # Alone, but for those that hold without being asked: a layer must not be shown by another one's effect.
            off = tuple(other for other in SWITCHABLE if other != name)
            reason = _in_child(dataclasses.replace(plan, off=off), _EFFECTS[name])
            if reason:
                found[name] = Layer(False, reason)
    return found


def _in_child(plan: Plan, effect) -> str:
    """"" if a child with this plan shows the effect, else why not."""
    reading, writing = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        text = "the child ended early"
        try:
            take_on(plan, parent, [writing])
            text = effect(plan)
        except BaseException as error:
            text = str(error) or type(error).__name__
        finally:
            os.write(writing, text.encode()[:2000])
            os._exit(0)
    os.close(writing)
    text = b""
    while part := os.read(reading, 4096):
        text += part
    os.close(reading)
    os.waitpid(pid, 0)
    return text.decode(errors="replace")


def _session_effect(plan: Plan) -> str:
    return "" if os.getsid(0) == os.getpgid(0) == os.getpid() else "it is in its parent's session"


def _descriptors_effect(plan: Plan) -> str:
    left = [n for n in os.listdir("/proc/self/fd") if os.path.exists(f"/proc/self/fd/{n}") and os.readlink(f"/proc/self/fd/{n}") != os.devnull]
    return "" if len(left) == 1 else f"{len(left)} descriptors are open, not one"


def _environment_effect(plan: Plan) -> str:
    more = sorted(set(os.environ) - set(VARIABLES))
    return f"variables that nobody gave: {', '.join(more)}" if more else ""


def _limits_effect(plan: Plan) -> str:
    for name, most in (("RLIMIT_NOFILE", plan.open_files), ("RLIMIT_FSIZE", plan.file_bytes), ("RLIMIT_CPU", CPU_S), ("RLIMIT_CORE", 0)):
        if not 0 <= resource.getrlimit(getattr(resource, name))[0] <= most:
            return f"{name} is not bounded"
    with contextlib.suppress(MemoryError):
        bytearray(2 * plan.memory_bytes)
        return "memory is not bounded"
    return ""


def _privileges_effect(plan: Plan) -> str:
    if _libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0):
        return "it can be traced"
    return "" if _libc.prctl(_PR_GET_NO_NEW_PRIVS, 0, 0, 0, 0) == 1 else "it can gain privileges"


def _uid_effect(plan: Plan) -> str:
    return "" if os.getuid() == plan.uid else f"still user {os.getuid()}"


def _landlock_effect(plan: Plan) -> str:
    for path in ("/etc/hostname", "/proc/self/status", "/"):
        try:
            os.close(os.open(path, os.O_RDONLY))
        except PermissionError:
            continue
        except FileNotFoundError:
            continue
        return f"{path} can still be opened"
    (Path(plan.writable) / "probe").write_text("x")
    (Path(plan.writable) / "probe").unlink()
    return ""


def _seccomp_effect(plan: Plan) -> str:
    try:
        socket.socket().close()
    except PermissionError:
        return ""
    return "a socket can still be made"


_EFFECTS = {
    "session": _session_effect, "descriptors": _descriptors_effect, "environment": _environment_effect, "limits": _limits_effect, "privileges": _privileges_effect,
    "uid": _uid_effect, "landlock": _landlock_effect, "seccomp": _seccomp_effect,
}  # fmt: skip


def can_be_read_by(uid: int, paths: Iterable[str]) -> bool:
    """Whether another user gets to all of these paths by their modes alone."""
    pid = os.fork()
    if pid == 0:
        ok = False
        try:
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            ok = all(os.access(p, os.R_OK) for p in paths)
        finally:
            os._exit(0 if ok else 1)
    return os.waitpid(pid, 0)[1] == 0
