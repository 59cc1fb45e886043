"""Cost models of published models on published machines; each constant names its source."""

from dataclasses import replace

from planner.cost import CostModel
from planner.errors import InputError
from planner.factorize import AttentionShape

DENSE = CostModel()

# Hy3 (Tencent, model card): 80 layers, 64 query and 8 key-value heads of 128, 192 experts of
# which 8 work, 21B of 295B weights active, so 256M a layer besides the vocabulary's. 20 layers
# a stage, tensor parallel 2. Attention: 16384 s^2 FLOP a layer at DENSE's rates. Linear: 6 FLOP a
# weight at 500 TFLOP/s (expert matmuls see fewer rows each: DistCA measures 446 to 580 there),
# plus dispatch and combine, which take 4.6 + 6.5 ms for 4096 tokens and 8 choices of hidden 7168
# at EP 64 (DeepSeek-V3's published profile), scaled to hidden 4096, forward and backward, half
# hidden under computation.
MOE = replace(
    DENSE,
    quadratic_s=20 * 16384 / 2 * (1 / 616e12 + 2.5 / 561e12),
    linear_s=20 * (6 * 256e6 / 2 / 500e12 + 2 * 0.5 * (4.6e-3 + 6.5e-3) / 4096 * 4096 / 7168),
    fixed_s=20 * 250 * 4e-6,
    attention=AttentionShape(num_heads=64, num_kv_heads=8, qk_dim=128, v_dim=128),
    num_layers=20,
    tensor=2,
)

# Hy4-preview's shape (Tencent, model card: 78 layers, 64 heads, 49B of 770B weights active) with
# DeepSeek-V3's head sizes (128 + 64 and 128): latent attention materialises K and V for every
# head, so its ring carries 20 times the bytes of 8 key-value heads. 20 layers a stage, tensor
# parallel 2. Kernel: 556 TFLOP/s forward, backward 3.2 times as long (DeepSeek-V3's profile, H800).
MLA = replace(
    MOE,
    quadratic_s=20 * 64 * 320 / 2 * (1 + 3.2) / 556e12,
    linear_s=20 * (6 * 610e6 / 2 / 500e12 + 2 * 0.5 * (4.6e-3 + 6.5e-3) / 4096 * 6144 / 7168),
    attention=AttentionShape(num_heads=64, num_kv_heads=64, qk_dim=192, v_dim=128),
)

PRESETS = {"dense": DENSE, "moe": MOE, "mla": MLA}


def preset(name: str) -> CostModel:
    """A named cost model: "dense", "moe" or "mla".

    Raises:
        InputError: no such preset.
    """
    if name not in PRESETS:
        raise InputError("Unknown cost preset", value=name, limit=", ".join(sorted(PRESETS)))
    return PRESETS[name]
