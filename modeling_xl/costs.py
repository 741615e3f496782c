"""What a model costs: parameters, bytes of cache, reach, multiply-accumulates. Counted on tensors without numbers.

The model runs as it is, on tensors that have a shape and a type only, so that every scheme and mechanism is counted by its
own code, in little time and memory.
"""

import math
from collections import Counter
from dataclasses import dataclass

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode
from transformers.initialization import no_init_weights

from .cache_xl import XLCache
from .configuration_xl import XLConfig
from .modeling_xl import XLForCausalLM

READ_TOKENS = 128  # of a call that reads, where the config has no segments


@dataclass(frozen=True, kw_only=True)
class Costs:
    """What a model of a config costs behind `tokens` tokens of one stream, read in one call without gradient."""

    tokens: int
    segment_len: int | None
    mem_len: int | None  # None: no layer has a memory of this length
    dtype: str  # of weights and memory
    num_parameters: int
    cache_bytes: int  # `XLCache.nbytes`, room for further rows included
    hidden_cache_bytes: int | None  # with form="hidden"; None where memory has one form only
    max_context: int | None  # tokens; None where nothing bounds it
    layers_times_memory: int | None  # N * M, the reach as the paper counts it
    decoding_macs: int  # multiply-accumulates of the next token, alone in its call
    reading_macs: int  # of a token of the next segment, read in one call


class _Numberless(TorchDispatchMode):
    """Keeps tensors of real numbers without numbers, and integers real, for these decide what is computed.

    Asked for a number that there is none of, as for which rows a compression keeps, it says 0: no shape depends on it.
    """

    def __init__(self, fakes: FakeTensorMode):
        super().__init__()
        self.fakes = fakes

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], FakeTensor):
            return torch.zeros((), dtype=args[0].dtype).item()
        if func is torch.ops.aten.empty.memory_format and (kwargs.get("dtype") or torch.float32).is_floating_point:
            with self.fakes:  # buffers of memory
                return func(*args, **kwargs)
        return func(*args, **kwargs)


@torch.no_grad()
def count_costs(config: XLConfig, tokens: int, dtype: torch.dtype = torch.float32) -> Costs:
    """The costs of a model of `config` behind `tokens` tokens. They depend on no weight and no text, so there are none.

    Multiply-accumulates are those of the matrix products of `attn_implementation="eager"`, masked scores included. Layers of
    one mechanism cost the same, so one of each is run.
    """
    kinds = Counter(config.layer_memory_types)
    one_of_each = type(config).from_dict({**config.to_dict(), "memory_type": list(kinds), "num_hidden_layers": len(kinds)})
    fakes = FakeTensorMode(allow_non_fake_inputs=True)
    with fakes, no_init_weights():
        model = XLForCausalLM._from_config(one_of_each, dtype=dtype, attn_implementation="eager").eval()
        model.tie_weights()  # a part of the initialisation
    model.requires_grad_(False)  # the counter hooks into whatever could have a gradient
    for layer in model.model.layers:
        # A plain parameter, of which parts are used; one number stands for all of it and takes no room.
        weight = layer.self_attn.qkv_proj.weight
        plain = torch.zeros((), dtype=dtype).expand(weight.shape)
        layer.self_attn.qkv_proj.weight = nn.Parameter(plain, requires_grad=False)
    counts = list(kinds.values())

    def whole(total: int, by_layer: list[int]) -> int:
        """What the whole model has, of the total of the one that was run and the part of each of its layers."""
        return total + sum((count - 1) * part for count, part in zip(counts, by_layer, strict=True))

    def filled(form: str | None = None) -> tuple[XLCache, int]:
        """The cache behind the text, and its bytes."""
        ids = torch.zeros(1, tokens, dtype=torch.long)
        cache = model(ids, cache=XLCache(model.config, form=form), use_cache=True, logits_to_keep=1).cache
        by_layer = [sum(tensor.nbytes for tensor in state.tensors()) for state in cache.states]
        for (*_, layer), (_, tensor) in cache.derived.items():
            by_layer[layer] += tensor.nbytes
        return cache, whole(cache.nbytes, by_layer)

    def macs(length: int) -> int:
        """Of a call of so many tokens, which leaves the cache as it is."""
        with FlopCounterMode(display=False) as counter:
            model(torch.zeros(1, length, dtype=torch.long), cache=cache, use_cache=False)
        found = counter.get_flop_counts()
        names = [f"{type(model).__name__}.model.layers.{layer}" for layer in range(len(counts))]
        return whole(counter.get_total_flops(), [sum(found[name].values()) for name in names]) // 2

    with _Numberless(fakes):
        cache, cache_bytes = filled()
        length = config.segment_len or READ_TOKENS
        mem_len = config.mem_len if config.uses_grid else None
        of_layers = [sum(parameter.numel() for parameter in layer.parameters()) for layer in model.model.layers]
        return Costs(
            tokens=tokens,
            segment_len=config.segment_len,
            mem_len=mem_len,
            dtype=str(dtype).removeprefix("torch."),
            num_parameters=whole(model.num_parameters(), of_layers),
            cache_bytes=cache_bytes,
            hidden_cache_bytes=filled("hidden")[1] if config.has_two_forms else None,
            max_context=int(config.max_context) if math.isfinite(config.max_context) else None,
            layers_times_memory=config.layers_times_memory,
            decoding_macs=macs(1),
            reading_macs=macs(length) // length,
        )
