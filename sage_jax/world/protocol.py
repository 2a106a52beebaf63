"""How the trainer and its world processes talk: frames of JSON with a length before them, and nothing else.

No pickle ever crosses this border, because one side of it runs model-written code. A frame is four bytes of
length (big endian) and that many bytes of ASCII JSON (lone surrogates travel as escapes). A reader states the
largest frame that it takes: a process that announces more is treated as broken, not obeyed.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct

_LENGTH = struct.Struct(">I")


class FrameError(Exception):
    """The other side sent something that is no frame: too long, cut off, or not a JSON object."""


def encode(message: dict) -> bytes:
    """One frame."""
    body = json.dumps(message).encode("ascii")
    return _LENGTH.pack(len(body)) + body


def decode(body: bytes) -> dict:
    """The object in the body of a frame; raises FrameError."""
    try:
        message = json.loads(body)
    except (ValueError, RecursionError, MemoryError) as error:
        raise FrameError(f"a frame of {len(body)} bytes cannot be read: {type(error).__name__}: {error}") from error
    if not isinstance(message, dict):
        raise FrameError(f"a frame holds a {type(message).__name__}, not an object")
    return message


def send(channel: socket.socket, message: dict) -> None:
    """Blocking send, for the process side."""
    channel.sendall(encode(message))


def receive(channel: socket.socket) -> dict | None:
    """Blocking receive, for the process side; None when the other side has closed."""
    head = _read_exactly(channel, _LENGTH.size)
    if head is None:
        return None
    body = _read_exactly(channel, _LENGTH.unpack(head)[0])
    if body is None:
        raise FrameError("the channel closed inside a frame")
    return decode(body)


def _read_exactly(channel: socket.socket, size: int) -> bytes | None:
    parts = []
    while size:
        part = channel.recv(min(size, 1 << 20))
        if not part:
            if parts:
                raise FrameError("the channel closed inside a frame")
            return None
        parts.append(part)
        size -= len(part)
    return b"".join(parts)


class Frames:
    """Cuts a stream of bytes into frames; for a side that reads what has arrived and never waits for more."""

    def __init__(self, max_bytes: int):
        self._max_bytes = max_bytes
        self._held = bytearray()

    def feed(self, data: bytes) -> list[dict]:
        """The frames that are whole now.

        Raises:
          FrameError: a frame longer than `max_bytes` is announced, or a frame is not a JSON object.
        """
        self._held += data
        frames = []
        while len(self._held) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._held)
            if size > self._max_bytes:
                raise FrameError(f"a frame of {size} bytes was announced, at most {self._max_bytes} are taken")
            if len(self._held) < _LENGTH.size + size:
                break
            frames.append(decode(bytes(self._held[_LENGTH.size : _LENGTH.size + size])))
            del self._held[: _LENGTH.size + size]
        return frames


async def read_frame(reader: asyncio.StreamReader, max_bytes: int) -> dict:
    """The next frame, for the trainer's side.

    Raises:
      FrameError: the frame is longer than `max_bytes`, or not a JSON object.
      asyncio.IncompleteReadError: the other side closed.
    """
    (size,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    if size > max_bytes:
        raise FrameError(f"a frame of {size} bytes was announced, at most {max_bytes} are taken")
    return decode(await reader.readexactly(size))
