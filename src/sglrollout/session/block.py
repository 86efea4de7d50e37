"""How long a session may be used, and by how many at once: one."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import anyio

from sglrollout.errors import LifecycleError

_CLOSED = "this session's block was left: its tokens can be read, and nothing more can be done with it"


class Block:
    """From the making of a session to the end of its ``async with``; those of its forks are inside it.

    Args:
        outer: of the session that this one's was forked from.
    """

    def __init__(self, outer: Block | None = None) -> None:
        self.closed: bool = outer is not None and outer.closed
        self._inner: weakref.WeakSet[Block] = weakref.WeakSet()
        self._scopes: set[anyio.CancelScope] = set()
        self._on_close: Callable[[Exception], None] | None = None
        self._user: object | None = None
        if outer is not None:
            outer._inner.add(self)

    def check(self, idle: bool = True) -> None:
        """Refuse a use.

        Raises:
            LifecycleError: it was left, or (if it must be ``idle``) something runs.
        """
        if self.closed:
            raise LifecycleError(_CLOSED)
        if idle and self._user is not None:
            raise LifecycleError("this session is generating: it does one thing at a time; fork() it to do several")

    def take(self, user: object, on_close: Callable[[Exception], None] | None = None) -> None:
        """Let ``user`` be the one that uses it; ``on_close`` is called when it is left meanwhile."""
        self.check()
        self._user, self._on_close = user, on_close

    def give(self, user: object) -> None:
        """The use by ``user`` is over. May be called on any thread, and more than once."""
        if self._user is user:
            self._user = self._on_close = None

    @contextmanager
    def used(self) -> Iterator[None]:
        """A use, cancelled when it is left."""
        user = object()
        self.take(user)
        try:
            with self.cancelled_at_end():
                yield
        finally:
            self.give(user)

    @contextmanager
    def cancelled_at_end(self) -> Iterator[None]:
        """What runs in here is cancelled when it is left, and then a LifecycleError."""
        with anyio.CancelScope() as scope:
            self._scopes.add(scope)
            try:
                yield
            finally:
                self._scopes.discard(scope)
        if scope.cancelled_caught:
            raise LifecycleError(_CLOSED)

    def close(self) -> None:
        """Cancel what runs in it and in those inside it, and refuse every later use."""
        self.closed = True
        for scope in tuple(self._scopes):
            scope.cancel()
        if self._on_close is not None:
            self._on_close(LifecycleError(_CLOSED))
        for block in tuple(self._inner):
            block.close()
