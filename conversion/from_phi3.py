"""Phi-3: Llama whose queries, keys and values are one tensor already, and whose gate and up projections are one too."""

from typing import Any, ClassVar

from modeling_xl.configuration_xl import XLConfig
from modeling_xl.text import InputError

from .family import SourceFields
from .from_llama import LAYER, LlamaFamily, hidden_dropout
from .weight_map import Rule, rename


class Phi3Family(LlamaFamily):
    name = "phi3"
    model_types: ClassVar[tuple[str, ...]] = ("phi3",)
    rotates_part = True
    lacks = ("attention_bias", "mlp_bias", "head_dim")

    def config(self, fields: SourceFields) -> dict[str, Any]:
        if (fields("rope_parameters") or {}).get("rope_type") == "longrope":
            raise InputError(
                f"{fields.where}: rope_type 'longrope' cannot be converted: its frequencies change when a text grows beyond "
                "original_max_position_embeddings, which contradicts keys that were rotated before"
            )
        fields.expect("attention_bias", False, why="the class has no biases")
        # The first is of longrope only, and no dropout follows the embedding, whatever the second says.
        fields.ignore("original_max_position_embeddings", "embd_pdrop")
        return {
            **self.sizes(fields),
            "attention_window": fields("sliding_window"),
            "hidden_dropout": hidden_dropout(fields, "resid_pdrop"),
        }

    def attention_rules(self, config: XLConfig) -> list[Rule]:
        names = [f"{LAYER}.self_attn.{part}.weight" for part in ("qkv_proj", "o_proj")]
        return [rename(name, name) for name in names]

    def mlp_rules(self, config: XLConfig) -> list[Rule]:
        down = f"{LAYER}.mlp.down_proj.weight"
        return [
            rename(f"{LAYER}.mlp.gate_up_proj.weight", f"{LAYER}.mlp.gate_proj.weight", share=(0, 2)),
            rename(f"{LAYER}.mlp.gate_up_proj.weight", f"{LAYER}.mlp.up_proj.weight", share=(1, 2)),
            rename(down, down),
        ]

    def fields(self, config: XLConfig) -> dict[str, Any]:
        return {
            **super().fields(config),
            "sliding_window": config.attention_window,
            "resid_pdrop": config.hidden_dropout,
        }
