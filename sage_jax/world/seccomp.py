"""The filter of system calls for the process that runs model-written code: which are refused, as a classic BPF program over (number,
architecture, arguments) of a call. Sources: seccomp(2), the kernel's tables of system calls, clone(2), fcntl(2), mmap(2).
"""

from __future__ import annotations

import signal
import struct

# name: (x86-64, aarch64); None where the architecture has no such call.
_CALLS: dict[str, tuple[int | None, int | None]] = {
    "socket": (41, 198), "connect": (42, 203), "accept": (43, 202), "accept4": (288, 242), "bind": (49, 200), "listen": (50, 201),
    "ptrace": (101, 117), "process_vm_readv": (310, 270), "process_vm_writev": (311, 271), "tkill": (200, 130),
    "rt_sigqueueinfo": (129, 138), "rt_tgsigqueueinfo": (297, 240), "pidfd_open": (434, 434), "pidfd_getfd": (438, 438),
    "pidfd_send_signal": (424, 424), "mount": (165, 40), "umount2": (166, 39), "pivot_root": (155, 41), "chroot": (161, 51),
    "open_tree": (428, 428), "move_mount": (429, 429), "fsopen": (430, 430), "fsconfig": (431, 431), "fsmount": (432, 432),
    "fspick": (433, 433), "mount_setattr": (442, 442), "setns": (308, 268), "unshare": (272, 97), "bpf": (321, 280),
    "perf_event_open": (298, 241), "io_uring_setup": (425, 425), "io_uring_enter": (426, 426), "io_uring_register": (427, 427),
    "add_key": (248, 217), "request_key": (249, 218), "keyctl": (250, 219), "userfaultfd": (323, 282), "init_module": (175, 105),
    "finit_module": (313, 273), "delete_module": (176, 106), "reboot": (169, 142), "swapon": (167, 224), "swapoff": (168, 225),
    "kexec_load": (246, 104), "kexec_file_load": (320, 294), "open_by_handle_at": (304, 265), "name_to_handle_at": (303, 264),
    "mknod": (133, None), "mknodat": (259, 33), "settimeofday": (164, 170), "clock_settime": (227, 112), "adjtimex": (159, 171),
    "sethostname": (170, 161), "setdomainname": (171, 162), "shmget": (29, 194), "shmat": (30, 196), "shmctl": (31, 195),
    "msgget": (68, 186), "semget": (64, 190), "mq_open": (240, 180), "acct": (163, 89), "quotactl": (179, 60), "syslog": (103, 116),
    "personality": (135, 92), "fanotify_init": (300, 262), "execve": (59, 221), "execveat": (322, 281), "memfd_create": (319, 279),
    "memfd_secret": (447, 447), "prlimit64": (302, 261), "setrlimit": (160, 164), "timer_create": (222, 107),
}  # fmt: skip
_ATTRIBUTES: dict[str, tuple[int | None, int | None]] = {
    "chmod": (90, None), "fchmod": (91, 52), "fchmodat": (268, 53), "fchmodat2": (452, 452), "chown": (92, None), "fchown": (93, 55),
    "lchown": (94, None), "fchownat": (260, 54), "utime": (132, None), "utimes": (235, None), "futimesat": (261, None),
    "utimensat": (280, 88), "setxattr": (188, 5), "lsetxattr": (189, 6), "fsetxattr": (190, 7), "removexattr": (197, 14),
    "lremovexattr": (198, 15), "fremovexattr": (199, 16),
}  # fmt: skip
_KILL, _TGKILL, _CLONE, _CLONE3 = (62, 129), (234, 131), (56, 220), (435, 435)
_FCNTL, _IOCTL, _MMAP = (72, 25), (16, 29), (9, 222)
_SEND_SIGNALS = ((_FCNTL, (8, 15, 10)), (_IOCTL, (0x8901, 0x8902)))  # F_SETOWN, F_SETOWN_EX, F_SETSIG; FIOSETOWN, SIOCSPGRP
_ARCHITECTURES = {"x86_64": (0, 0xC000003E), "aarch64": (1, 0xC00000B7)}
_REFUSED_CLONES = 0x7E028080  # CLONE_NEW* and CLONE_PARENT of clone(2)
_EXIT_SIGNAL = 0xFF  # bits of clone's flags: what the parent is sent at the end; SIGCHLD, or nothing for a thread
_SHARED_MEMORY = 0x21  # MAP_SHARED | MAP_ANONYMOUS: memory that outlives its pages in the process, where it cannot be counted
_LOAD, _AND, _JUMP_EQUAL, _JUMP_ANY_BIT, _JUMP_AT_LEAST, _RETURN = 0x20, 0x54, 0x15, 0x45, 0x35, 0x06
_ALLOW, _ERRNO = 0x7FFF0000, 0x00050000
_EPERM, _ENOSYS = 1, 38
_NUMBER, _ARCH, _ARGUMENT = 0, 4, 16  # offsets; arguments are 8 bytes each, low word first


