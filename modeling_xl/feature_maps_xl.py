"""Feature maps of linear attention: φ with φ(q) . φ(k) >= 0 in place of exp(q . k / sqrt(D)).

Each has a map for queries and one for keys, (B, H, t, D) -> (B, H, t, F). A key's features never depend on other keys, so
they can be summed into a state; a query's may be scaled as a whole, since the normaliser takes any factor out again.
"""

import math
from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization as init

# exp of more than 88 overflows float32; keys stop this far short of it, so that 10^10 of them can be summed.
LARGEST_EXPONENT = 64.0


class FeatureMap(nn.Module):
    """φ for queries and keys alike. approximates_softmax: whether φ(q) . φ(k) estimates the softmax kernel itself, so that
    what a position scheme does to queries and keys belongs before the map and not after it."""

    approximates_softmax: ClassVar[bool] = False

    def query(self, query):
        raise NotImplementedError

    def key(self, key):
        return self.query(key)

    def before_call(self, is_fresh: bool) -> None:
        """Told once at the start of a training call; is_fresh: no row carries a state."""


class _EluPlusOne(torch.autograd.Function):
    """exp(x) up to 0 and x + 1 from there on: elu would round exp(x) - 1 to -1 where exp(x) still counts. As one function it
    keeps its result alone, of which the derivative is the part up to 1."""

    @staticmethod
    def forward(states):
        return states.clamp(max=0).exp_().add_(states.clamp(min=0))

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, grad):
        (output,) = ctx.saved_tensors
        return grad * output.clamp(max=1)


class EluFeatures(FeatureMap):
    """elu(x) + 1 (Katharopoulos et al., "Transformers are RNNs", ICML 2020, eq. 7)."""

    def query(self, query):
        # Without gradient the call of the function itself would cost a decoded token more than what it does.
        return _EluPlusOne.apply(query) if query.requires_grad else _EluPlusOne.forward(query)


class ReluFeatures(FeatureMap):
    """relu(x) + 0.001 (Choromanski et al., "Rethinking Attention with Performers", ICLR 2021, generalised attention; the
    small constant is that of the authors' code, and keeps the normaliser above zero)."""

    def query(self, query):
        return functional.relu(query) + 1e-3


class FavorFeatures(FeatureMap):
    """FAVOR+: positive orthogonal random features, φ(x) = exp(W x' - |x'|^2 / 2) / sqrt(m), x' = x / D^(1/4).

    E[φ(q) . φ(k)] = exp(q . k / sqrt(D)) (Choromanski et al., ICLR 2021, lemma 1 and section 3). The rows of W, `features`
    (m, D), are orthogonal in blocks of D and have the lengths of normal vectors. They are saved with the weights and
    drawn again only in training, every `redraw_interval` calls: at a call that carries no state, because a state belongs
    to the features that made it. All that is drawn follows from a saved seed, so ranks and resumed runs agree.
    """

    approximates_softmax = True
    features: torch.Tensor
    draws: torch.Tensor

    def __init__(self, config):
        super().__init__()
        self.redraw_interval = config.redraw_interval
        self.register_buffer("features", torch.empty(config.num_random_features, config.head_dim))
        # Seed; calls since the features were drawn; how often they were.
        self.register_buffer("draws", torch.zeros(3, dtype=torch.long))

    def init_parameters(self, std: float) -> None:
        init.copy_(self.draws, torch.tensor([int(torch.randint(2**31, ())), 0, 0]))
        init.copy_(self.features, self._draw())

    def _draw(self) -> torch.Tensor:
        seed, _, number = self.draws.tolist()
        count, size = self.features.shape
        return orthogonal_features(count, size, torch.Generator("cpu").manual_seed(seed + number))

    @torch.no_grad()
    def before_call(self, is_fresh: bool) -> None:
        if self.redraw_interval is None:
            return
        self.draws[1] += 1
        if is_fresh and int(self.draws[1]) > self.redraw_interval:
            self.draws[1], self.draws[2] = 1, self.draws[2] + 1
            self.features.copy_(self._draw())

    def _exponents(self, states):
        features = self.features.to(states.dtype)
        scaled = states * self.features.shape[1] ** -0.25
        exponents = scaled @ features.transpose(0, 1) - scaled.square().sum(-1, keepdim=True) / 2
        # A key's exponent is at most |w|^2 / 2, which large heads exceed. Whatever is moved from its feature to the
        # query's cancels in their product; it is a constant, so states of any time agree.
        moved = (features.square().sum(-1) / 2 - LARGEST_EXPONENT).clamp(min=0)
        return exponents, moved

    def query(self, query):
        exponents, moved = self._exponents(query)
        exponents = exponents + moved
        return (exponents - exponents.detach().amax(-1, keepdim=True)).exp()

    def key(self, key):
        exponents, moved = self._exponents(key)
        return (exponents - moved).exp() / math.sqrt(self.features.shape[0])


def orthogonal_features(count: int, size: int, generator: torch.Generator) -> torch.Tensor:
    """(count, size), float64: rows orthogonal in blocks of `size`, each as long as a normal vector of that size."""
    blocks = []
    for _ in range(-(-count // size)):
        drawn = torch.randn(size, size, generator=generator, dtype=torch.float64)
        basis, triangle = torch.linalg.qr(drawn)
        blocks.append((basis * triangle.diagonal().sign()).T)  # the sign makes the basis uniformly distributed
    lengths = torch.randn(count, size, generator=generator, dtype=torch.float64).norm(dim=1, keepdim=True)
    return torch.cat(blocks)[:count] * lengths


def make_feature_map(config) -> FeatureMap:
    if config.feature_map == "favor":
        return FavorFeatures(config)
    return EluFeatures() if config.feature_map == "elu" else ReluFeatures()


FEATURE_MAPS = ("elu", "relu", "favor")
