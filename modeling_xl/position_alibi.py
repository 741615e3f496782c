"""ALiBi: a linear penalty on distance. Not a learned bias.

Press, Smith, Lewis, "Train Short, Test Long", ICLR 2022, section 3.
"""

import math

import torch

from .position_base import DistanceBias, PositionContext, PositionScheme


def alibi_slopes(num_heads: int) -> list[float]:
    """Slopes of `num_heads` heads: 2^(-8i/p) for the largest power of two p <= num_heads, then the 1st, 3rd, ... of the
    slopes of 2p (section 3 and the authors' code for head counts that are no power of two)."""
    power = 2 ** math.floor(math.log2(num_heads))
    slopes = [2.0 ** (-8.0 * (i + 1) / power) for i in range(power)]
    doubled = [2.0 ** (-4.0 * (i + 1) / power) for i in range(2 * power)]
    return slopes + doubled[0::2][: num_heads - power]


class AlibiPosition(PositionScheme):
    """bias[h, d] = -slope[h] * d, in float32 at least; slopes from `alibi_slopes`, or from the config's field."""

    name = "alibi"
    has_bias = True
    decays = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        # Python numbers, not a buffer: nothing to restore after loading and nothing that a change of dtype can round.
        self.slopes = list(config.alibi_slopes or alibi_slopes(config.num_attention_heads))

    @classmethod
    def validate(cls, config) -> None:
        slopes = config.alibi_slopes
        if slopes is None:
            return
        if len(slopes) != config.num_attention_heads or not all(math.isfinite(s) and s >= 0 for s in slopes):
            raise ValueError(
                f"alibi_slopes={slopes} must hold num_attention_heads={config.num_attention_heads} finite numbers >= 0; "
                "give one slope a head, or None for the published slopes."
            )

    @classmethod
    def tp_plan(cls, config) -> dict[str, str]:
        return {}  # `keep_heads` takes the slopes

    def keep_heads(self, heads: range) -> None:
        super().keep_heads(heads)
        self.slopes = [self.slopes[head] for head in heads]

    def prepare(self, hidden_states, distances, positions, context: PositionContext) -> None:
        if distances is not None:
            self.bias(hidden_states, distances, context)

    def bias(self, query, distances, context: PositionContext) -> DistanceBias:
        dtype = torch.promote_types(query.dtype, torch.float32)
        slopes = self._slopes(dtype, distances.device, context)
        return DistanceBias(None, context.once(f"alibi {dtype}", distances, lambda d: -slopes * d.to(dtype)))  # (H, K)

    def _slopes(self, dtype: torch.dtype, device: torch.device, context: PositionContext) -> torch.Tensor:
        """(H, 1), copied to the device once for all layers."""
        key = ("alibi slopes", dtype, device)
        if key not in context.tables:
            context.tables[key] = torch.tensor(self.slopes, dtype=dtype, device=device)[:, None]
        return context.tables[key]
