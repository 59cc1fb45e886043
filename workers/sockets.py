"""Freeing a process that hangs in a gloo collective, by shutting its connections down.

A gloo collective waits for its peers until its timeout. When a peer dies, only those who wait
for that very peer hear of it; the others wait for one another. torch cannot help: aborting a gloo
group does nothing while anything refers to it, and the hanging frames do. But an operation fails
at once when its connection is shut down, at both ends, so one process that does so frees all.

A generation's connections are those that appeared while it was formed. A socket is known by its
inode, for a file number may be used again.
"""

import os
import socket
from pathlib import Path

_DESCRIPTORS = Path("/proc/self/fd")


class Connections:
    """The connections of one generation: `Connections()` before it forms, `seal` after."""

    def __init__(self) -> None:
        self._before = frozenset(_open_sockets())
        self._formed: frozenset[str] | None = None

    def seal(self) -> None:
        """The generation has formed: sockets that appear from now on are not its own."""
        self._formed = frozenset(_open_sockets())

    def shut_down(self) -> int:
        """End them all; safe from another thread, while the generation forms too.

        Returns:
            How many there were.
        """
        mine = {
            inode: descriptor
            for inode, descriptor in _open_sockets().items()
            if inode not in self._before and (self._formed is None or inode in self._formed)
        }
        return sum(_shut_down(descriptor) for descriptor in mine.values())


def _open_sockets() -> dict[str, int]:
    """Inode -> file number of every socket of this process."""
    found: dict[str, int] = {}
    for entry in os.listdir(_DESCRIPTORS):  # noqa: PTH208 - names only; some vanish meanwhile
        try:
            target = os.readlink(_DESCRIPTORS / entry)  # noqa: PTH115 - not a path
        except FileNotFoundError:
            continue
        if target.startswith("socket:"):
            found[target] = int(entry)
    return found


def _shut_down(descriptor: int) -> bool:
    """Shut one connection down, unless it is not one: gloo exits if its listener fails."""
    try:
        connection = socket.socket(fileno=os.dup(descriptor))
    except OSError:
        return False  # closed since it was listed
    with connection:
        is_tcp = connection.family in {socket.AF_INET, socket.AF_INET6}
        if not is_tcp or connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return False
        try:
            connection.shutdown(socket.SHUT_RDWR)
        except OSError:
            return False  # not connected, or not any more
    return True
