"""T5's relative position buckets: one learned scalar for each bucket and head, shared by all layers.

Raffel et al., "Exploring the Limits of Transfer Learning with a Unified Text-to-Text Transformer", JMLR 2020, section
2.1. T5 itself does not scale its scores; here the scores are scaled like those of every scheme, the bias is not. T5
writes distances as key - query: the sign is flipped here and nowhere else.
"""

import math
from functools import lru_cache
from typing import cast

import torch
from torch import nn
from transformers import initialization as init

from .position_base import DistanceBias, PositionContext, PositionScheme, float64_device


def relative_bucket(distances: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """Bucket of each distance >= 0: half of the buckets exact, the others logarithmic up to `max_distance`."""
    exact = num_buckets // 2
    # float64: in float32 a distance at the edge of a bucket can fall on its wrong side.
    ratio = torch.log(distances.to(float64_device(distances.device), torch.float64) / exact) / math.log(max_distance / exact)
    logarithmic = (exact + (ratio.clamp(min=0) * (num_buckets - exact)).floor().long()).clamp(max=num_buckets - 1)
    return torch.where(distances < exact, distances, logarithmic.to(distances.device))


@lru_cache
def first_of_last_bucket(num_buckets: int, max_distance: int) -> int:
    """The distance from which on all fall into the last bucket."""
    distances = torch.arange(max_distance + 1, device="cpu")
    return int((relative_bucket(distances, num_buckets, max_distance) == num_buckets - 1).nonzero()[0])


class T5Table(nn.Module):
    """The table (num_buckets, H) that all layers read; the model owns it."""

    def __init__(self, config):
        super().__init__()
        self.table = nn.Parameter(torch.empty(config.relative_attention_num_buckets, config.num_attention_heads))

    def init_parameters(self, std: float) -> None:
        init.normal_(self.table, mean=0.0, std=std)

    def forward(self, buckets):
        return self.table[buckets].transpose(0, 1)  # (K,) -> (H, K)


class T5Position(PositionScheme):
    """bias[h, d] = table[bucket(d), h]."""

    name = "t5"
    has_bias = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.num_buckets = config.relative_attention_num_buckets
        self.max_distance = config.relative_attention_max_distance

    @classmethod
    def validate(cls, config) -> None:
        buckets, distance = config.relative_attention_num_buckets, config.relative_attention_max_distance
        if buckets < 2 or buckets % 2:
            raise ValueError(
                f"relative_attention_num_buckets={buckets} must be an even number >= 2, half of the buckets being exact; "
                "T5 uses 32."
            )
        if distance <= buckets // 2:
            raise ValueError(
                f"relative_attention_max_distance={distance} must exceed the {buckets // 2} exact buckets; T5 uses 128."
            )

    @classmethod
    def shared_module(cls, config) -> nn.Module:
        return T5Table(config)

    @classmethod
    def far_distance(cls, config) -> int:
        return first_of_last_bucket(config.relative_attention_num_buckets, config.relative_attention_max_distance)

    @classmethod
    def tp_plan(cls, config) -> dict[str, str]:
        return {"shared_position.table": "rowwise", "shared_position": "local_params"}  # its last axis is that of heads

    def prepare(self, hidden_states, distances, positions, context: PositionContext) -> None:
        if distances is not None:
            self._buckets(distances, context)

    def bias(self, query, distances, context: PositionContext) -> DistanceBias:
        return DistanceBias(None, cast(T5Table, context.shared)(self._buckets(distances, context)))

    def _buckets(self, distances, context: PositionContext) -> torch.Tensor:
        return context.once("t5", distances, lambda d: relative_bucket(d, self.num_buckets, self.max_distance))