class IsolationError(OSError):
    """A layer could not be taken on."""


def seccomp_program(pid: int, *, guard_attributes: bool, machine: str) -> bytes:
    """The filter as an array of sock_filter, for a process `pid` that may send signals to itself alone.

    Raises:
      IsolationError: for an architecture whose numbers are not known.
    """
    if machine not in _ARCHITECTURES:
        raise IsolationError(_ENOSYS, f"seccomp: system call numbers of {machine} are not known; known: {', '.join(_ARCHITECTURES)}")
    column, arch = _ARCHITECTURES[machine]
    refused = {**_CALLS, **(_ATTRIBUTES if guard_attributes else {})}
    numbers = [n[column] for n in refused.values() if n[column] is not None]
    deny, missing = _ERRNO | _EPERM, _ERRNO | _ENOSYS
    code: list[tuple[int, int, int, int]] = [
        (_LOAD, 0, 0, _ARCH),
        (_JUMP_EQUAL, 1, 0, arch),
        (_RETURN, 0, 0, deny),
        (_LOAD, 0, 0, _NUMBER),
        (_JUMP_AT_LEAST, 0, 1, 0x40000000),  # the x32 numbers
        (_RETURN, 0, 0, missing),
        (_JUMP_EQUAL, 0, 1, _CLONE3[column]),  # its flags cannot be seen from here; the C library falls back to clone
        (_RETURN, 0, 0, missing),
    ]
    for number in numbers:
        code += [(_JUMP_EQUAL, 0, 1, number), (_RETURN, 0, 0, deny)]
    for number, signal_at in ((_KILL[column], 1), (_TGKILL[column], 2)):
        code += [
            (_JUMP_EQUAL, 0, 7, number),
            (_LOAD, 0, 0, _ARGUMENT),
            (_JUMP_EQUAL, 0, 4, pid),
            (_LOAD, 0, 0, _ARGUMENT + 8 * signal_at),
            (_JUMP_EQUAL, 2, 0, signal.SIGKILL),
            (_JUMP_EQUAL, 1, 0, signal.SIGSTOP),
            (_RETURN, 0, 0, _ALLOW),
            (_RETURN, 0, 0, deny),
        ]
    for call, commands in _SEND_SIGNALS:  # the kernel would send signals for them, SIGKILL too
        code += [(_JUMP_EQUAL, 0, 2 * len(commands) + 2, call[column]), (_LOAD, 0, 0, _ARGUMENT + 8)]
        for command in commands:
            code += [(_JUMP_EQUAL, 0, 1, command), (_RETURN, 0, 0, deny)]
        code += [(_RETURN, 0, 0, _ALLOW)]
    code += [
        (_JUMP_EQUAL, 0, 5, _MMAP[column]),
        (_LOAD, 0, 0, _ARGUMENT + 8 * 3),
        (_AND, 0, 0, _SHARED_MEMORY),
        (_JUMP_EQUAL, 0, 1, _SHARED_MEMORY),
        (_RETURN, 0, 0, deny),
        (_RETURN, 0, 0, _ALLOW),
        (_JUMP_EQUAL, 0, 6, _CLONE[column]),
        (_LOAD, 0, 0, _ARGUMENT),
        (_JUMP_ANY_BIT, 3, 0, _REFUSED_CLONES),
        (_AND, 0, 0, _EXIT_SIGNAL),
        (_JUMP_EQUAL, 2, 0, 0),
        (_JUMP_EQUAL, 1, 0, signal.SIGCHLD),
        (_RETURN, 0, 0, deny),
        (_RETURN, 0, 0, _ALLOW),
    ]
    return b"".join(struct.pack("=HBBI", *line) for line in code)
