"""Nemotron: layer norms that multiply by 1 + weight, a part of each head rotated, and no gate."""

from typing import Any, ClassVar

from .family import SourceFields
from .from_gemma import note_norms
from .from_llama import LlamaFamily
from .weight_map import Rule, rename


class NemotronFamily(LlamaFamily):
    name = "nemotron"
    model_types: ClassVar[tuple[str, ...]] = ("nemotron",)
    runs_back = False  # 1 + weight was rounded
    eps = "norm_eps"
    norm_type = "layernorm"
    rotates_part = True
    mlp_names: ClassVar[dict[str, str]] = {"up_proj": "up_proj", "down_proj": "down_proj"}

    def config(self, fields: SourceFields) -> dict[str, Any]:
        fields.expect("kv_channels", None, fields("head_dim"), why="the class reads head_dim, which says otherwise")
        note_norms(fields)
        return {**self.sizes(fields), "attention_bias": fields("attention_bias"), "mlp_bias": fields("mlp_bias")}

    def norm_rules(self, source: str, target: str) -> list[Rule]:
        return [rename(f"{source}.weight", f"{target}.weight", add=1.0), rename(f"{source}.bias", f"{target}.bias")]
