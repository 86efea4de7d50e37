"""A sample's tokens as they come, a chunk at a time, for one reader."""

from __future__ import annotations

from typing import NamedTuple

from sglrollout.errors import fresh
from sglrollout.generation.sample import Sample


class Part(NamedTuple):
    """Tokens of one weight version, and whether they are the last."""

    token_ids: tuple[int, ...]
    logprobs: tuple[float, ...] | None
    weight_version: int
    last: bool


class ChunkReader:
    """Reads a sample from its beginning.

    Args:
        chunk_tokens: in a part, at most.
    """

    def __init__(self, sample: Sample, chunk_tokens: int) -> None:
        self.sample, self._chunk_tokens = sample, chunk_tokens
        self._num_read = 0

    async def next(self) -> Part:
        """The next part, once there is one. The last one may be empty.

        Raises:
            Exception: the sample's error, once all its tokens were read.
        """
        request = self.sample.request
        while len(request.token_ids) == self._num_read and not request.ended:
            await request.progress()
        if request.error is not None and len(request.token_ids) == self._num_read:
            raise fresh(request.error)
        return self._read()

    def _read(self) -> Part:
        request, start = self.sample.request, self._num_read
        num_tokens, version, end = len(request.token_ids), request.last_version, start
        if num_tokens > start:
            span = request.span_at(start)
            version, end = span.version, min(start + self._chunk_tokens, span.end)
        self._num_read = end
        self.sample.handed_out = self.sample.handed_out or end > start
        logprobs = None if request.logprobs is None else tuple(request.logprobs[start:end])
        last = request.ended and end == num_tokens and request.error is None
        return Part(tuple(request.token_ids[start:end]), logprobs, version, last)
