"""Kernels, streams and overlap of the attention engine on one NVIDIA GPU.

`pytest -m gpu tests/gpu -s` prints tokens a second and kernel efficiency. On a machine without a
GPU every test is skipped and says why.
"""

import importlib.util
import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.workers.attention.cases import Heads, largest_error, textbook
from workers.attention.all_to_all import HeadExchange, launch, wait
from workers.attention.counters import Counters
from workers.attention.engine import context_parallel_attention
from workers.attention.kernels import choose_kernel
from workers.attention.layout import Block, CPGroups, Segments, ring_layout, ulysses_rows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available(), reason="needs an NVIDIA GPU: torch sees none"
    ),
]

KINDS = {
    "gqa": Heads(8, 2, 128, 128),
    "mla": Heads(8, 8, 192, 128),
    "odd dims": Heads(8, 4, 60, 36),
}
LENGTHS = (1, 7, 513, 64, 64, 1000)
KERNELS = ["torch-cuda-flash"]
if importlib.util.find_spec("flash_attn") is not None:
    KERNELS.append("flash-attn")


@pytest.fixture
def cuda() -> torch.device:
    return torch.device("cuda", torch.cuda.current_device())


@pytest.fixture
def world(tmp_path, cuda):
    """A world of one rank on NCCL: its collectives really run, on NCCL's stream."""
    store = dist.FileStore(str(tmp_path / "store"), 1)
    dist.init_process_group(
        "nccl", store=store, rank=0, world_size=1, timeout=timedelta(seconds=60), device_id=cuda
    )
    yield dist.group.WORLD
    dist.destroy_process_group()


def tensors(heads: Heads, num_queries: int, num_keys: int, device, dtype=torch.bfloat16):
    generator = torch.Generator(device).manual_seed(1)
    shapes = (
        (num_queries, heads.query, heads.v_dim),
        (num_queries, heads.query, heads.qk_dim),
        (num_keys, heads.key_value, heads.qk_dim),
        (num_keys, heads.key_value, heads.v_dim),
    )
    return [torch.randn(s, device=device, generator=generator).to(dtype) for s in shapes]


def kernel_errors(name, exact, inputs, block, scale):
    """Errors of (out, lse, dq, dk, dv) of one kernel against the float64 reference."""
    reference = choose_kernel("cuda", torch.float64, "reference")
    truth, truth_lse = reference.forward(*exact[1:], block, scale)
    truths = reference.backward(*exact, truth, truth_lse, block, scale)
    kernel = choose_kernel("cuda", torch.bfloat16, name)
    out, lse = kernel.forward(*inputs[1:], block, scale)
    gradients = kernel.backward(*inputs, out, lse, block, scale)
    pairs = zip((out, lse, *gradients), (truth, truth_lse, *truths), strict=True)
    return [largest_error(actual, expected, of=expected) for actual, expected in pairs]


