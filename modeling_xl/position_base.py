"""What a position scheme is: the contract every `position_*.py` fulfils. It holds no scheme itself.

Sign, said once: a distance is query position - key position, so the past is positive and a token is at distance 0 from
itself. Every scheme uses this sign.

Legend: B batch, H heads, Q queries, K keys, D head size.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn

from .few_rows_xl import dot_products


class GatheredDistances(NamedTuple):
    """Distances (B or 1, Q, K) that follow no pattern: each value once, (V,), and which of them stands where."""

    values: torch.Tensor
    place: torch.Tensor

    @classmethod
    def of(cls, distances: torch.Tensor, device) -> "GatheredDistances":
        values, place = distances.unique(return_inverse=True)
        return cls(values.to(device), place.to(device))


def float64_device(device: torch.device) -> torch.device:
    """Where numbers that need float64 are made: there, or on the CPU for Apple's GPUs, which have none."""
    return torch.device("cpu") if device.type == "mps" else device


# Entries of a table that a block of queries reads beyond distance 0, where its first ones see no key.
SPARE = 127


class DistanceBias(NamedTuple):
    """Additive logits that depend on the distance, given as factors so that no (H, Q, K) tensor has to exist.

    bias[b, h, i, d] = query[b, h, i] . table[h, d]   if there is a query, else   table[h, d].
    """

    query: torch.Tensor | None  # (B, H, Q, D), already scaled
    table: torch.Tensor  # (H, K, D) with a query, (H, K) without; one entry for each distance asked for
    spare: int = 0  # further entries of the table, at its end, that may be read and mean nothing; `SPARE` spare a copy

    @property
    def entries(self) -> torch.Tensor:
        """The table without what is spare."""
        return self.table[:, : self.table.shape[1] - self.spare]

    def by_distance(self) -> torch.Tensor:
        """(B or 1, H, Q or 1, K): column n belongs to the n-th distance asked for."""
        if self.query is None:
            return self.table[None, :, None]  # (1, H, 1, K)
        rows = self.query.transpose(0, 1)  # all rows at once, so that the table is read once
        found = dot_products(rows.flatten(1, 2), self.entries)  # (H, B * Q, K)
        return found.unflatten(1, rows.shape[1:3]).transpose(0, 1)  # (B, H, Q, K)


@dataclass
class PositionContext:
    """What the schemes of all layers share during one piece of a call.

    shared: the module that the model owns for the scheme (`PositionScheme.shared_module`), or None.
    tables: results without gradient that the layers of one piece share (angles, sinusoids, numbers copied to the device), keyed
    by the scheme (`once`).
    derived: results that depend on weights and outlive the call together with the cache, each with a stamp of what it was
    made from; None where gradients flow.
    derived_limit: for how many distances a scheme may keep them, so that one long call does not swell the cache for ever.
    """

    shared: nn.Module | None = None
    tables: dict[Any, Any] = field(default_factory=dict)
    derived: dict[Any, tuple[Any, torch.Tensor]] | None = None
    derived_limit: float = math.inf

    def once(self, name: str, argument: torch.Tensor, make: Callable[[torch.Tensor], Any]) -> Any:
        """make(argument), made once for all layers that hand over the same tensor."""
        for other, result in self.tables.get(name, ()):
            if other is argument:
                return result
        result = make(argument)
        self.tables.setdefault(name, []).append((argument, result))
        return result


class PositionScheme(nn.Module):
    """How distance enters attention. One instance a layer; parameters of its own are that layer's.

    name: the value of `position_type`; the file is `position_<name>.py`.
    has_bias: whether `bias` returns anything.
    decays: whether the bias is -rate d with a rate for each head, so that a sum over the past can decay.
    rotates: whether `encode` is a rotation by the position, so that it can turn anything in place of queries and keys; else it
    leaves keys as they are.
    """

    name: ClassVar[str]
    has_bias: ClassVar[bool] = False
    decays: ClassVar[bool] = False
    rotates: ClassVar[bool] = False

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads

    @classmethod
    def validate(cls, config) -> None:
        """Raises ValueError where the config cannot work with this scheme."""

    @classmethod
    def shared_module(cls, config) -> nn.Module | None:
        """Parameters that all layers share; the model owns them and hands them back as `PositionContext.shared`."""
        return None

    @classmethod
    def far_distance(cls, config) -> int | None:
        """The distance from which on the bias no longer changes; None if it never stops changing."""
        return None

    @classmethod
    def tp_plan(cls, config) -> dict[str, str] | None:
        """Transformers' tensor-parallel styles for what the scheme holds for each head, by names of modules and parameters
        in `XLModel`; None where it is not known how to spread it, which refuses tensor parallelism."""
        return None

    def keep_heads(self, heads: range) -> None:
        """Told under tensor parallelism which heads this process computes, before the weights are spread."""
        self.num_heads = len(heads)

    def init_parameters(self, std: float) -> None:
        """(Re-)creates the parameters that are not modules of torch, normal with `std`."""

    def prepare(self, hidden_states, distances, positions, context: PositionContext) -> None:
        """Told before the layers run what they will ask for, so that it can be made where nothing is compiled.

        hidden_states: of the layers' inputs only dtype and device count. distances: (K,), n, n - 1 ... 0, of a `bias`, or None.
        positions: of an `encode`, a sequence of tensors. The calls hand over these very tensors; there may be others too.
        """

    def encode(self, query, key, query_positions, key_positions, context: PositionContext):
        """What enters the dot product and the cache.

        query (B, H, Q, D), key (B, any number of heads, K, D); positions: integers on the CPU, (B or 1, Q) and
        (B or 1, K). Returns both, encoded; the key as it came unless the scheme `rotates`. Without a bias of its own the
        score must depend on differences of positions only.
        """
        return query, key

    def bias(self, query, distances, context: PositionContext) -> DistanceBias | None:
        """Logits added to the scaled scores, themselves already scaled by 1/sqrt(D) where the scheme asks for it.

        query (B, H, Q, D) before `encode`; distances (K,) integers >= 0 in any order, on the query's device.
        """
        return None
