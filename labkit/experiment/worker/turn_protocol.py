"""The turn protocol: messages between live workers and the coordinator that grants their turns.

A message is one line, a JSON array of a verb and a value. Worker and coordinator hold the ends of a
socket pair. Only a worker that has received a message works; when it has answered, the coordinator
stops it with all its descendants (:mod:`labkit.experiment.launch.turn_coordinator`).
In the order of a run::

    worker                          coordinator

    ["hello", 2]                                            its version of the protocol
                                    ["probe", null]         time the machine's probe
    ["probed", null]
                                    ["load", null]          load, perhaps while others load
    ["loaded", null]
                                    ["warm_up", null]
    ["parts", [["decode", 30]]]                             kernels: each part's name and rounds
                                    ["turn", ["decode", 2]] one round of a part, in third position
    ["done", null]
                                    ["end", null]           all rounds are over
    (it writes its record and ends)

    ["slices", null]                                        engines: turns have a length
                                    ["turn", 0.1]           a slice of so many seconds
    ["done", null]
    ["values", [...]]                                       instead of done: all is served
                                    ["gathered", [...]]     the values of all workers, and
    (it writes its record and ends)                         the index of its own first value

After ``end`` or ``gathered`` a worker may send ``parts``, ``slices`` or ``values`` again: the clips
of a video workload have rounds, then the workers exchange which clips they have served, then each
does its job in one round.

The end of the connection says that the other side has ended.
"""

from __future__ import annotations

import json
import socket
from typing import Any

from labkit.experiment import StudyError

VERSION = 2
READ_BYTES = 1 << 16

Message = tuple[str, Any]  # verb, value


class ProtocolError(StudyError):
    """The other side sent something that has no meaning at this point. The message is one line."""


def encode(verb: str, value: Any = None) -> bytes:
    """Return a message as it is sent."""
    return json.dumps([verb, value]).encode() + b"\n"


class Channel:
    """One end of the connection between a worker and its coordinator."""

    def __init__(self, connection: socket.socket) -> None:
        self._connection = connection
        self._received = b""

    def fileno(self) -> int:
        """Return the file descriptor, which is readable when a message has arrived."""
        return self._connection.fileno()

    def send(self, verb: str, value: Any = None) -> None:
        """Send a message. Raises ``OSError`` if the other side has ended."""
        self._connection.sendall(encode(verb, value))

    def send_at_once(self, data: memoryview) -> memoryview:
        """Send what fits into the connection while the other side does not read; return the rest.

        ``data``: encoded messages. Raises ``OSError`` if the other side has ended.
        """
        self._connection.setblocking(False)
        try:
            sent = self._connection.send(data)
        except BlockingIOError:
            sent = 0
        finally:
            self._connection.setblocking(True)
        return data[sent:]

    def receive(self) -> Message | None:
        """Wait for a message and return it, or None if the other side has ended.

        Raises ``ProtocolError`` if a line is not a message.
        """
        while b"\n" not in self._received:
            try:
                data = self._connection.recv(READ_BYTES)
            except ConnectionError:
                return None
            if not data:
                return None
            self._received += data
        line, self._received = self._received.split(b"\n", 1)
        try:
            verb, value = json.loads(line)
        except ValueError:
            raise ProtocolError(f"not a message of the turn protocol: {line[:80]!r}") from None
        return str(verb), value

    def expect(self, *verbs: str) -> Message:
        """Wait for a message with one of ``verbs``.

        Raises ``ProtocolError`` if another message has arrived, or the other side has ended.
        """
        message = self.receive()
        if message is None or message[0] not in verbs:
            arrived = "the end of the connection" if message is None else message[0]
            raise ProtocolError(f"turn protocol: expected {' or '.join(verbs)}, got {arrived}")
        return message

    def close(self) -> None:
        self._connection.close()
