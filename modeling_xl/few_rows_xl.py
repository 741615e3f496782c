"""Products of few rows with a matrix, as decoding has them, on CPUs.

On AMD's processors MKL takes one row as a product of a matrix and a vector, which one thread reads alone, and a few rows as a
product that is laid out for many. As a batch of products of parts of the weight (12 layers of 512) one row takes 0.6 of that
time on one thread and 0.4 on two, two rows 0.5 and 0.25, four rows 0.8 and 0.45; from eight on one thread is slower. On
Intel's, where all threads read a matrix, the batch takes 2 to 3 times as long as the plain product.
"""

from typing import TypeGuard

import torch
from torch import nn
from torch.nn import functional

MOST_ROWS = 4
PARTS = 4


def _is_mkl_on_amd() -> bool:
    known = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    return torch.backends.mkl.is_available() and "AMD" in str(known.get("cpu_name"))


# Fixed for a machine, never measured: other forms round otherwise, and a state must go on with the numbers it began with.
VECTORS_ARE_SLOW = _is_mkl_on_amd()


def dot_products(queries: torch.Tensor, keys: torch.Tensor) -> torch.Tensor:
    """(..., Q, D) and (..., K, D) -> (..., Q, K)."""
    if VECTORS_ARE_SLOW and queries.shape[-2] == 1:
        # The same as a product that reads the keys as they lie: a third less time for a decoded token.
        return (keys @ queries.transpose(-1, -2)).transpose(-1, -2)
    return queries @ keys.transpose(-1, -2)


def for_dot_products(keys: torch.Tensor) -> torch.Tensor:
    """Keys (..., K, D) laid out as `dot_products` reads them fastest. On Intel's with the numbers of all keys side by side one
    query takes 0.64 of the time that it takes with those of a key, and 128 queries 0.85."""
    if VECTORS_ARE_SLOW or keys.device.type != "cpu":
        return keys
    return keys.transpose(-1, -2).contiguous().transpose(-1, -2)


def is_plain(module: nn.Module) -> TypeGuard[nn.Linear]:
    """Whether a Linear computes with nothing but its weight and bias, so that a part of them gives a part of its output.

    Adapters, quantisation, parametrisation and offloading replace the class, the weight's class, the method, or hook in.
    """
    hooked = module._forward_hooks or module._forward_pre_hooks or "forward" in vars(module)
    return type(module) is nn.Linear and type(module.weight) is nn.Parameter and not hooked


def apply_linear(module: nn.Module, states: torch.Tensor) -> torch.Tensor:
    """module(states), (..., E) -> (..., F), by parts of its weight where that is faster."""
    if _are_few(states) and is_plain(module):
        return _by_parts(states, module.weight, module.bias)
    return module(states)


def linear(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """`torch.nn.functional.linear`, by parts of the weight where that is faster."""
    return _by_parts(states, weight, bias) if _are_few(states) else functional.linear(states, weight, bias)


def _are_few(states: torch.Tensor) -> bool:
    return (
        VECTORS_ARE_SLOW
        and not torch.is_grad_enabled()
        and states.device.type == "cpu"
        and states.dtype == torch.float32
        and 0 < states.numel() <= MOST_ROWS * states.shape[-1]
        and not torch.is_autocast_enabled("cpu")
        and not torch.compiler.is_compiling()  # the compiler chooses by itself
    )


def _by_parts(states: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    size = weight.shape[0] - weight.shape[0] % PARTS
    columns = states.reshape(-1, states.shape[-1]).t()  # (E, n)
    parts = weight[:size].view(PARTS, -1, weight.shape[1])
    output = torch.bmm(parts, columns.expand(PARTS, -1, -1)).flatten(0, 1).t()  # (n, F)
    if size < weight.shape[0]:
        output = torch.cat([output, functional.linear(columns.t(), weight[size:])], 1)
    if bias is not None:
        output = output + bias
    return output.reshape(*states.shape[:-1], -1)
