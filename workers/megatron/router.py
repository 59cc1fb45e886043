"""MoE routing whose load-balancing loss belongs to a sequence, not to a microbatch.

Shape legend: T tokens this rank routes, N packed sequences, E experts.
"""

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.transformer.moe.moe_utils import MoEAuxLossAutoScaler
from megatron.core.transformer.moe.router import TopKRouter

from workers.megatron.context import Microbatch, current


class SequenceRouter(TopKRouter):
    """Megatron's top-k router with an auxiliary loss that does not depend on the plan.

    Megatron computes the loss over a microbatch and a static group, so that it changes with the
    packing and, under dynamic CP, is silently wrong. Here each sequence has its own loss over
    its real tokens, wherever they are:

        coeff * E / k * sum_e f_e * p_e / n

    with n the tokens of the sequence, f_e how many of them chose expert e and p_e the sum of
    their scores for e. That is the switch loss of the sequence times its n tokens, as a loss
    that is summed over tokens wants it. Counts carry no gradient, so one all-reduce of them over
    the sequence's group is all the communication there is.
    """

    def _apply_aux_loss(
        self,
        probs: torch.Tensor,
        scores_for_aux_loss: torch.Tensor,
        routing_map: torch.Tensor,
        with_padding_mask: bool = False,  # noqa: ARG002, FBT001, FBT002 - Megatron's signature
    ) -> torch.Tensor:
        coefficient = self.get_aux_loss_coeff("aux_loss")
        if coefficient == 0:
            return probs
        microbatch = current()
        sequence_T, real_T = self._my_tokens(microbatch)
        zeros_NE = scores_for_aux_loss.new_zeros(
            len(microbatch.padded_lengths), routing_map.size(1)
        )
        real_T1 = real_T[:, None]
        counts_NE = zeros_NE.index_add(0, sequence_T, (routing_map & real_T1).to(zeros_NE.dtype))
        self._sum_over_group(counts_NE, microbatch)
        scores_NE = zeros_NE.index_add(0, sequence_T, scores_for_aux_loss * real_T1)
        tokens_N = (counts_NE.sum(1) / self.topk).clamp_min(1)  # an idle rank has none
        loss = ((counts_NE * scores_NE).sum(1) / tokens_N).sum()
        scale = coefficient * routing_map.size(1) / self.topk
        return MoEAuxLossAutoScaler.apply(probs, scale * loss)

    def _my_tokens(self, microbatch: Microbatch) -> tuple[torch.Tensor, torch.Tensor]:
        """Sequence and realness of the tokens this tensor rank routes."""
        if not self.config.sequence_parallel:
            return microbatch.sequence_T, microbatch.real_T
        parts = parallel_state.get_tensor_model_parallel_world_size()
        rank = parallel_state.get_tensor_model_parallel_rank()
        return microbatch.sequence_T.chunk(parts)[rank], microbatch.real_T.chunk(parts)[rank]

    def _sum_over_group(self, counts_NE: torch.Tensor, microbatch: Microbatch) -> None:
        if microbatch.groups.degree > 1:
            dist.all_reduce(counts_NE, group=microbatch.groups.cp)
        if self.config.sequence_parallel:
            dist.all_reduce(counts_NE, group=parallel_state.get_tensor_model_parallel_group())
