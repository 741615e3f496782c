"""Compression functions of the Compressive Transformer: c old rows become one.

Rae et al., "Compressive Transformers for Long-Range Sequence Modelling", ICLR 2020, section 3.1. Legend: B rows of the
batch, n old rows, a multiple of c; E hidden size.
"""

from typing import ClassVar

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization as init


class Compression(nn.Module):
    """(B, n, E) -> (B, n / c, E). chooses: whether it keeps rows as they are, by how much they were used."""

    chooses: ClassVar[bool] = False

    def __init__(self, config):
        super().__init__()
        self.rate = config.compression_rate

    def forward(self, rows):
        raise NotImplementedError


class MeanCompression(Compression):
    def forward(self, rows):
        return rows.unflatten(1, (-1, self.rate)).mean(2)


class MaxCompression(Compression):
    def forward(self, rows):
        return rows.unflatten(1, (-1, self.rate)).amax(2)


class ConvCompression(Compression):
    """Convolution with stride c and c taps; with a dilation the last tap stays on the last row of each window and the
    others reach back that far apart (nothing before the first of the n rows). It begins as the mean of its taps."""

    def __init__(self, config):
        super().__init__(config)
        self.dilation = config.compression_dilation if config.compression_fn == "dilated" else 1
        self.weight = nn.Parameter(torch.empty(config.hidden_size, config.hidden_size, self.rate))  # out, in, tap
        self.bias = nn.Parameter(torch.empty(config.hidden_size))

    def init_parameters(self, std: float) -> None:
        init.copy_(self.weight, torch.eye(self.weight.shape[0])[:, :, None].expand_as(self.weight) / self.rate)
        init.zeros_(self.bias)

    def forward(self, rows):
        # As a product, which takes half of conv1d's time on CPUs.
        reach = (self.rate - 1) * (self.dilation - 1)
        first = torch.arange(0, rows.shape[1], self.rate)[:, None]
        taps = functional.pad(rows, (0, 0, reach, 0))[:, first + self.dilation * torch.arange(self.rate)]  # (B, n / c, c, E)
        return functional.linear(taps.transpose(2, 3).flatten(2), self.weight.flatten(1), self.bias)


class MostUsed(Compression):
    """Keeps the n / c rows that received most attention, in their order; of equals the older."""

    chooses = True

    def choose(self, usage: torch.Tensor) -> torch.Tensor:
        """usage (B, n) -> the rows kept (B, n / c), numbers from 0 up."""
        order = usage.argsort(dim=1, descending=True, stable=True)
        return order[:, : usage.shape[1] // self.rate].sort(1).values


class Decompression(nn.Module):
    """(B, n / c, E) -> (B, n, E): what the auto-encoding loss reads the old rows back with. It begins by repeating."""

    def __init__(self, config):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(config.hidden_size, config.hidden_size, config.compression_rate))

    def init_parameters(self, std: float) -> None:
        init.copy_(self.weight, torch.eye(self.weight.shape[0])[:, :, None].expand_as(self.weight))

    def forward(self, compressed):
        return torch.einsum("bne,eoc->bnco", compressed, self.weight).flatten(1, 2)


COMPRESSIONS: dict[str, type[Compression]] = {
    "mean": MeanCompression,
    "max": MaxCompression,
    "conv": ConvCompression,
    "dilated": ConvCompression,
    "most_used": MostUsed,
}
