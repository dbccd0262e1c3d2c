"""The radix prefix cache: a tree over page-aligned token prefixes, evicted leaf by leaf.

    root (one a salt)
     |- [ids of 62 pages: a system prompt]      locks 2: two running requests read it
     |   |- [ids of 7 pages]                    locks 1
     |   `- [ids of 9 pages]                    locks 1
     `- [ids of 3 pages]                        locks 0, a leaf: may be evicted

The idea of a radix tree over KV pages is SGLang's (Zheng et al. 2024, RadixAttention). Ids are kept
as bytes: a child is found by its first page, its other pages are one comparison, and only where a
lookup leaves the tree inside a node is the place searched for.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator

import numpy as np

from tridentlm.core.cache import NO_PAGES, Match
from tridentlm.core.plan import I32


class Node:
    """`key`: the tokens between the parent's end and this node's, int32 as bytes."""

    __slots__ = ("children", "key", "locks", "pages", "parent", "salt", "used")

    def __init__(self, key: bytes, pages: I32, parent: Node | None, salt: str, used: int) -> None:
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
        self._unit = page_size * NO_PAGES.itemsize  # bytes of one page of ids
        self._roots: dict[str, Node] = {}
        self._num_nodes = 0
        self._clock = itertools.count()
        self._leaves: list[tuple[int, int, Node]] = []  # used, tie-break, node

    def match_prefix(self, ids: I32, salt: str = "") -> Match:
        node, held, inside = self._find(ids.tobytes(), self._root(salt))
        if inside < len(node.pages):
            node = self._split(node, inside)
        return Match(_path_pages(node), held * self.page_size, node)

    def match_length(self, ids: I32, salt: str = "") -> int:
        root = self._roots.get(salt)
        return 0 if root is None else self._find(ids.tobytes(), root)[1] * self.page_size

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
        key = ids[: count * self.page_size].tobytes()
        node, held, inside = self._find(key, self._root(salt))
        if inside < len(node.pages):
            node = self._split(node, inside)
        if held < count:
            assert held >= shared, "a locked prefix is missing"
            # A copy: the caller's array is a row of a table that others will fill.
            tail = pages[held:count].copy()
            node = Node(key[held * self._unit :], tail, node, salt, node.used)
            self._attach(node)
            self._num_nodes += 1
            self.evictable += count - held
            node.used = next(self._clock)
            self._offer(node)
        return Match(_path_pages(node), count * self.page_size, node)

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
            assert len(node.key) == len(node.pages) * self._unit
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
            root = self._roots[salt] = Node(b"", NO_PAGES, None, salt, 0)
        return root

    def _find(self, ids: bytes, root: Node) -> tuple[Node, int, int]:
        """The last node that `ids` reach, pages matched in all, and of these in that node."""
        node, end, unit = root, 0, self._unit
        while True:
            child = node.children.get(ids[end : end + unit])
            if child is None:
                return node, end // unit, len(node.pages)
            node = child
            if not ids.startswith(node.key, end):
                inside = self._common(node.key, ids[end : end + len(node.key)])
                return node, end // unit + inside, inside
            end += len(node.key)

    def _common(self, key: bytes, ids: bytes) -> int:
        """Whole pages that two different keys begin with alike."""
        count = min(len(key), len(ids)) // self._unit
        ours, theirs = (
            np.frombuffer(x, np.int32, count * self.page_size).reshape(count, -1)
            for x in (key, ids)
        )
        differs = (ours != theirs).any(axis=1)
        return int(differs.argmax()) if differs.any() else count

    def _split(self, node: Node, pages: int) -> Node:
        """Cuts a node in two after `pages`; returns the upper, which handles below lock too."""
        cut = pages * self._unit
        upper = Node(node.key[:cut], node.pages[:pages], node.parent, node.salt, node.used)
        upper.locks = node.locks
        self._attach(upper)
        node.key, node.pages, node.parent = node.key[cut:], node.pages[pages:], upper
        self._attach(node)
        self._num_nodes += 1
        return upper

    def _trim(self, node: Node, pages: int) -> None:
        """Keeps the first `pages` pages of a leaf; without any it leaves the tree."""
        parent = node.parent
        assert parent is not None
        if pages:
            node.key, node.pages = node.key[: pages * self._unit], node.pages[:pages]
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
        return node.key[: self._unit]

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
