"""OLMo (the first): Llama with layer norms that have no parameters, and a limit to the entries of queries, keys and values."""

from typing import Any, ClassVar

from modeling_xl.configuration_xl import XLConfig

from .family import SourceFields
from .from_llama import LlamaFamily
from .weight_map import Rule, fill


class OlmoFamily(LlamaFamily):
    name = "olmo"
    model_types: ClassVar[tuple[str, ...]] = ("olmo",)
    norm_type = "layernorm"
    lacks = ("mlp_bias", "head_dim", "rms_norm_eps")

    def config(self, fields: SourceFields) -> dict[str, Any]:
        return {**self.sizes(fields), "attention_bias": fields("attention_bias"), "clip_qkv": fields("clip_qkv")}

    def norm_eps(self, fields: SourceFields) -> float:
        return 1e-5  # fixed in the class

    def norm_rules(self, source: str, target: str) -> list[Rule]:
        return [fill(f"{target}.weight", 1.0), fill(f"{target}.bias", 0.0)]

    def fields(self, config: XLConfig) -> dict[str, Any]:
        return {**super().fields(config), "clip_qkv": config.clip_qkv}
