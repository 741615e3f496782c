"""Qwen2: Llama with biases of queries, keys and values alone, and a window that some of its layers may have."""

from typing import Any, ClassVar

from modeling_xl.configuration_xl import XLConfig
from modeling_xl.text import InputError

from .family import SourceFields
from .from_llama import LlamaFamily


def window(fields: SourceFields) -> int | None:
    """The window of all layers, or None if all see everything."""
    # Both went into `layer_types` when the config was made.
    fields.ignore("use_sliding_window", "max_window_layers")
    width, kinds = fields("sliding_window"), fields("layer_types")[: fields("num_hidden_layers")]
    if set(kinds) <= {"full_attention"}:
        return None
    if set(kinds) != {"sliding_attention"} or width is None:
        raise InputError(
            f"{fields.where}: sliding_window={width} with layer_types={kinds} cannot be converted: here all layers have one "
            "window or none, so that full_attention and sliding_attention do not mix"
        )
    return width


def window_fields(config: XLConfig) -> dict[str, Any]:
    """What `window` reads, on the way back."""
    if config.attention_window is None:
        return {"use_sliding_window": False}
    return {"use_sliding_window": True, "sliding_window": config.attention_window, "max_window_layers": 0}


class Qwen2Family(LlamaFamily):
    name = "qwen2"
    model_types: ClassVar[tuple[str, ...]] = ("qwen2",)
    output_has_bias = False
    lacks = ("attention_bias", "mlp_bias", "head_dim")

    def config(self, fields: SourceFields) -> dict[str, Any]:
        fields.expect("use_mrope", False, why="positions here have one axis")
        return {**self.sizes(fields), "attention_bias": True, "attention_window": window(fields)}

    def fields(self, config: XLConfig) -> dict[str, Any]:
        return {**super().fields(config), **window_fields(config)}
