"""Tiny models and ways to feed them, shared by the tests."""

import torch

from modeling_xl import XLConfig, XLForCausalLM

SIZES = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "segment_len": 5,
    "mem_len": 7,
}

# Settings of DESIGN's grid, each with the values a query's view depends on: memory longer and shorter than a segment, none at
# all, windows that hide the grid and that do not, sinks, the start of zeros.
SETTINGS = {
    "plain": {},
    "mem_shorter_than_segment": {"segment_len": 8, "mem_len": 3},
    "mem_0": {"mem_len": 0},
    "window": {"attention_window": 6},
    "window_beyond_memory": {"attention_window": 11},
    "window_1": {"attention_window": 1},
    "sinks": {"num_sink_tokens": 3},
    "sinks_window": {"num_sink_tokens": 2, "attention_window": 4},
    "sinks_longer_than_segment": {"num_sink_tokens": 7, "segment_len": 3, "mem_len": 4},
    "zeros": {"initial_memory": "zeros"},
    "zeros_window": {"initial_memory": "zeros", "attention_window": 6},
    "zeros_sinks": {"initial_memory": "zeros", "num_sink_tokens": 2},
}


def tiny_config(**changes) -> XLConfig:
    return XLConfig(**{**SIZES, **changes})


def tiny_model(dtype=torch.float64, seed=0, attn_implementation="sdpa", **changes) -> XLForCausalLM:
    """A model in eval mode whose weights are far from their initial values, so that a wrong sign is not a small error."""
    torch.manual_seed(seed)
    model = XLForCausalLM._from_config(tiny_config(**changes), attn_implementation=attn_implementation)
    return randomise(model).to(dtype).eval()


def randomise(model):
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in sorted(model.named_parameters()):
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() == 1 and "norm" in name and name.endswith("weight"):
                parameter.copy_(1 + 0.3 * drawn)
            else:
                parameter.copy_(drawn * (0.6 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5 * 1.5))
    return model


def ids_for(model, *shape, seed=3) -> torch.Tensor:
    return torch.randint(0, model.config.vocab_size, shape, generator=torch.Generator().manual_seed(seed))


def random_splits(length: int, longest: int, generator: torch.Generator) -> list[int]:
    parts = []
    while length:
        part = int(torch.randint(1, min(length, longest) + 1, (), generator=generator))
        parts.append(part)
        length -= part
    return parts


def feed(model, ids, parts, cache=None, **per_token):
    """Logits (B, T, V) and the cache after feeding the columns in `parts`."""
    logits, start = [], 0
    for part in parts:
        here = {name: value[:, start : start + part] for name, value in per_token.items()}
        output = model(ids[:, start : start + part], cache=cache, **here)
        logits.append(output.logits)
        cache, start = output.cache, start + part
    return torch.cat(logits, 1), cache


def biggest(a, b) -> float:
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a - b).detach().abs().max())
