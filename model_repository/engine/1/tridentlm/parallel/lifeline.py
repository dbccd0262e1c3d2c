"""How a rank notices that another has ended: the socket between them hangs up."""

from __future__ import annotations

import select
from collections.abc import Sequence
from multiprocessing.connection import Connection


def wait_for_hangup(connections: Sequence[Connection]) -> int:
    """Returns the index of the first whose other end is closed, whatever is still unread in it."""
    descriptors = [connection.fileno() for connection in connections]
    poller = select.poll()
    for descriptor in descriptors:
        poller.register(descriptor, select.POLLRDHUP)
    return descriptors.index(poller.poll()[0][0])
