"""Each kernel gives the reference's numbers; the reference gives autograd's."""

import importlib.util

import pytest
import torch

from planner.errors import InputError
from tests.workers.attention.cases import GQA, KINDS, Heads, largest_error, textbook
from workers.attention.kernels import choose_kernel, kernel_report
from workers.attention.kernels.choose import KERNELS
from workers.attention.kernels.cpu import CpuFlash, equal_runs
from workers.attention.kernels.reference import Reference
from workers.attention.layout import Block, Segments

CPU = torch.device("cpu")
LENGTHS = {
    "one": (9,),
    "equal": (6, 6, 6),
    "mixed": (1, 7, 7, 3, 16, 16, 1),
    "empty among them": (4, 0, 3),
}


def block_of(queries, keys, *, causal):
    return Block(Segments.of(queries, CPU), Segments.of(keys, CPU), causal=causal)


def tensors(heads: Heads, num_queries, num_keys, dtype=torch.float64):
    generator = torch.Generator().manual_seed(1)
    shapes = (
        (num_queries, heads.query, heads.v_dim),
        (num_queries, heads.query, heads.qk_dim),
        (num_keys, heads.key_value, heads.qk_dim),
        (num_keys, heads.key_value, heads.v_dim),
    )
    return [
        torch.randn(shape, dtype=torch.float64, generator=generator).to(dtype) for shape in shapes
    ]


@pytest.mark.parametrize("heads", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
def test_reference_equals_autograd(heads, lengths):
    d_out, *inputs = tensors(heads, sum(lengths), sum(lengths))
    leaves = [x.clone().requires_grad_() for x in inputs]
    truth = textbook(*leaves, lengths, heads.scale)
    truth.backward(d_out)
    block = block_of(lengths, lengths, causal=True)
    out, lse = Reference().forward(*inputs, block, heads.scale)
    gradients = Reference().backward(d_out, *inputs, out, lse, block, heads.scale)
    assert largest_error(out, truth.detach(), of=truth) < 1e-14
    for gradient, leaf in zip(gradients, leaves, strict=True):
        assert largest_error(gradient, leaf.grad, of=leaf.grad) < 1e-14


@pytest.mark.parametrize("heads", KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("lengths", LENGTHS.values(), ids=LENGTHS)
@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_cpu_flash_equals_reference(heads, lengths, causal, dtype):
    keys = lengths if causal else tuple(2 * length for length in lengths)
    d_out, *inputs = tensors(heads, sum(lengths), sum(keys), dtype)
    block = block_of(lengths, keys, causal=causal)
    exact = [x.double() for x in (d_out, *inputs)]
    truth, truth_lse = Reference().forward(*exact[1:], block, heads.scale)
    truths = Reference().backward(*exact, truth, truth_lse, block, heads.scale)
    out, lse = CpuFlash().forward(*inputs, block, heads.scale)
    gradients = CpuFlash().backward(d_out, *inputs, out, lse, block, heads.scale)
    limit = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 2**-6}[dtype]
    assert lse.dtype == torch.promote_types(dtype, torch.float32)
    for actual, expected in zip((out, lse, *gradients), (truth, truth_lse, *truths), strict=True):
        assert actual.shape == expected.shape
        assert largest_error(actual, expected, of=expected) < limit


@pytest.mark.parametrize("kernel", [CpuFlash(), Reference()], ids=lambda kernel: kernel.name)
def test_no_tokens_at_all(kernel):
    d_out, *inputs = tensors(GQA, 0, 0)
    block = block_of((), (), causal=True)
    out, lse = kernel.forward(*inputs, block, GQA.scale)
    assert (out.shape, lse.shape) == ((0, 12, 16), (12, 0))
    gradients = kernel.backward(d_out, *inputs, out, lse, block, GQA.scale)
    assert [gradient.shape for gradient in gradients] == [x.shape for x in inputs]


def test_strided_inputs_are_read_as_they_are():
    fused = torch.randn(8, 4, 48, dtype=torch.float64)
    q, k, v = fused.split(16, dim=-1)
    block = block_of((5, 3), (5, 3), causal=True)
    out, _ = CpuFlash().forward(q, k, v, block, 0.25)
    truth = textbook(q, k, v, (5, 3), 0.25)
    assert largest_error(out, truth, of=truth) < 1e-14


def test_runs_join_neighbours_of_equal_length_only():
    assert equal_runs((4, 4, 2, 4), (8, 8, 4, 8)) == (
        ((2, 4), (1, 2), (1, 4)),
        ((2, 8), (1, 4), (1, 8)),
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_rule_on_cpu(dtype):
    assert choose_kernel("cpu", dtype).name == "torch-cpu-flash"


def test_the_rule_on_cuda_never_takes_a_slow_kernel_silently():
    has_package = importlib.util.find_spec("flash_attn") is not None
    expected = "flash-attn" if has_package else "torch-cuda-flash"
    assert choose_kernel("cuda", torch.bfloat16).name == expected
    with pytest.raises(InputError, match=r"float32 on cuda.*bfloat16"):
        choose_kernel("cuda", torch.float32)
    assert choose_kernel("cuda", torch.float32, "reference").name == "reference"


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(InputError, match=", ".join(KERNELS)):
        choose_kernel("cpu", torch.float32, "flash-attn-9")


def test_the_report_names_what_runs_here():
    report = kernel_report()
    assert report["cpu float32"] == "torch-cpu-flash"
    assert "flash-attn package" in report
