"""Inner Ulysses: trade heads for tokens by all-to-all, launched early and waited for late.

Launch and wait are two autograd functions that share one transfer. Autograd runs the wait's
backward first, so that one launches the gradient's way back, and the launch's backward waits for
it: backward mirrors forward, and what the layer computes between the two hides the transfer in
both directions. Autograd sees a 0-dim token between them, never the buffer in flight, because it
may read or copy whatever it sees.

On a GPU, NCCL runs each collective on a stream of its own: a launch makes that stream wait for
what computes the tensor, a wait makes the computing stream wait for it, and the host for neither.
gloo works in threads of its own.

Shape legend: T local tokens, S = T * u tokens of the shard, H heads, D elements of a head.
"""

from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch.autograd.function import once_differentiable

from workers.attention.counters import Counters

Tensor = torch.Tensor
Direction = Literal["inward", "outward"]


@dataclass(frozen=True, slots=True, eq=False)
class HeadExchange:
    """How a Ulysses group trades [T, H, D] ("outside") for [T * u, H / u, D] ("inside").

    Args:
        group: the Ulysses group.
        ulysses: u, its ranks.
        rows: [S] int64, row i of the shard is row rows[i] of what the group's ranks hold.
        inverse_rows: [S] int64, the other way round.
        counters: bytes and waits go here.
    """

    group: dist.ProcessGroup
    ulysses: int
    rows: Tensor
    inverse_rows: Tensor
    counters: Counters

    def pack(self, x: Tensor, direction: Direction) -> Tensor:
        """[u, T, H / u, D] in one piece of memory: block i is for rank i of the group."""
        if direction == "inward":
            blocks = x.unflatten(1, (self.ulysses, -1)).transpose(0, 1)
        else:
            blocks = x.index_select(0, self.inverse_rows).unflatten(0, (self.ulysses, -1))
        return blocks.contiguous()

    def unpack(self, blocks: Tensor, direction: Direction) -> Tensor:
        """What arrived, block i from rank i, as the tensor it stands for."""
        if direction == "inward":
            return blocks.flatten(0, 1).index_select(0, self.rows)
        return blocks.transpose(0, 1).flatten(1, 2)


class _Flight(NamedTuple):
    """One all-to-all under way; what is sent must stay alive until it has ended."""

    sent: Tensor
    received: Tensor
    work: dist.Work


class _Transfer:
    """The way in and the gradient's way back of one tensor."""

    __slots__ = ("direction", "exchange", "flight", "name")

    def __init__(self, exchange: HeadExchange, name: str, direction: Direction) -> None:
        self.exchange, self.name, self.direction = exchange, name, direction
        self.flight: _Flight | None = None

    def start(self, x: Tensor, direction: Direction, phase: str) -> None:
        """Pack and launch."""
        exchange = self.exchange
        sent = exchange.pack(x, direction)
        # A fresh tensor, not empty_like: gloo fills a strided output in the wrong order.
        received = torch.empty(sent.shape, dtype=sent.dtype, device=sent.device)
        exchange.counters.mark(f"{phase} launch {self.name}")
        work = dist.all_to_all_single(received, sent, group=exchange.group, async_op=True)
        off_rank = sent.numel() // exchange.ulysses * (exchange.ulysses - 1)
        exchange.counters.sent("all_to_all", off_rank * sent.element_size())
        self.flight = _Flight(sent, received, work)

    def finish(self, direction: Direction, phase: str) -> Tensor:
        """Wait and unpack."""
        if self.flight is None:
            raise RuntimeError(f"{phase} wait for {self.name}, which is not under way")
        flight, self.flight = self.flight, None
        device = flight.received.device
        with self.exchange.counters.span("wait", f"{phase} wait {self.name}", device):
            flight.work.wait()
        return self.exchange.unpack(flight.received, direction)


def _reverse(direction: Direction) -> Direction:
    return "outward" if direction == "inward" else "inward"


class _Launch(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        transfer.start(x, transfer.direction, "forward")
        return x.new_zeros(())

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, _d_token: Tensor) -> tuple[Tensor, None]:
        transfer: _Transfer = ctx.transfer
        return transfer.finish(_reverse(transfer.direction), "backward"), None


class _Wait(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, _token: Tensor, transfer: _Transfer) -> Tensor:
        ctx.transfer = transfer
        return transfer.finish(transfer.direction, "forward")

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_out: Tensor) -> tuple[Tensor, None]:
        transfer: _Transfer = ctx.transfer
        transfer.start(d_out, _reverse(transfer.direction), "backward")
        return d_out.new_zeros(()), None


class InFlight(NamedTuple):
    """A tensor on its way: what `wait` takes. Without a transfer, `token` is the tensor itself."""

    token: Tensor
    transfer: _Transfer | None = None


def launch(x: Tensor, exchange: HeadExchange | None, name: str, direction: Direction) -> InFlight:
    """Start one tensor's all-to-all; it must not be written to until it is waited for.

    Args:
        x: [T, H, D] inward, [S, H / u, D] outward; u divides its heads.
        exchange: the group's; None where u = 1, and nothing moves.
        name: what the log calls it.
        direction: "inward" gathers tokens and scatters heads, "outward" undoes it.
    """
    if exchange is None:
        return InFlight(x)
    transfer = _Transfer(exchange, name, direction)
    return InFlight(_Launch.apply(x, transfer), transfer)


def wait(flight: InFlight) -> Tensor:
    """The tensor that was launched, once it has arrived."""
    if flight.transfer is None:
        return flight.token
    arrived: Tensor = _Wait.apply(*flight)
    return arrived


class _Mark(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, counters: Counters, name: str) -> Tensor:
        ctx.counters, ctx.name = counters, name
        counters.mark(f"forward {name}")
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, d_x: Tensor) -> tuple[Tensor, None, None]:
        ctx.counters.mark(f"backward {ctx.name}")
        return d_x, None, None


def marked(x: Tensor, counters: Counters, name: str) -> Tensor:
    """`x`, with its forward and its backward noted in the log, if one is kept."""
    if not counters.keep_events:
        return x
    same: Tensor = _Mark.apply(x, counters, name)
    return same
