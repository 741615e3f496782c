"""Tiny models and ways to feed them, shared by the tests."""

import pytest
import torch
from huggingface_hub.errors import StrictDataclassError

from modeling_xl import XLConfig, XLForCausalLM
from modeling_xl.memories import MEMORY_MECHANISMS

SIZES = {
    "vocab_size": 97,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 20,
    "segment_len": 5,
    "mem_len": 7,
    "compressed_mem_len": 4,
    "compression_rate": 2,
    "num_random_features": 11,
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
# Choices of one mechanism. Rates that do not divide what leaves the memory keep a remainder.
SETTINGS_OF = {
    "compressive": {
        "remainder": {"compression_rate": 3, "segment_len": 7, "compressed_mem_len": 3},
        "one_line_of_slots": {"mem_len": 5, "compressed_mem_len": 2},
        "mean": {"compression_fn": "mean", "compression_loss": None},
        "max_remainder": {"compression_fn": "max", "compression_loss": None, "compression_rate": 3},
        "dilated": {"compression_fn": "dilated", "compression_rate": 3, "segment_len": 9, "mem_len": 10},
        "most_used": {"compression_fn": "most_used", "compression_loss": None, "compressed_mem_len": 5},
        "most_used_zeros": {"compression_fn": "most_used", "compression_loss": None, "initial_memory": "zeros"},
        "autoencode": {"compression_loss": "autoencode"},
    },
    "linear": {"relu": {"feature_map": "relu"}, "favor": {"feature_map": "favor"}},
}
# Every kind of state that a cache holds.
KEPT_STATES = [
    pytest.param({"memory_type": "none"}, id="none"),
    pytest.param({"memory_type": "recurrence"}, id="recurrence"),
    pytest.param({"initial_memory": "zeros", "num_sink_tokens": 2, "attention_window": 6}, id="zeros_sinks_window"),
    pytest.param({"segment_len": None}, id="no_grid"),
    pytest.param({"memory_type": ["recurrence", "none", "recurrence"]}, id="mixture"),
    pytest.param({"memory_type": "compressive", "position_type": "rope"}, id="compressive"),
    pytest.param(
        {
            "memory_type": "compressive",
            "compression_fn": "most_used",
            "compression_loss": None,
            "initial_memory": "zeros",
            "num_sink_tokens": 2,
        },
        id="compressive_most_used_zeros_sinks",
    ),
    pytest.param({"memory_type": "linear", "feature_map": "favor"}, id="linear_band"),
    pytest.param({"memory_type": "linear", "position_type": "alibi"}, id="linear_decay"),
    pytest.param({"memory_type": ["linear", "compressive", "recurrence"], "position_type": "t5"}, id="mixture_of_three"),
]


def tiny_config(**changes) -> XLConfig:
    memory = changes.get("memory_type", "recurrence")
    if "linear" in (memory if isinstance(memory, list) else [memory]):
        # Distances from which on the bias is constant, well inside the texts of the tests.
        if changes.get("position_type", "xl") == "xl":
            changes = {"clamp_len": 6, **changes}
        changes = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20, **changes}
    return XLConfig(**{**SIZES, **changes})


def accepts(memory: str, **setting) -> bool:
    """Whether the config accepts the setting for the mechanism; what it refuses is tested where it is refused."""
    try:
        tiny_config(memory_type=memory, **setting)
    except (ValueError, StrictDataclassError):
        return False
    return True


def means_something(memory: str, setting) -> bool:
    return MEMORY_MECHANISMS[memory].uses_grid or not {"mem_len", "segment_len"} & set(setting)


def memory_cases(*names):
    """pytest parameters (memory, setting): all settings, or the named ones, that mean something to each mechanism."""
    found = []
    for memory in MEMORY_MECHANISMS:
        own = SETTINGS_OF.get(memory, {})
        chosen = {**SETTINGS, **own} if not names else {name: {**SETTINGS, **own}.get(name) for name in names}
        for name, setting in chosen.items():
            if setting is not None and accepts(memory, **setting) and means_something(memory, setting):
                found.append(pytest.param(memory, setting, id=f"{memory}-{name}"))
    return found


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
