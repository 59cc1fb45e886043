"""The planner's cost model for the model of a recipe."""

from dataclasses import replace

from hydra_ray.config.sections import CostSection, ModelSection, ParallelSection
from planner.cost import CostModel
from planner.factorize import AttentionShape, CpComm
from planner.presets import DENSE, preset

BYTES_PER_ELEMENT = {"float64": 8, "float32": 4, "bfloat16": 2}
DENSE_LAYER_WEIGHTS = 218e6


def cost_model(
    section: CostSection,
    model: ModelSection,
    parallel: ParallelSection,
    *,
    dtype: str,
    cp_comm: CpComm,
) -> CostModel:
    """The cost of one pipeline stage.

    Without a preset, the coefficients of `planner.presets.DENSE` scaled by work: attention by
    heads x (query-key + value dimensions) x layers, the rest by active weights, fixed costs by
    layers. What matters to a plan is their ratio, so this serves where nothing was measured;
    coefficients given in the section win.
    """
    attention = attention_shape(model, dtype)
    layers = model.num_layers // parallel.pipeline
    base = preset(section.preset) if section.preset else _scaled(model, attention, parallel, layers)
    given = section.model_dump(exclude={"preset"}, exclude_none=True)
    return replace(
        base,
        attention=attention,
        num_layers=layers,
        tensor=parallel.tensor,
        cp_comm=cp_comm,
        **given,
    )


def attention_shape(model: ModelSection, dtype: str) -> AttentionShape:
    """The heads as the traffic sees them; latent attention materialises K and V for each head."""
    size = BYTES_PER_ELEMENT[dtype]
    if model.attention == "mla":
        return AttentionShape(
            num_heads=model.num_heads,
            num_kv_heads=model.num_heads,
            qk_dim=model.qk_head_dim + model.qk_rope_dim,
            v_dim=model.v_head_dim,
            bytes_per_element=size,
        )
    head_dim = model.head_dim or model.hidden_size // model.num_heads
    return AttentionShape(
        num_heads=model.num_heads,
        num_kv_heads=model.num_kv_heads,
        qk_dim=head_dim,
        v_dim=head_dim,
        bytes_per_element=size,
    )


def active_layer_weights(model: ModelSection, attention: AttentionShape) -> int:
    """Weights of one layer that work on a token; an estimate for latent attention's factors."""
    kv_width = attention.num_kv_heads * (attention.qk_dim + attention.v_dim)
    width = attention.num_heads * (attention.qk_dim + attention.v_dim)
    if model.attention == "mla":
        rank = model.kv_lora_rank
        kv_weights = model.hidden_size * rank + rank * kv_width
    else:
        kv_weights = model.hidden_size * kv_width
    ffn = model.ffn_hidden_size
    if model.num_experts:
        ffn = model.expert_top_k * model.expert_ffn_hidden_size
        ffn += model.shared_expert_ffn_hidden_size
    return model.hidden_size * width + kv_weights + 3 * model.hidden_size * ffn


def _scaled(
    model: ModelSection, attention: AttentionShape, parallel: ParallelSection, layers: int
) -> CostModel:
    def attention_work(shape: AttentionShape, num_layers: int) -> int:
        return shape.num_heads * (shape.qk_dim + shape.v_dim) * num_layers

    share = 1 / parallel.tensor
    weights = active_layer_weights(model, attention) * layers
    work = attention_work(attention, layers) / attention_work(DENSE.attention, DENSE.num_layers)
    return replace(
        DENSE,
        quadratic_s=DENSE.quadratic_s * work * share,
        linear_s=DENSE.linear_s * weights / (DENSE_LAYER_WEIGHTS * DENSE.num_layers) * share,
        fixed_s=DENSE.fixed_s * layers / DENSE.num_layers,
    )
