"""Linear attention: the past is two sums, S = Σ φ(k) vᵀ and z = Σ φ(k), whatever its length.

Katharopoulos et al., "Transformers are RNNs", ICML 2020, section 3.3. With a weight w_ij for the distance,

    y_i = Σ_j w_ij φ(q_i) . φ(k_j) v_j / Σ_j w_ij φ(q_i) . φ(k_j)

stays exact with a state where w_ij = exp(bias) does not change from a distance on (t5; xl with clamp_len: the newest keys
are kept as rows and enter S when they reach it), or is a power of the distance (alibi: S decays), or is 1. Rotary positions
turn φ(q) and φ(k) in the numerator (Su et al., "RoFormer", 2021, section 3.3).

Legend: B batch, H heads, G heads of the state, t tokens of the piece, U kept rows, D head size, F features of a head.
"""

from typing import NamedTuple

import torch
from torch.nn import functional

from .cache_xl import LayerState
from .feature_maps_xl import FEATURE_MAPS, make_feature_map
from .linear_xl import Bias, Decay, Text, Weighing, blockwise, normalisers
from .memory_base import Attended, MemoryMechanism


class LinearView(NamedTuple):
    """What the layers share about a piece. band: newest tokens that are kept as rows. past: how many are there. places: what
    positions are counted as. distances (band + 2,): of the bias, the last of them stands for all that is farther."""

    band: int
    past: int
    text: Text
    places: torch.Tensor
    distances: torch.Tensor


class LinearAttention(MemoryMechanism):
    """All the past in O(1) memory. State: `state` (B, G, F, D), `norm` (B, G, F), and rows `key`, `value` of the last
    far_distance - 1 tokens where the position scheme has a far distance."""

    name = "linear"
    uses_grid = False
    needs_row_lines = False
    config_fields = ("feature_map", "num_random_features", "relative_attention_num_buckets", "relative_attention_max_distance")

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.feature_map = make_feature_map(config)

    @classmethod
    def validate(cls, config) -> None:
        if config.feature_map not in FEATURE_MAPS:
            raise ValueError(f"feature_map={config.feature_map!r} is not one of {', '.join(FEATURE_MAPS)}.")
        for name in ("num_random_features", "redraw_interval"):
            value = getattr(config, name)
            if value is not None and (isinstance(value, bool) or value < 1):
                raise ValueError(f"{name}={value!r} must be an integer >= 1.")
        scheme = config.position_scheme
        if scheme.has_bias and not scheme.decays and scheme.far_distance(config) is None:
            mend = " Set clamp_len." if config.position_type == "xl" else ""
            raise ValueError(
                f"memory_type='linear' with position_type={config.position_type!r} needs a distance from which on the bias "
                f"no longer changes, because all older tokens share one state.{mend}"
            )

    @classmethod
    def tp_plan(cls, config) -> dict[str, str]:
        return {}  # random features are the same for all heads

    @classmethod
    def kept_rows(cls, config, mem_len: int) -> int:
        scheme = config.position_scheme
        far = scheme.far_distance(config) if scheme.has_bias else None
        return 0 if far is None else far - 1

    def before_call(self, is_fresh: bool) -> None:
        self.feature_map.before_call(is_fresh)

    def prepare(self, attention, hidden_states, state, piece):
        view = self._view(attention, state or LayerState(), piece)
        distances = view.distances if attention.position.has_bias else None
        attention.position.prepare(hidden_states, distances, [view.places], piece.context)

    def _turns(self, scheme) -> bool:
        """Whether a rotation turns features, in the numerator only: it does unless they stand for the softmax kernel."""
        return scheme.rotates and not self.feature_map.approximates_softmax

    def _view(self, attention, state: LayerState, piece) -> LinearView:
        key = ("linear", "view")
        if key not in piece.memo:
            band = self.kept_rows(self.config, piece.mem_len)
            past = min(state.size, band)
            # What estimates a kernel of rotated queries and keys is not blind to where they stand, so that is counted from
            # the first token of a document: it has the numbers that it has alone.
            places = piece.encode_positions if self._turns(attention.position) else piece.in_document
            distances = piece.falling(band + 2)
            piece.memo[key] = LinearView(band, past, Text(piece, past, band), places, distances)
        return piece.memo[key]

    def attend(self, attention, hidden_states, state, piece):
        state = state or LayerState()
        scheme = attention.position
        query, key, value = attention.project(hidden_states)
        dtype = torch.promote_types(query.dtype, torch.float32)
        turns = self._turns(scheme)
        band, past, text, places, distances = self._view(attention, state, piece)
        encoded = query
        if not turns:
            encoded, key = attention.encode(query, key, places, places, piece.context)
        bias = None
        if scheme.has_bias:
            bias = scheme.bias(query, distances, piece.context)
        if band:
            state = state.append(past, True, piece.state_dtype, key=key, value=value)
            key, value = (state.last(name, past + piece.width) for name in ("key", "value"))
        with torch.autocast(query.device.type, enabled=False):
            encoded = self.feature_map.query(encoded.to(dtype))
            key, value = self.feature_map.key(key.to(dtype)), value.to(dtype)
            if scheme.decays:  # the state of each query head decays at a rate of its own
                groups = query.shape[1] // key.shape[1]
                key, value = (tensor.repeat_interleave(groups, 1) for tensor in (key, value))
            sums, norm = self._sums(state, key, value)
            weigh = Weighing(text, dtype)
            if bias is not None and scheme.decays:
                weigh = Decay(text, dtype, -bias.table[:, -2])  # the rate is what distance 1 takes away
            elif bias is not None:
                weigh = Bias(text, dtype, bias, key.shape[1])
            if turns:
                turned_query, turned_key = attention.encode(encoded, key, places, places, piece.context)
                output, sums = blockwise(turned_query, turned_key, value, sums, text, weigh)
                total, norm = normalisers(encoded, key, norm, text, weigh)
            else:
                # The normaliser is one more channel of the values, which are all 1.
                value = functional.pad(value, (0, 1), value=1.0)
                output, sums = blockwise(encoded, key, value, torch.cat([sums, norm[..., None]], -1), text, weigh)
                output, total = output[..., :-1], output[..., -1:]
                sums, norm = sums[..., :-1], sums[..., -1]
            # A query whose feature products all vanish sees nothing. The bound keeps gradients, of size 1 / total, in range.
            output = output / total.masked_fill(total < torch.finfo(dtype).tiny * 1e8, torch.inf)
        state = state.with_fixed(state=sums, norm=norm)
        if piece.fillers is not None:
            state = state.pack(piece.fillers)
        if band:
            state = state.shrink(band)
        return Attended(output.to(query.dtype).transpose(1, 2).flatten(2), state)

    @staticmethod
    def _sums(state: LayerState, key, value):
        """S (B, G, F, D) and z (B, G, F) before the piece."""
        if "state" in state.fixed:
            return state.fixed["state"].to(key.dtype), state.fixed["norm"].to(key.dtype)
        batch, heads, _, size = key.shape
        return key.new_zeros(batch, heads, size, value.shape[-1]), key.new_zeros(batch, heads, size)
