"""The agent's side's end of its channel: API calls go out over it, operations come in, and neither is taken for the other.

The code of a step may be interrupted at any moment, may run short of memory while an answer arrives, and may have threads that call APIs
in the middle of a step or after it. So requests are numbered, an answer that nobody waits for is dropped, what is left of a frame
whose reading was cut short is skipped, one thread at a time is between a request and its answer, and an interrupt waits until the
main thread is out of here.

Frames to the engine's side: {"api": request, "n": number} and {"done": reply}; from it: {"op": ...} and {"n": number, ...}.
"""

from __future__ import annotations

import collections
import itertools
import os
import select
import socket
import struct
import threading
from typing import Any

from sage_jax.world import protocol

_LENGTH = struct.Struct(">I")


class Channel:
    """Made in the main thread of the process."""

    def __init__(self, channel: socket.socket):
        self._socket = channel
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._left = 0  # bytes to come of the frame that is being read
        self._operations: collections.deque[dict[str, Any]] = collections.deque()  # read by a thread that waited for its answer
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._main = threading.get_ident()
        self._busy = False
        self._interrupt: BaseException | None = None

    def interrupt(self, error: BaseException) -> None:
        """For a signal handler: raises `error`, here or as soon as the main thread has its answer."""
        if not self._busy:
            raise error
        self._interrupt = error

    def request(self, api: dict[str, Any]) -> dict[str, Any]:
        """The answer to an API call, from any thread; the process ends if the engine's side is gone."""
        if threading.get_ident() != self._main:
            return self._request(api)
        self._interrupt, self._busy = None, True
        try:
            answer = self._request(api)
        finally:
            self._busy = False
        if self._interrupt is not None:
            raise self._interrupt
        return answer

    def _request(self, api: dict[str, Any]) -> dict[str, Any]:
        with self._lock:
            number = next(self._numbers)
            protocol.send(self._socket, {"api": api, "n": number})
            while (frame := self._receive()) is not None:
                if frame.get("n") == number:
                    return frame
                if "op" in frame:
                    self._operations.append(frame)
                    os.eventfd_write(self._wake, 1)
        os._exit(0)

    def operation(self) -> dict[str, Any] | None:
        """The next operation, for the main thread; None when the engine's side has closed."""
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._wake, select.POLLIN)
        while True:
            poll.poll()
            with self._lock:
                if self._operations:
                    os.eventfd_read(self._wake)
                    return self._operations.popleft()
                if self._readable():  # a thread may have been faster
                    frame = self._receive()
                    if frame is None or "op" in frame:
                        return frame

    def done(self, reply: dict[str, Any]) -> None:
        """Answers the operation."""
        with self._lock:
            protocol.send(self._socket, {"done": reply})

    def fork(self) -> tuple[int, socket.socket | None]:
        """In the middle of an operation: says that it is ready, takes a descriptor, and forks.

        Returns:
          In the copy (0, its socket), here (its process id, None).

        Raises:
          OSError: there can be no further process.
        """
        with self._lock:  # no thread is between a request and its answer, in either process
            protocol.send(self._socket, {"done": {"ready": True}})
            _, (descriptor,), _, _ = socket.recv_fds(self._socket, 1, 1)
            try:
                pid = os.fork()
            except OSError:
                os.close(descriptor)
                raise
            if pid:
                os.close(descriptor)
                return pid, None
        self._socket.close()
        os.close(self._wake)
        return 0, socket.socket(fileno=descriptor)

    def _readable(self) -> bool:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        return bool(poll.poll(0))

    def _receive(self) -> dict[str, Any] | None:
        while self._left:
            if not self._part():
                return None
        head = b""
        while len(head) < _LENGTH.size:
            part = self._socket.recv(_LENGTH.size - len(head))
            if not part:
                return None
            head += part
        (self._left,) = _LENGTH.unpack(head)
        parts = []
        while self._left:
            part = self._part()
            if not part:
                return None
            parts.append(part)
        return protocol.decode(b"".join(parts))

    def _part(self) -> bytes:
        part = self._socket.recv(min(self._left, 1 << 20))
        self._left -= len(part)
        return part
