"""What the engine's tests share: groups of a gloo world, random cases, and textbook attention.

Shape legend: T tokens, H query heads, K key-value heads, D and E head dims.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

from workers.attention.layout import CPGroups, zigzag_index

Tensor = torch.Tensor


@dataclass(frozen=True)
class Heads:
    """The heads of one attention layer."""

    query: int
    key_value: int
    qk_dim: int
    v_dim: int

    @property
    def scale(self) -> float:
        return self.qk_dim**-0.5


MHA = Heads(12, 12, 16, 16)
GQA = Heads(12, 2, 16, 16)
MLA = Heads(12, 12, 24, 16)
KINDS = {"mha": MHA, "gqa": GQA, "mla": MLA}

FACTORISATIONS = [(1, 1), (2, 1), (2, 2), (3, 1), (3, 3), (4, 1), (4, 2), (4, 4), (6, 3)]


def world_groups(rank: int, degree: int, ulysses: int) -> CPGroups:
    """The whole gloo world as one CP group, its groups made in the same order everywhere."""
    inner = ring = None
    for start in range(0, degree, ulysses):
        members = list(range(start, start + ulysses))
        group = dist.new_group(members)
        inner = group if rank in members else inner
    for start in range(ulysses):
        members = list(range(start, degree, ulysses))
        group = dist.new_group(members)
        ring = group if rank in members else ring
    return CPGroups(
        cp=dist.group.WORLD,
        inner=inner if ulysses > 1 else None,
        ring=ring if degree > ulysses else None,
        degree=degree,
        ulysses=ulysses,
        rank=rank,
    )


def padded(lengths: tuple[int, ...], degree: int) -> tuple[int, ...]:
    """Each length rounded up to a multiple of twice the degree."""
    unit = 2 * degree
    return tuple(-(-length // unit) * unit for length in lengths)


@dataclass(frozen=True)
class Case:
    """Packed, padded float64 inputs of a whole group, the same on every rank."""

    heads: Heads
    lengths: tuple[int, ...]
    degree: int
    inputs: tuple[Tensor, Tensor, Tensor]
    d_out: Tensor
    is_real: Tensor

    @classmethod
    def random(cls, heads: Heads, lengths: tuple[int, ...], degree: int, seed: int = 0) -> "Case":
        generator = torch.Generator().manual_seed(seed)
        widths = padded(lengths, degree)
        is_real = torch.cat(
            [torch.arange(width) < length for length, width in zip(lengths, widths, strict=True)]
        )
        q, k, v, d_out = (
            torch.randn(sum(widths), h, d, dtype=torch.float64, generator=generator)
            for h, d in (
                (heads.query, heads.qk_dim),
                (heads.key_value, heads.qk_dim),
                (heads.key_value, heads.v_dim),
                (heads.query, heads.v_dim),
            )
        )
        d_out = d_out * is_real[:, None, None]  # nobody looks at padding
        return cls(heads, lengths, degree, (q, k, v), d_out, is_real)

    @property
    def padded_lengths(self) -> tuple[int, ...]:
        return padded(self.lengths, self.degree)

    def shard(self, x: Tensor, rank: int) -> Tensor:
        """This rank's zigzag share."""
        return x[torch.tensor(zigzag_index(self.padded_lengths, self.degree, rank))]

    def truth(self) -> tuple[Tensor, ...]:
        """(out, dq, dk, dv) by textbook attention on the unpadded sequences; padding is zero."""
        inputs = [x.clone().requires_grad_() for x in self.inputs]
        real = [x[self.is_real] for x in inputs]
        out = torch.zeros_like(self.d_out)
        out[self.is_real] = textbook(*real, self.lengths, self.heads.scale)
        out.backward(self.d_out)
        return out.detach(), *(x.grad for x in inputs)


def textbook(q: Tensor, k: Tensor, v: Tensor, lengths: tuple[int, ...], scale: float) -> Tensor:
    """Causal softmax attention of each sequence, written as in a textbook."""
    repeats = q.size(1) // k.size(1)
    outs = []
    for q_s, k_s, v_s in zip(*(x.split(lengths) for x in (q, k, v)), strict=True):
        k_h, v_h = (x.repeat_interleave(repeats, 1).transpose(0, 1) for x in (k_s, v_s))
        scores = scale * q_s.transpose(0, 1) @ k_h.transpose(1, 2)
        later = torch.ones(scores.shape[1:], dtype=torch.bool).triu(1)
        outs.append((scores.masked_fill(later, -torch.inf).softmax(-1) @ v_h).transpose(0, 1))
    return torch.cat(outs)


def largest_error(actual: Tensor, expected: Tensor, *, of: Tensor) -> float:
    """The largest difference, over the largest value of the whole tensor."""
    if not torch.isfinite(actual).all():
        return float("inf")
    largest = of.detach().abs().max().clamp_min(1e-30)
    return float((actual.double() - expected).abs().max() / largest)
