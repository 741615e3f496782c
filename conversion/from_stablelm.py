"""StableLM: Llama with layer norms, a part of each head rotated, and branches in parallel behind one norm if it says so."""

from typing import Any, ClassVar

from modeling_xl.configuration_xl import XLConfig

from .family import SourceFields
from .from_llama import LlamaFamily, hidden_dropout


class StableLmFamily(LlamaFamily):
    name = "stablelm"
    model_types: ClassVar[tuple[str, ...]] = ("stablelm",)
    eps = "layer_norm_eps"
    norm_type = "layernorm"
    rotates_part = True
    output_has_bias = False
    lacks = ("attention_bias", "mlp_bias", "head_dim")

    def config(self, fields: SourceFields) -> dict[str, Any]:
        fields.expect("qk_layernorm", False, why="each head of a query or key has a layer norm of its own, which none has here")
        head_dim = fields("hidden_size") // fields("num_attention_heads")
        fields.expect("head_dim", None, head_dim, why="the class always divides hidden_size by the number of heads")
        return {
            **self.sizes(fields),
            "use_parallel_residual": fields("use_parallel_residual"),
            "attention_bias": fields("use_qkv_bias"),
            "hidden_dropout": hidden_dropout(fields, "hidden_dropout"),
        }

    def fields(self, config: XLConfig) -> dict[str, Any]:
        same = ("use_parallel_residual", "hidden_dropout")
        return {
            **super().fields(config),
            **{name: getattr(config, name) for name in same},
            "use_qkv_bias": config.attention_bias,
        }
