"""One decoder layer: attention over memory and text, then the feed-forward network, with norms before or after each."""

from torch import nn
from transformers.modeling_layers import GradientCheckpointingLayer

from .attention_xl import XLAttention
from .feedforward_xl import XLFeedForward, drop, make_norm


class XLDecoderLayer(GradientCheckpointingLayer):
    """norm_position 'pre': h = x + attn(norm(x)), h + mlp(norm(h)), or both branches from x with `use_parallel_residual`.
    'post': h = norm(x + attn(x)), norm(h + mlp(h)), as in the original Transformer-XL. `norm_residual`: 'pre', with norm(x)
    and norm(h) in place of x and h in the sums.

    The memory comes in as `memory_state`, a name that activation checkpointing does not take away, and the new state goes
    out: a layer never writes to the cache, so running it again in the backward pass changes nothing.
    """

    def __init__(self, config, layer_idx: int):
        super().__init__()
        self.is_pre = config.norm_position == "pre"
        self.is_parallel = config.use_parallel_residual
        self.norm_residual = config.norm_residual
        self.self_attn = XLAttention(config, layer_idx, make_norm(config) if self.is_pre else nn.Identity())
        self.mlp = XLFeedForward(config)
        self.attention_norm = None if self.is_pre else make_norm(config)
        self.mlp_norm = make_norm(config)
        self.dropout = nn.Dropout(config.hidden_dropout)

    def forward(self, hidden_states, memory_state=None, piece=None):
        """hidden_states (B, t, E) -> (B, t, E), new state of the memory, attention weights and auxiliary loss (or None)."""
        attended, memory_state, weights, aux_loss = self.self_attn(hidden_states, memory_state, piece)
        if self.attention_norm is not None:
            hidden_states = self.attention_norm(hidden_states + drop(self.dropout, attended))
            hidden_states = self.mlp_norm(hidden_states + drop(self.dropout, self.mlp(hidden_states)))
        elif self.is_parallel:
            branch = self.mlp(self.mlp_norm(hidden_states))
            hidden_states = hidden_states + drop(self.dropout, attended) + drop(self.dropout, branch)
        else:
            residual = self.self_attn.norm(hidden_states) if self.norm_residual else hidden_states
            hidden_states = residual + drop(self.dropout, attended)
            normed = self.mlp_norm(hidden_states)
            residual = normed if self.norm_residual else hidden_states
            hidden_states = residual + drop(self.dropout, self.mlp(normed))
        return hidden_states, memory_state, weights, aux_loss
