"""Transformer-XL's relative positions: content and position scores with two learned biases u and v.

Dai et al., "Transformer-XL", ACL 2019, section 3.3 and appendix B.
"""

from typing import cast

import torch
from torch import nn
from transformers import initialization as init

from .few_rows_xl import for_dot_products
from .position_base import SPARE, DistanceBias, PositionContext, PositionScheme, float64_device


def sinusoid(distances: torch.Tensor, size: int, dtype: torch.dtype) -> torch.Tensor:
    """r_d of the paper, (K, size): sines of all frequencies, then cosines (halves, not interleaved).

    Computed in float64 and rounded once: float32 angles are off by 2e-3 at distance 100,000.
    """
    place = float64_device(distances.device)
    frequencies = 10000.0 ** (-torch.arange(0, size, 2, dtype=torch.float64, device=place) / size)
    angles = distances.to(place, torch.float64)[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], -1)[:, :size].to(distances.device, dtype)


# Distances are projected so many at a time where the result is kept. Kernels round by the shape of a product, and a table
# made anew after a state was loaded must have the numbers of the one that grew.
TABLE_BLOCK = 64


class XLBiases(nn.Module):
    """u and v, (H, D) each, where all layers share them (`untie_r=False`)."""

    def __init__(self, config):
        super().__init__()
        self.u = nn.Parameter(torch.empty(config.num_attention_heads, config.head_dim))
        self.v = nn.Parameter(torch.empty(config.num_attention_heads, config.head_dim))

    def init_parameters(self, std: float) -> None:
        init.normal_(self.u, mean=0.0, std=std)
        init.normal_(self.v, mean=0.0, std=std)

    def forward(self):
        return self.u[:, None], self.v[:, None]  # (H, 1, D)


class XLPosition(PositionScheme):
    """score = ((q + u) . k + (q + v) . W_R r_d) / sqrt(D), the four terms of the paper.

    `clamp_len` clips d, inclusive. u, v are the layer's own (`untie_r`) or shared by all layers.
    """

    name = "xl"
    has_bias = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.config = config
        self.r_proj = nn.Linear(config.hidden_size, self.num_heads * self.head_dim, bias=False)
        self.dropout = nn.Dropout(config.hidden_dropout)  # the authors' code drops parts of r_d as it does of inputs
        self.biases = XLBiases(config) if config.untie_r else None

    @classmethod
    def shared_module(cls, config) -> nn.Module | None:
        return None if config.untie_r else XLBiases(config)

    @classmethod
    def far_distance(cls, config) -> int | None:
        return config.clamp_len

    @classmethod
    def tp_plan(cls, config) -> dict[str, str]:
        own = "layers.*.self_attn.position"
        biases = f"{own}.biases" if config.untie_r else "shared_position"
        return {f"{own}.r_proj": "colwise", f"{biases}.u": "colwise", f"{biases}.v": "colwise", biases: "local_params"}

    def _biases(self, context: PositionContext):
        biases = context.shared if self.biases is None else self.biases
        return cast(XLBiases, biases)()  # called, not read: what moves or shards weights hooks into calls

    def prepare(self, hidden_states, distances, positions, context: PositionContext) -> None:
        if distances is None:
            return
        is_random = self.training and self.dropout.p > 0
        if context.derived is None or is_random or distances.shape[0] > context.derived_limit:
            self._sinusoid(distances, context)
            return
        # Nothing but the distance enters the table, so with frozen weights one serves all calls of a cache.
        key, stamp = ("xl", self.layer_idx), self._stamp(distances.device.type)
        if key in context.derived and context.derived[key][0] != stamp:
            del context.derived[key]
        context.tables["xl table", self.layer_idx] = (distances, stamp)

    def encode(self, query, key, query_positions, key_positions, context: PositionContext):
        u, _ = self._biases(context)
        return query + u, key

    def bias(self, query, distances, context: PositionContext) -> DistanceBias:
        _, v = self._biases(context)
        return DistanceBias((query + v) * self.head_dim**-0.5, *self._table(distances, context))

    def _table(self, distances, context: PositionContext) -> tuple[torch.Tensor, int]:
        """W_R r_d for the distances asked for, (H, K, D), and how many spare entries follow."""
        kept_for, stamp = context.tables.get(("xl table", self.layer_idx), (None, None))
        if context.derived is None or kept_for is not distances:
            return self._project(distances, context), 0
        count, key = distances.shape[0], ("xl", self.layer_idx)
        _, table = context.derived.get(key, (None, None))
        size = 0 if table is None else table.shape[1] - SPARE
        if table is None or size < count:
            # It grows by doubling, so that a memory that fills up token by token does not project it anew for each token.
            size = int(max(count, min(2 * size, context.derived_limit)))
            size = -(-size // TABLE_BLOCK) * TABLE_BLOCK
            parts = [self._project(part, context) for part in self._run(size, distances.device, context)]
            table = torch.cat([*parts, parts[0].new_zeros(parts[0].shape[0], SPARE, parts[0].shape[2])], 1)
            table = for_dot_products(table)
            context.derived[key] = (stamp, table)
        return table[:, size - count :], SPARE

    @staticmethod
    def _run(size: int, device, context: PositionContext) -> tuple[torch.Tensor, ...]:
        """size - 1 ... 0 in parts, the same tensors for all layers, so that these share the sinusoids."""
        key = ("xl run", size)
        if key not in context.tables:
            context.tables[key] = torch.arange(size - 1, -1, -1, device=device).split(TABLE_BLOCK)
        return context.tables[key]

    def _stamp(self, device_type: str):
        """What a projected table depends on beside distances: which weights, changed how often, in which precision."""
        weights = [(id(p), 0 if p.is_inference() else p._version) for p in self.r_proj.parameters()]
        autocast = torch.get_autocast_dtype(device_type) if torch.is_autocast_enabled(device_type) else None
        return weights, autocast, self.config.clamp_len

    def _project(self, distances, context: PositionContext) -> torch.Tensor:
        projected = self.r_proj(self.dropout(self._sinusoid(distances, context)))  # (K, H * D)
        return projected.view(-1, self.num_heads, self.head_dim).transpose(0, 1)

    def _sinusoid(self, distances, context: PositionContext) -> torch.Tensor:
        dtype = self.r_proj.weight.dtype
        if not dtype.is_floating_point:  # packed by quantisation, which leaves the biases as they are
            dtype = self._biases(context)[0].dtype

        def make(distances):
            if self.config.clamp_len is not None:
                distances = distances.clamp(max=self.config.clamp_len)
            return sinusoid(distances, self.config.hidden_size, dtype)

        return context.once(f"xl {dtype}", distances, make)
