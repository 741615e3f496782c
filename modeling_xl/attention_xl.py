"""`XLAttention`: projections of a layer, and the way from scores to an output through Transformers' attention interface.

What is attended to is the memory mechanism's, how distance enters is the position scheme's. Legend: B batch, H heads, t
tokens of a piece, K keys, D head size, E hidden size.
"""

import math

import torch
from torch import nn
from torch.func import functional_call
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from .feedforward_xl import XLRMSNorm
from .few_rows_xl import apply_linear, is_plain
from .heads_xl import HeadShare
from .memories import MEMORY_MECHANISMS
from .positions import POSITION_SCHEMES
from .softmax_xl import (
    blocked_attention,
    causal_mask,
    gather_bias,
    kernel_attention,
    plain_attention,
    scaled_scores,
    shift_by_query,
    trained_attention,
    zero_unseeing,
)


class XLAttention(nn.Module):
    """Attention of one layer over its memory and a piece of text.

    norm: what normalises the layer's input, and rows of memory, before they are projected (nothing where norms stand after).
    """

    def __init__(self, config, layer_idx: int, norm: nn.Module):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_heads = config.num_attention_heads
        self.num_key_value_heads = config.num_key_value_heads
        # Names that Transformers' attention functions read from the module.
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.is_causal = True
        self.scaling = self.head_dim**-0.5
        self.clip_qkv = config.clip_qkv
        self.attention_dropout = config.attention_dropout
        self.norm = norm
        size = (self.num_heads + 2 * self.num_key_value_heads) * self.head_dim
        self.qkv_proj = nn.Linear(config.hidden_size, size, bias=config.attention_bias)
        self.o_proj = nn.Linear(self.num_heads * self.head_dim, config.hidden_size, bias=config.attention_bias)
        self.q_norm = XLRMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.k_norm = XLRMSNorm(self.head_dim, config.norm_eps) if config.qk_norm else None
        self.position = POSITION_SCHEMES[config.position_type](config, layer_idx)
        self.memory = MEMORY_MECHANISMS[config.layer_memory_types[layer_idx]](config, layer_idx)
        self.share: HeadShare | None = None

    def share_heads(self, mesh) -> None:
        """Leaves to this process its part of the heads, as one of a tensor-parallel group, whose weights are spread next."""
        self.share = HeadShare(mesh, self.num_heads, self.num_key_value_heads, self.head_dim)
        self.num_heads = len(self.share.query_heads)
        self.num_key_value_heads = len(self.share.key_value_heads)
        self.num_key_value_groups = self.num_heads // self.num_key_value_heads
        self.position.keep_heads(self.share.query_heads)
        self.qkv_proj.register_forward_hook(self.share.take)

    def mean_over_heads(self, values):
        """What is a mean over this process's heads as the mean over all heads of the layer."""
        return values if self.share is None else self.share.mean(values)

    def forward(self, hidden_states, memory_state, piece):
        """hidden_states (B, t, E) -> output (B, t, E), and the rest of what the memory returns."""
        output, *others = self.memory.attend(self, hidden_states, memory_state, piece)
        return apply_linear(self.o_proj, output), *others

    def project(self, hidden_states):
        """Queries (B, H, t, D), keys and values (B, heads, t, D) of the piece, not encoded."""
        heads = self._heads(apply_linear(self.qkv_proj, self.norm(hidden_states)))
        query, key, value = heads.split([self.num_heads, self.num_key_value_heads, self.num_key_value_heads], 1)
        if self.q_norm is None or self.k_norm is None:
            return query, key, value
        return self.q_norm(query), self.k_norm(key), value

    def project_past(self, hidden_states, frozen: bool = False):
        """Keys and values (B, heads, U, D) of layer inputs kept in memory, not encoded.

        frozen: gradient goes to the layer inputs only, and not to the weights here.
        """
        part = slice(self.num_heads * self.head_dim, None)
        if frozen:
            projected = _frozen(self.qkv_proj, _frozen(self.norm, hidden_states))[..., part]
        else:
            projected = self._project_part(hidden_states, part)
        key, value = self._heads(projected).chunk(2, 1)
        if self.k_norm is None:
            return key, value
        return _frozen(self.k_norm, key) if frozen else self.k_norm(key), value

    def project_queries(self, hidden_states):
        """Queries (B, H, t, D) alone, not encoded."""
        query = self._heads(self._project_part(hidden_states, slice(self.num_heads * self.head_dim)))
        return query if self.q_norm is None else self.q_norm(query)

    def project_keys(self, hidden_states):
        """Keys (B, heads, U, D) alone, not encoded."""
        first, size = self.num_heads * self.head_dim, self.num_key_value_heads * self.head_dim
        key = self._heads(self._project_part(hidden_states, slice(first, first + size)))
        return key if self.k_norm is None else self.k_norm(key)

    def _project_part(self, hidden_states, part: slice):
        """Those columns of the projection."""
        if not is_plain(self.qkv_proj):
            return self.qkv_proj(self.norm(hidden_states))[..., part]
        bias = None if self.qkv_proj.bias is None else self.qkv_proj.bias[part]
        return nn.functional.linear(self.norm(hidden_states), self.qkv_proj.weight[part], bias)

    def _heads(self, projected):
        """(B, t, heads * D) -> (B, heads, t, D)."""
        if self.clip_qkv is not None:
            projected = projected.clamp(-self.clip_qkv, self.clip_qkv)
        return projected.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)

    def encode(self, query, key, query_positions, key_positions, context):
        return self.position.encode(query, key, query_positions, key_positions, context)

    def scores(self, query, encoded_query, key, distances, context):
        """Complete logits (B, H, t, K) for `GatheredDistances` (B, t, K)."""
        scores = scaled_scores(encoded_query, key, self.scaling)
        bias = gather_bias(self.position.bias(query, distances.values, context), distances)
        return scores if bias is None else scores + bias

    def softmax(
        self,
        query,
        encoded_query,
        key,
        value,
        context,
        mask=None,
        distances=None,
        gather_distances=None,
        sinks=None,
        wants_weights: bool = False,
    ):
        """Softmax attention of a piece over keys whose newest stands under the last query.

        query (B, H, t, D) before and encoded_query after `encode`; key, value (B, heads, K, D). mask (B or 1, 1, t, K),
        true where visible, or None: causal. distances (K,) falling to 0, of the last query; or gather_distances,
        `GatheredDistances` (B or 1, t, K). sinks: complete logits (B, H, t, s) and values (B, heads, s, D) of tokens beside
        the keys.

        Returns output (B, t, H * D) and weights (B, H, t, s + K), None unless wanted.
        """
        implementation = self.config._attn_implementation
        dropout = self.attention_dropout if self.training else 0.0
        bias = full = None  # as factors, or as a whole
        if self.position.has_bias:
            if gather_distances is None:
                bias = self.position.bias(query, distances, context)
            else:
                full = gather_bias(self.position.bias(query, gather_distances.values, context), gather_distances)
        length, num_keys = query.shape[2], key.shape[2]
        has_gradient = torch.is_grad_enabled()
        if implementation == "flex_attention" and has_gradient and query.device.type == "cpu":
            implementation = "sdpa"  # flex_attention has no backward pass on CPUs

        plain = implementation == "eager" or wants_weights
        if implementation == "sdpa":
            # One token: blocks are not worth their buffer. With gradient: the kernel's slow path is slower than the plain
            # form, and holds the same scores.
            plain = plain or (length == 1 and (self.position.has_bias or sinks is not None))
            plain = plain or (has_gradient and (full is not None or sinks is not None))
            if not plain and bias is not None and sinks is None:
                if has_gradient or dropout:
                    output = trained_attention(encoded_query, key, value, bias, mask, self.scaling, dropout)
                else:
                    output = blocked_attention(encoded_query, key, value, bias, mask, self.scaling)
                return self._merge(output), None
        if bias is not None:
            full = shift_by_query(bias.by_distance(), length)
        if mask is None and length > 1:
            mask = causal_mask(length, num_keys, query.device)
        is_simple = mask is None and sinks is None and not (has_gradient or dropout or wants_weights)
        if implementation == "sdpa" and length == 1 and is_simple and full is not None and full.dtype == query.dtype:
            return self._merge(kernel_attention(encoded_query, key, value, full, self.scaling)), None
        if plain:
            output, weights = plain_attention(encoded_query, key, value, full, mask, self.scaling, dropout, sinks)
            return self._merge(output), weights if wants_weights else None
        return self._interface(implementation, encoded_query, key, value, full, mask, dropout, sinks), None

    def _interface(self, implementation: str, query, key, value, bias, mask, dropout: float, sinks):
        """The attention function that Transformers knows by this name."""
        sees = mask
        if sinks is not None:
            # A key of zeros leaves the score to the bias, which holds the sinks' complete logits.
            logits, values = sinks
            zero = torch.zeros_like(values)
            key, value = torch.cat([zero, key], 2), torch.cat([values, value], 2)
            if bias is None:
                bias = logits.new_zeros(1, 1, 1, 1).expand(1, 1, query.shape[2], key.shape[2] - values.shape[2])
            if mask is not None:
                bias = bias.masked_fill(~mask, -math.inf)
                sees = mask.any(-1, keepdim=True) | (logits > -math.inf).any(-1, keepdim=True).any(1, keepdim=True)
                mask = None
            bias = torch.cat([logits, bias.expand(*logits.shape[:3], -1)], -1)
        if implementation == "flex_attention" and mask is not None:
            # Its mask tensors are added to the scores, and on CPUs they crash torch 2.13 unless they are the bias.
            hidden = torch.zeros_like(mask, dtype=query.dtype).masked_fill(~mask, torch.finfo(query.dtype).min)
            bias, mask = hidden if bias is None else bias + hidden, None
        if bias is not None:
            bias = bias.expand(query.shape[0], self.num_heads, query.shape[2], -1).contiguous()
        attention_interface = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, _no_such_interface)
        options = {} if bias is None else {"position_bias": bias.to(query.dtype)}
        if implementation == "sdpa" and mask is None:
            options["is_causal"] = False  # one query, or the bias holds the mask
        output, _ = attention_interface(
            self, query, key, value, mask, scaling=self.scaling, dropout=dropout, **options
        )  # (B, t, H, D)
        return zero_unseeing(output.transpose(1, 2), sees).transpose(1, 2).flatten(2)

    def _merge(self, output):
        return output.transpose(1, 2).flatten(2)  # (B, t, H * D)


def _frozen(module: nn.Module, states):
    """The module's output, as if none of its parameters were trained."""
    held = {name: parameter.detach() for name, parameter in module.named_parameters() if parameter.requires_grad}
    return functional_call(module, held, (states,))


def _no_such_interface(*args, **kwargs):
    known = ", ".join(["eager", *AttentionInterface().valid_keys()])
    raise ValueError(f"attn_implementation names no attention function that is registered; known are {known}.")
