"""StarCoder2: layer norms, biases everywhere or nowhere, no gate, and a window of all layers."""

from typing import Any, ClassVar

from modeling_xl.configuration_xl import XLConfig

from .family import SourceFields
from .from_llama import LlamaFamily, hidden_dropout


class Starcoder2Family(LlamaFamily):
    name = "starcoder2"
    model_types: ClassVar[tuple[str, ...]] = ("starcoder2",)
    eps = "norm_epsilon"
    norm_type = "layernorm"
    mlp_names: ClassVar[dict[str, str]] = {"up_proj": "c_fc", "down_proj": "c_proj"}
    lacks = ("attention_bias", "mlp_bias", "head_dim")

    def config(self, fields: SourceFields) -> dict[str, Any]:
        fields.expect("mlp_type", "default", why="the class has one kind of feed-forward network")
        fields.expect("norm_type", "layer_norm", why="the class has layer norms")
        # What published files hold besides, of another code base; the class reads none of it.
        fields.ignore("activation_function", "layer_norm_epsilon", "scale_attn_weights")
        fields.ignore("attention_softmax_in_fp32", "scale_attention_softmax_in_fp32")
        has_bias = fields("use_bias")
        return {
            **self.sizes(fields),
            "attention_bias": has_bias,
            "mlp_bias": has_bias,
            "attention_window": fields("sliding_window"),
            "hidden_dropout": hidden_dropout(fields, "residual_dropout"),
            "embedding_dropout": fields("embedding_dropout"),
        }

    def fields(self, config: XLConfig) -> dict[str, Any]:
        return {
            **super().fields(config),
            "use_bias": config.attention_bias,
            "sliding_window": config.attention_window,
            "residual_dropout": config.hidden_dropout,
            "embedding_dropout": config.embedding_dropout,
        }