@pytest.mark.parametrize("name", KERNELS)
@pytest.mark.parametrize("heads", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("causal", [True, False])
def test_fused_kernels_equal_the_reference(name, heads, causal, cuda):
    keys = LENGTHS if causal else tuple(2 * length for length in LENGTHS)
    inputs = tensors(heads, sum(LENGTHS), sum(keys), cuda)
    block = Block(Segments.of(LENGTHS, cuda), Segments.of(keys, cuda), causal=causal)
    exact = [x.double() for x in inputs]
    errors = kernel_errors(name, exact, inputs, block, heads.scale)
    assert max(errors) < 2**-6


def test_a_ring_of_blocks_merges_on_the_gpu(cuda):
    """Backward with a merged out and LSE: two blocks of keys add up to the whole attention."""
    heads = KINDS["gqa"]
    d_out, q, k, v = tensors(heads, 256, 256, cuda)
    kernel = choose_kernel("cuda", torch.bfloat16)
    whole = Segments.of((256,), cuda)
    layout = ring_layout((256,), 2, cuda)
    out, lse = kernel.forward(q, k, v, Block(whole, whole, causal=False), heads.scale)
    expected = kernel.backward(
        d_out, q, k, v, out, lse, Block(whole, whole, causal=False), heads.scale
    )
    front = layout.from_earlier.key_rows
    halves = [front, front + 128]
    dq = torch.zeros_like(q, dtype=torch.float32)
    for rows in halves:
        part = kernel.backward(
            d_out, q, k[rows], v[rows], out, lse, layout.from_earlier.block, heads.scale
        )
        dq += part[0]
    assert largest_error(dq, expected[0].double(), of=expected[0]) < 2**-6


@pytest.mark.parametrize("heads", KINDS.values(), ids=KINDS)
def test_engine_at_degree_one_equals_textbook(heads, cuda):
    d_out, *inputs = tensors(heads, sum(LENGTHS), sum(LENGTHS), cuda)
    leaves = [x.double().requires_grad_() for x in inputs]
    truth = textbook(*(x.cpu() for x in leaves), LENGTHS, heads.scale)
    truth.backward(d_out.double().cpu())
    ours = [x.requires_grad_() for x in inputs]
    counters = Counters()
    out = context_parallel_attention(
        *ours, lengths=LENGTHS, groups=CPGroups(), scale=heads.scale, counters=counters
    )
    out.backward(d_out)
    assert largest_error(out.cpu(), truth, of=truth) < 2**-6
    for actual, leaf in zip(ours, leaves, strict=True):
        assert largest_error(actual.grad.cpu(), leaf.grad.cpu(), of=leaf.grad.cpu()) < 2**-6
    assert counters.kernel_s > 0


def test_a_launched_exchange_runs_beside_computation(world, cuda):
    """The exchange is on NCCL's stream: the host does not wait, and the result is whole."""
    rows, inverse = ulysses_rows((8_192,), 1, cuda)
    counters = Counters(keep_events=True)
    exchange = HeadExchange(world, 1, rows, inverse, counters)
    x = torch.randn(8_192, 16, 128, device=cuda, dtype=torch.bfloat16, requires_grad=True)
    work = torch.randn(4_096, 4_096, device=cuda, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    started = time.perf_counter()
    flight = launch(x, exchange, "query", "inward")
    for _ in range(50):
        work = work @ work
        work = work / work.norm()
    arrived = wait(flight)
    launched_s = time.perf_counter() - started
    torch.cuda.synchronize()
    finished_s = time.perf_counter() - started
    assert torch.equal(arrived, x)
    arrived.backward(arrived)
    assert torch.equal(x.grad, x)
    names = [event.name for event in counters.events]
    assert names[:2] == ["forward launch query", "forward wait query"]
    print(f"\nhost free after {launched_s:.4f} s of {finished_s:.4f} s")


def test_print_tokens_per_second_and_kernel_efficiency(cuda):
    """Figures, not verdicts: forward and backward of one long sequence, and of many short."""
    heads = Heads(32, 8, 128, 128)
    cases = {"one of 16384": (16_384,), "packed, 64 to 4096": (4_096, 2_048, 1_024, 512, 64) * 4}
    print(
        f"\n{torch.cuda.get_device_name(cuda)}, kernel {choose_kernel('cuda', torch.bfloat16).name}"
    )
    for name, lengths in cases.items():
        d_out, *inputs = tensors(heads, sum(lengths), sum(lengths), cuda)
        leaves = [x.requires_grad_() for x in inputs]
        seconds = timed(engine_step(leaves, d_out, lengths, heads, Counters()))
        counters = Counters()
        engine_step(leaves, d_out, lengths, heads, counters)()
        # Causal: half of s^2; 2 matmuls forward, 5 backward, 2 FLOP a multiply-add.
        flop = sum(s * s for s in lengths) / 2 * heads.query * heads.qk_dim * 2 * 7
        print(
            f"{name}: {sum(lengths) / seconds:.3g} tokens/s, {flop / seconds / 1e12:.1f} TFLOP/s, "
            f"kernels {counters.kernel_s / seconds:.1%} of the time"
        )


def engine_step(leaves, d_out, lengths, heads, counters) -> Callable[[], None]:
    def step() -> None:
        out = context_parallel_attention(
            *leaves, lengths=lengths, groups=CPGroups(), scale=heads.scale, counters=counters
        )
        out.backward(d_out)

    return step


def timed(step: Callable[[], None], turns: int = 10) -> float:
    """Mean seconds of a call, after three that warm up."""
    for _ in range(3):
        step()
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(turns):
        step()
    torch.cuda.synchronize()
    return (time.perf_counter() - started) / turns
