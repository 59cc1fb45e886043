"""Where workers meet: one TCP store that outlives all of them, one prefix a generation.

The store lives beside the driver, so that no worker's death takes it along. torch is imported
when a store is made, so that importing this module stays cheap.
"""

from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING

from workers.protocol import Membership

if TYPE_CHECKING:
    from torch._C._distributed_c10d import PrefixStore, TCPStore


@dataclass(frozen=True, slots=True)
class StoreHandle:
    """A running store. It stops when the last reference to `store` goes.

    Args:
        host: the name or address workers reach it by.
        port: the port it listens on, chosen by the system.
        store: the server itself.
    """

    host: str
    port: int
    store: "TCPStore"


def start_store(host: str, *, timeout_s: float = 60.0) -> StoreHandle:
    """Start the store on a free port of this machine.

    Args:
        host: the address of this machine that the workers can reach.
        timeout_s: how long any wait on the store may take.
    """
    from torch._C._distributed_c10d import TCPStore  # noqa: PLC0415 - keeps torch out of importers

    store = TCPStore(
        host, 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=timeout_s)
    )
    return StoreHandle(host=host, port=store.port, store=store)


def connect(membership: Membership) -> "PrefixStore":
    """The generation's own part of the store.

    A worker that arrives late or a second time can only meet workers of the same generation.
    """
    from torch._C._distributed_c10d import PrefixStore, TCPStore  # noqa: PLC0415 - as above

    store = TCPStore(
        membership.store_host,
        membership.store_port,
        is_master=False,
        timeout=timedelta(seconds=membership.join_timeout_s),
    )
    return PrefixStore(f"generation{membership.generation}", store)
