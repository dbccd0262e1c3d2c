"""The radix prefix cache: a tree over page-aligned token prefixes, evicted leaf by leaf.

    root (one a salt)
     |- [ids of 62 pages: a system prompt]      locks 2: two running requests read it
     |   |- [ids of 7 pages]                    locks 1
     |   `- [ids of 9 pages]                    locks 1
     `- [ids of 3 pages]                        locks 0, a leaf: may be evicted

The idea of a radix tree over KV pages is SGLang's (Zheng et al. 2024, RadixAttention). Children are
found by the bytes of their first page and compared as arrays, so nothing is hashed token by token.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from tridentlm.core.cache import NO_PAGES, Match
from tridentlm.core.plan import I32


class Node:
    """`key`: int32[pages * page_size], the tokens between the parent's end and this node's."""

    __slots__ = ("children", "key", "locks", "pages", "parent", "salt", "used")

    def __init__(self, key: I32, pages: I32, parent: Node | None, salt: str, used: int) -> None:
        self.key = key
        self.pages = pages
        self.parent = parent
        self.salt = salt
        self.used = used  # the time of its last unlock
        self.locks = 0  # handles at this node and below
        self.children: dict[bytes, Node] = {}

    @property
    def is_leaf(self) -> bool:
        """Whether it may be evicted now."""
        return not self.children and not self.locks and self.parent is not None


class RadixCache:
    """Implements `PrefixCache`; a handle is the node where the prefix ends.

    Evictable leaves are in a heap by the time of their last use. Its entries are dropped when they
    surface, if their node was used, locked or extended since; see `_offer`.
    """

    def __init__(self, page_size: int) -> None:
        self.page_size = page_size
        self.evictable = 0
        self._roots: dict[str, Node] = {}
        self._num_nodes = 0
        self._clock = itertools.count()
        self._leaves: list[tuple[int, int, Node]] = []  # used, tie-break, node

    def match_prefix(self, ids: I32, salt: str = "") -> Match:
        node, length, inside = self._find(ids, self._root(salt))
        if inside < len(node.key):
            node = self._split(node, inside)
        return Match(_path_pages(node), length, node)

    def match_length(self, ids: I32, salt: str = "") -> int:
        root = self._roots.get(salt)
        return 0 if root is None else self._find(ids, root)[1]

    def lock(self, handle: Node) -> None:
        for node in _path(handle):
            if not node.locks:
                self.evictable -= len(node.pages)
            node.locks += 1

    def unlock(self, handle: Node) -> None:
        now = next(self._clock)
        root = handle
        for node in _path(handle):
            node.locks -= 1
            assert node.locks >= 0, "unlocked more often than locked"
            node.used = now
            if not node.locks:
                self.evictable += len(node.pages)
            root = node
        self._offer(handle)
        self._drop_if_empty(root)

    def insert(self, ids: I32, pages: I32, shared: int, salt: str = "") -> Match:
        count = len(ids) // self.page_size
        ids = ids[: count * self.page_size]
        node, length, inside = self._find(ids, self._root(salt))
        if inside < len(node.key):
            node = self._split(node, inside)
        if length < len(ids):
            held = length // self.page_size
            assert held >= shared, "a locked prefix is missing"
            # Copies: the caller's arrays are rows of a table that others will fill.
            node = Node(ids[length:].copy(), pages[held:count].copy(), node, salt, node.used)
            self._attach(node)
            self._num_nodes += 1
            self.evictable += count - held
            node.used = next(self._clock)
            self._offer(node)
        return Match(_path_pages(node), len(ids), node)

    def evict_until(self, pages: int) -> I32:
        gone: list[I32] = []
        missing = pages
        while missing > 0 and self._leaves:
            used, _, node = heapq.heappop(self._leaves)
            if not node.is_leaf or node.used != used:
                continue
            cut = max(len(node.pages) - missing, 0)
            gone.append(node.pages[cut:])
            missing -= len(node.pages) - cut
            self._trim(node, cut)
        taken: I32 = np.concatenate([NO_PAGES, *gone])
        self.evictable -= len(taken)
        return taken

    def check(self, holders: Iterable[tuple[Node, I32]]) -> I32:
        locks: dict[Node, int] = {}
        for handle, pages in holders:
            held = _path_pages(handle)[: len(pages)]
            assert np.array_equal(held, pages), "a request reads pages that it has not locked"
            for node in _path(handle):
                locks[node] = locks.get(node, 0) + 1
        nodes = [node for root in self._roots.values() for node in _subtree(root)]
        offered = {(node, used) for used, _, node in self._leaves}
        for node in nodes:
            assert node.locks == locks.pop(node, 0), "locks differ from handles"
            assert len(node.key) == len(node.pages) * self.page_size
            assert not node.is_leaf or (node, node.used) in offered, "a leaf that nobody evicts"
            for first, child in node.children.items():
                assert child.parent is node
                assert len(child.pages)
                assert first == self._first_page(child)
        assert not locks, "a handle outside the tree"
        assert self._num_nodes == len(nodes) - len(self._roots)
        assert self.evictable == sum(len(node.pages) for node in nodes if not node.locks)
        return np.concatenate([NO_PAGES, *(node.pages for node in nodes)])

    def _root(self, salt: str) -> Node:
        root = self._roots.get(salt)
        if root is None:
            root = self._roots[salt] = Node(NO_PAGES, NO_PAGES, None, salt, 0)
        return root

    def _find(self, ids: I32, root: Node) -> tuple[Node, int, int]:
        """The last node that `ids` reach, tokens matched in all, and of these in that node."""
        node, length, inside, size = root, 0, 0, self.page_size
        while inside == len(node.key):
            child = node.children.get(ids[length : length + size].tobytes())
            if child is None:
                break
            node = child
            inside = self._common(node.key, ids[length:])
            length += inside
        return node, length, inside

    def _common(self, key: I32, ids: I32) -> int:
        count = min(len(key), len(ids))
        differs = key[:count] != ids[:count]
        first = int(differs.argmax())
        if not differs[first]:
            first = count
        return first - first % self.page_size

    def _split(self, node: Node, tokens: int) -> Node:
        """Cuts a node in two after `tokens`; returns the upper, which handles below lock too."""
        cut = tokens // self.page_size
        upper = Node(node.key[:tokens], node.pages[:cut], node.parent, node.salt, node.used)
        upper.locks = node.locks
        self._attach(upper)
        node.key, node.pages, node.parent = node.key[tokens:], node.pages[cut:], upper
        self._attach(node)
        self._num_nodes += 1
        return upper

    def _trim(self, node: Node, pages: int) -> None:
        """Keeps the first `pages` pages of a leaf; without any it leaves the tree."""
        parent = node.parent
        assert parent is not None
        if pages:
            node.key, node.pages = node.key[: pages * self.page_size], node.pages[:pages]
            self._offer(node)
            return
        del parent.children[self._first_page(node)]
        node.parent = None
        self._num_nodes -= 1
        self._offer(parent)
        self._drop_if_empty(parent)

    def _attach(self, node: Node) -> None:
        assert node.parent is not None
        node.parent.children[self._first_page(node)] = node

    def _first_page(self, node: Node) -> bytes:
        first: I32 = node.key[: self.page_size]
        return first.tobytes()

    def _offer(self, node: Node) -> None:
        """Notes that a node may be a leaf now. Old notes go when they are the larger part."""
        if not node.is_leaf:
            return
        heapq.heappush(self._leaves, (node.used, next(self._clock), node))
        if len(self._leaves) > 2 * self._num_nodes + 64:
            latest = {
                n: (used, i, n) for used, i, n in self._leaves if n.is_leaf and n.used == used
            }
            self._leaves = list(latest.values())
            heapq.heapify(self._leaves)

    def _drop_if_empty(self, root: Node) -> None:
        if root.parent is None and not root.children and not root.locks:
            self._roots.pop(root.salt, None)


def _path(node: Node | None) -> Iterator[Node]:
    """From `node` to its root."""
    while node is not None:
        yield node
        node = node.parent


def _path_pages(node: Node) -> I32:
    pages = [step.pages for step in _path(node)]
    return pages[0] if len(pages) == 1 else np.concatenate(pages[::-1])


def _subtree(root: Node) -> Iterator[Node]:
    waiting = [root]
    while waiting:
        node = waiting.pop()
        yield node
        waiting += node.children.values()
