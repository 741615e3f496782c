"""Phi (1, 1.5, 2): both branches in parallel behind one norm, a part of each head rotated, biases everywhere, no gate."""

from typing import Any, ClassVar

from modeling_xl.configuration_xl import XLConfig

from .family import SourceFields
from .from_llama import LlamaFamily, hidden_dropout


class PhiFamily(LlamaFamily):
    name = "phi"
    model_types: ClassVar[tuple[str, ...]] = ("phi",)
    eps = "layer_norm_eps"
    norm_type = "layernorm"
    final_norm = "model.final_layernorm"
    rotates_part = True
    output = "dense"
    mlp_names: ClassVar[dict[str, str]] = {"up_proj": "fc1", "down_proj": "fc2"}
    lacks = ("attention_bias", "mlp_bias", "head_dim")

    def config(self, fields: SourceFields) -> dict[str, Any]:
        fields.expect("qk_layernorm", False, why="the norms of queries and keys here are RMS norms, without a mean and a bias")
        return {
            **self.sizes(fields),
            "use_parallel_residual": True,
            "attention_bias": True,
            "mlp_bias": True,
            "lm_head_bias": True,
            "hidden_dropout": hidden_dropout(fields, "resid_pdrop"),
            "embedding_dropout": fields("embd_pdrop", 0.0),
        }

    def fields(self, config: XLConfig) -> dict[str, Any]:
        return {**super().fields(config), "resid_pdrop": config.hidden_dropout, "embd_pdrop": config.embedding_dropout}
