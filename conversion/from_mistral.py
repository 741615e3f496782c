"""Mistral: Llama whose queries see a window, which counts the query itself."""

from typing import Any, ClassVar

from modeling_xl.configuration_xl import XLConfig

from .family import SourceFields
from .from_llama import LlamaFamily


class MistralFamily(LlamaFamily):
    name = "mistral"
    model_types: ClassVar[tuple[str, ...]] = ("mistral",)
    lacks = ("attention_bias", "mlp_bias")

    def config(self, fields: SourceFields) -> dict[str, Any]:
        fields.expect("attention_bias", False, why="the class has no biases")
        return {**self.sizes(fields), "attention_window": fields("sliding_window", None)}

    def fields(self, config: XLConfig) -> dict[str, Any]:
        return {**super().fields(config), "sliding_window": config.attention_window}
