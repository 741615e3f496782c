"""Linear layers that hold integers and a scale in place of their weight, as quantisation libraries make them."""

import copy

import torch
from helpers import feed, ids_for
from report_helpers import EXACT, every_pair, make, off
from torch import nn


class PackedLinear(nn.Linear):
    """One scale a row, as int8 of bitsandbytes; the weight has neither the dtype nor, as its int4, the shape of a matrix."""

    def __init__(self, plain: nn.Linear):
        super().__init__(plain.in_features, plain.out_features, bias=plain.bias is not None, device="meta")
        scale = plain.weight.detach().abs().amax(1, keepdim=True) / 127
        self.bias = plain.bias
        self.weight = nn.Parameter((plain.weight.detach() / scale).round().to(torch.int8).view(-1, 1), requires_grad=False)
        self.register_buffer("scale", scale)

    @property
    def unpacked(self) -> torch.Tensor:
        return self.weight.view(self.out_features, self.in_features) * self.scale

    def forward(self, states):
        return nn.functional.linear(states, self.unpacked, self.bias)


@every_pair
def test_packed_weights_are_asked_and_not_read(scheme, memory):
    """Whole, in pieces and with gradient, the numbers are those of a plain model with the same rounded weights."""
    plain = make(scheme, memory, tie_word_embeddings=False)
    packed = copy.deepcopy(plain)
    for name, module in list(packed.named_modules()):
        if type(module) is nn.Linear:
            layer = PackedLinear(module)
            packed.set_submodule(name, layer)
            plain.get_submodule(name).weight.data = layer.unpacked
    ids = ids_for(plain, 2, 23)
    with torch.no_grad():
        expected = plain(ids).logits
        assert off(packed(ids).logits, expected) < EXACT
        assert off(feed(packed, ids, [9, 1, 1, 5, 1, 6])[0], expected) < EXACT
    assert off(packed(ids).logits, expected) < EXACT
