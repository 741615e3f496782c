"""Qwen3: Llama with an RMS norm of each query and key, and a window that some of its layers may have."""

from typing import Any, ClassVar

from modeling_xl.configuration_xl import XLConfig

from .family import SourceFields
from .from_llama import LAYER, LlamaFamily
from .from_qwen2 import window, window_fields
from .weight_map import Rule, rename


class Qwen3Family(LlamaFamily):
    name = "qwen3"
    model_types: ClassVar[tuple[str, ...]] = ("qwen3",)
    lacks = ("mlp_bias",)

    def config(self, fields: SourceFields) -> dict[str, Any]:
        return {
            **self.sizes(fields),
            "attention_bias": fields("attention_bias"),
            "qk_norm": True,
            "attention_window": window(fields),
        }

    def attention_rules(self, config: XLConfig) -> list[Rule]:
        norms = [f"{LAYER}.self_attn.{letter}_norm.weight" for letter in "qk"]
        return [*super().attention_rules(config), *(rename(name, name) for name in norms)]

    def fields(self, config: XLConfig) -> dict[str, Any]:
        return {**super().fields(config), **window_fields(config)}
