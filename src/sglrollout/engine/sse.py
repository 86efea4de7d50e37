"""Server-sent events, as they come in pieces."""

from __future__ import annotations

import re

_LINE_END = re.compile(rb"\r\n|\n|\r")


class EventTooLongError(Exception):
    """An event that does not end."""


class EventReader:
    """Finds the data of each event in a stream of bytes; all else that events may have is skipped.

    Args:
        most_bytes: of one event.
    """

    def __init__(self, most_bytes: int) -> None:
        self._most_bytes = most_bytes
        self._rest = bytearray()
        self._searched = 0
        self._lines: list[bytes] = []
        self._num_bytes = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """The data of the events that end in this piece.

        Raises:
            EventTooLongError: one is longer than ``most_bytes``.
        """
        self._rest += piece
        events: list[bytes] = []
        begin = 0
        while match := _LINE_END.search(self._rest, max(begin, self._searched)):
            if match[0] == b"\r" and match.end() == len(self._rest):
                break  # perhaps half of \r\n
            self._take(bytes(self._rest[begin : match.start()]), events)
            begin = match.end()
        del self._rest[:begin]
        self._searched = max(0, len(self._rest) - 1)
        if self._num_bytes + len(self._rest) > self._most_bytes:
            raise EventTooLongError(f"an event is longer than {self._most_bytes} bytes")
        return events

    def _take(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._lines:
                events.append(b"\n".join(self._lines))
            self._lines, self._num_bytes = [], 0
            return
        name, _, value = line.partition(b":")
        if name == b"data":
            value = value[1:] if value[:1] == b" " else value
            self._lines.append(value)
            self._num_bytes += len(line) + 1
