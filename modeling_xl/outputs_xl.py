"""What the models return. The state answers to `cache`, `past_key_values` and `mems`."""

from dataclasses import dataclass

import torch
from transformers.utils import ModelOutput

from .cache_xl import XLCache


class _WithMems:
    """`mems`, the name of the original Transformer-XL code, beside the names `ModelOutput` knows."""

    @property
    def mems(self) -> XLCache | None:
        return self.cache  # type: ignore[attr-defined]

    def __getitem__(self, key):
        return super().__getitem__("cache" if key == "mems" else key)  # type: ignore[misc]

    def __contains__(self, key) -> bool:
        return super().__contains__("cache" if key == "mems" else key)  # type: ignore[misc]


@dataclass
class XLModelOutput(_WithMems, ModelOutput):
    """last_hidden_state (B, T, E), zero at pads; cache; hidden_states: N + 1 tensors (B, T, E); attentions: N tensors
    (B, H, T, K), K = rows attended at the call's start + T, in time order; aux_loss: scalar or None."""

    last_hidden_state: torch.Tensor | None = None
    cache: XLCache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None


@dataclass
class XLCausalLMOutput(_WithMems, ModelOutput):
    """loss: scalar, nats a token; logits (B, T, V), log-probabilities with adaptive softmax (None in training with
    labels then); the rest as in `XLModelOutput`."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    cache: XLCache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None


@dataclass
class XLClassifierOutput(_WithMems, ModelOutput):
    """loss: scalar; logits (B, num_labels) for sequences, (B, T, num_labels) for tokens; the rest as in `XLModelOutput`."""

    loss: torch.Tensor | None = None
    logits: torch.Tensor | None = None
    cache: XLCache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None


@dataclass
class XLQuestionAnsweringOutput(_WithMems, ModelOutput):
    """loss: scalar; start_logits, end_logits (B, T); the rest as in `XLModelOutput`."""

    loss: torch.Tensor | None = None
    start_logits: torch.Tensor | None = None
    end_logits: torch.Tensor | None = None
    cache: XLCache | None = None
    hidden_states: tuple[torch.Tensor, ...] | None = None
    attentions: tuple[torch.Tensor, ...] | None = None
    aux_loss: torch.Tensor | None = None
