"""What was said through the endpoint: a tree of responses for each conversation, the longest unused forgotten first."""

from __future__ import annotations

import dataclasses
import threading
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

from sglrollout.errors import ConfigError
from sglrollout.session.session import Session
from sglrollout.session.trajectory import without_past
from sglrollout.session.turn import Turn
from sglrollout.types import Message

K = TypeVar("K", str, bytes)
_EVICTED_IDS = 100_000


@dataclass(frozen=True, slots=True)
class Exchange:
    """What one response added to its conversation.

    Attributes:
        turn: without the tokens of what came before.
        told: messages that became tokens, as the chat template has them; the last one is the model's.
        messages: the same as the client sent them, and the model's as the client got it.
    """

    turn: Turn
    told: Sequence[Message]
    messages: Sequence[Mapping[str, Any]]


@dataclass(eq=False, slots=True)
class Node:
    """A conversation up to one response. It keeps what is new in that: the rest is in those that it went on from.

    Attributes:
        id: of the response; with several choices, and a number.
        session_id: of the conversation: the id of its first response.
        exchange: what is new.
        bare: the session after this response, without messages, turns and tokens.
        key: of the messages up to and including the response; ``None`` if no chat goes on from it.
        parent: the response that it went on from.
        children: responses that went on from it.
        num_under_way: requests that are about to go on from it.
    """

    id: str
    session_id: str
    exchange: Exchange = field(repr=False)
    bare: Session = field(repr=False)
    key: bytes | None = None
    parent: Node | None = field(default=None, repr=False)
    children: dict[str, Node] = field(default_factory=dict, repr=False)
    num_under_way: int = 0

    @property
    def line(self) -> list[Node]:
        """From the first response of the conversation to this one."""
        line = [self]
        while line[-1].parent is not None:
            line.append(line[-1].parent)
        return line[::-1]

    @property
    def messages(self) -> list[Mapping[str, Any]]:
        """All of them, as the client sent and got them."""
        return [message for node in self.line for message in node.exchange.messages]

    def session(self) -> Session:
        """The session as it was after this response: another one each time, to read or to go on with."""
        exchanges = [node.exchange for node in self.line]
        told = [message for each in exchanges for message in each.told]
        return self.bare._fork_with_past(told, [each.turn for each in exchanges])


def node_of(
    response_id: str,
    session_id: str,
    session: Session,
    parent: Node | None,
    key: bytes | None = None,
    messages: Sequence[Mapping[str, Any]] = (),
) -> Node:
    """A node for the latest response of a session, which went on from ``parent``."""
    former = [] if parent is None else [node.exchange for node in parent.line]
    num_messages = sum(len(each.told) for each in former)
    num_tokens = sum(len(c.prompt_ids) + len(c.token_ids) for c in (each.turn.completion for each in former))
    turn = session.turns[-1]
    turn = dataclasses.replace(turn, completion=without_past(turn.completion, num_tokens))
    exchange = Exchange(turn, session.messages[num_messages:], messages)
    return Node(response_id, session_id, exchange, session._fork_with_past((), ()), key, parent)


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

    @contextmanager
    def going_on(self, keys: Sequence[bytes]) -> Iterator[tuple[Node, int] | None]:
        """The node that the most of these messages were said in, and how many.

        All of them is too many, for something must be left to be answered, unless the model was cut short by its budget
        and is to go on. Of several nodes that say the same, one is taken that the fewest responses went on from or are
        about to, the oldest first: so agents that happen to hear the same keep a conversation each. What is asked in
        the block counts as about to, and if it fails, not at all.
        """
        found = self._match(keys)
        try:
            yield found
        finally:
            if found is not None:
                with self._lock:
                    found[0].num_under_way -= 1

    def _match(self, keys: Sequence[bytes]) -> tuple[Node, int] | None:
        with self._lock:
            for count in range(len(keys), 0, -1):
                found = [*self._by_key.get(keys[count - 1], {}).values()]
                if count == len(keys):
                    found = [node for node in found if node.exchange.turn.finish_reason == "length"]
                if found:
                    node = min(found, key=lambda node: len(node.children) + node.num_under_way)
                    node.num_under_way += 1
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
