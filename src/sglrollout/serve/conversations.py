"""What was said through the endpoint: a tree of sessions for each conversation, the longest unused forgotten first."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from sglrollout.errors import ConfigError
from sglrollout.session.session import Session

K = TypeVar("K", str, bytes)
_EVICTED_IDS = 100_000


@dataclass(eq=False, slots=True)
class Node:
    """A conversation up to one response. Its session is never generated with again: what goes on from it is a fork.

    Attributes:
        id: of the response; with several choices, and a number.
        session_id: of the conversation: the id of its first response.
        session: as it was when the response had been sampled.
        key: of the messages up to and including the response; ``None`` if no chat goes on from it.
        parent: the response that it went on from.
        children: responses that went on from it.
        num_matches: requests that went on from it, or still do.
    """

    id: str
    session_id: str
    session: Session = field(repr=False)
    key: bytes | None = None
    parent: Node | None = field(default=None, repr=False)
    children: dict[str, Node] = field(default_factory=dict, repr=False)
    num_matches: int = 0


class Conversations:
    """Nodes by id, and by what was said. May be used from any thread.

    Args:
        most: conversations to keep, with all their branches.
    """

    def __init__(self, most: int) -> None:
        self._most, self._lock = most, threading.Lock()
        self._nodes: dict[str, Node] = {}
        self._by_key: dict[bytes, dict[str, Node]] = {}
        self._by_session: OrderedDict[str, dict[str, Node]] = OrderedDict()
        self._evicted: OrderedDict[str, None] = OrderedDict()

    def add(self, node: Node) -> None:
        """Keep a response."""
        with self._lock:
            if node.parent is not None:
                node.parent.children[node.id] = node
            self._nodes[node.id] = node
            self._by_session.setdefault(node.session_id, {})[node.id] = node
            self._by_session.move_to_end(node.session_id)
            if node.key is not None:
                self._by_key.setdefault(node.key, {})[node.id] = node
            while len(self._by_session) > self._most:
                self._evict(tuple(next(iter(self._by_session.values())).values()))

    def _evict(self, nodes: Sequence[Node]) -> None:
        for node in nodes:
            self._drop(node)
            self._evicted[node.id] = None
        while len(self._evicted) > _EVICTED_IDS:
            self._evicted.popitem(last=False)

    def get(self, response_id: str) -> Node:
        """The node of that id.

        Raises:
            ConfigError: there is none, or there are several choices.
        """
        with self._lock:
            node = self._nodes.get(response_id)
            if node is None:
                raise ConfigError("id", response_id, self._rule(response_id))
            self._by_session.move_to_end(node.session_id)
            return node

    def _rule(self, response_id: str) -> str:
        if f"{response_id}-0" in self._nodes:
            return f'must name one choice of this response, as in "{response_id}-0"'
        if response_id in self._evicted:
            return f"is of a conversation that was evicted: no more than {self._most} are kept (max_conversations)"
        return "is of no response that is kept: it was never given out, or was forgotten"

    def match(self, keys: Sequence[bytes]) -> tuple[Node, int] | None:
        """The node that the most of these messages were said in, and how many.

        All of them is too many, for something must be left to be answered, unless the model was cut short by its budget
        and is to go on. Of several nodes that say the same, one is taken that the fewest requests went on from, the
        oldest first: so agents that happen to hear the same keep a conversation each.
        """
        with self._lock:
            for count in range(len(keys), 0, -1):
                found = [*self._by_key.get(keys[count - 1], {}).values()]
                if count == len(keys):
                    found = [node for node in found if node.session.finish_reason == "length"]
                if found:
                    node = min(found, key=lambda node: node.num_matches)
                    node.num_matches += 1
                    self._by_session.move_to_end(node.session_id)
                    return node, count
        return None

    def leaves(self) -> list[Node]:
        """Nodes that nothing goes on from, in the order in which they were said."""
        with self._lock:
            return [node for node in self._nodes.values() if not node.children]

    def forget(self, node: Node) -> None:
        """Let go of a response, of all that goes on from it, and of what came before and led to nothing else."""
        with self._lock:
            doomed = [node]
            for one in doomed:
                doomed += one.children.values()
            for one in doomed:
                self._drop(one)
            parent = node.parent
            while parent is not None and not parent.children:
                self._drop(parent)
                parent = parent.parent

    def _drop(self, node: Node) -> None:
        if node.parent is not None:
            node.parent.children.pop(node.id, None)
        self._nodes.pop(node.id, None)
        _discard(self._by_session, node.session_id, node)
        if node.key is not None:
            _discard(self._by_key, node.key, node)


def _discard(index: dict[K, dict[str, Node]], key: K, node: Node) -> None:
    nodes = index.get(key, {})
    if nodes.pop(node.id, None) is not None and not nodes:
        del index[key]
