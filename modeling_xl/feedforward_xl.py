"""The feed-forward half of a layer, its activations, and the norms."""

import torch
from torch import nn
from transformers.activations import ACT2FN

from .few_rows_xl import apply_linear


class XLRMSNorm(nn.Module):
    """x / rms(x) * weight, statistics in float32 at least (Zhang and Sennrich 2019)."""

    def __init__(self, size: int, eps: float):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self.eps = eps

    def forward(self, hidden_states):
        raised = hidden_states.to(torch.promote_types(hidden_states.dtype, torch.float32))
        return nn.functional.rms_norm(raised, raised.shape[-1:], eps=self.eps).to(hidden_states.dtype) * self.weight


class XLLayerNorm(nn.LayerNorm):
    """Layer normalisation; torch's kernel keeps its statistics in float32 for half precision."""


def make_norm(config) -> nn.Module:
    if config.norm_type == "rmsnorm":
        return XLRMSNorm(config.hidden_size, config.norm_eps)
    return XLLayerNorm(config.hidden_size, eps=config.norm_eps)


def drop(dropout: nn.Dropout, states):
    """dropout(states), without the call where it changes nothing: a decoded token has 36 of them in 12 layers."""
    return dropout(states) if dropout.training and dropout.p else states


class BloomGELU(nn.Module):
    """x / 2 (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))), with the root cut off as Bloom has it: 1e-9 beside `gelu_new`."""

    def forward(self, states):
        return 0.5 * states * (1 + torch.tanh(0.79788456 * states * (1 + 0.044715 * states * states)))


# Beside those of transformers.activations.ACT2FN.
OWN_ACTIVATIONS = {"gelu_bloom": BloomGELU}


def make_activation(name: str) -> nn.Module:
    return OWN_ACTIVATIONS[name]() if name in OWN_ACTIVATIONS else ACT2FN[name]


class XLFeedForward(nn.Module):
    """down(act(gate x) * up x) where `gated_mlp` (Shazeer 2020), else down(act(up x)); (B, t, E) -> (B, t, E)."""

    def __init__(self, config):
        super().__init__()
        inner, bias = config.intermediate_size, config.mlp_bias
        self.gate_proj = nn.Linear(config.hidden_size, inner, bias=bias) if config.gated_mlp else None
        self.up_proj = nn.Linear(config.hidden_size, inner, bias=bias)
        self.down_proj = nn.Linear(inner, config.hidden_size, bias=bias)
        self.activation = make_activation(config.hidden_act)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states):
        inner = apply_linear(self.up_proj, hidden_states)
        if self.gate_proj is None:
            inner = self.activation(inner)
        else:
            inner = self.activation(apply_linear(self.gate_proj, hidden_states)) * inner
        return apply_linear(self.down_proj, drop(self.dropout, inner))
