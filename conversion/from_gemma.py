"""Gemma (the first): Llama whose norms multiply by 1 + weight, and whose embeddings are scaled by sqrt(hidden_size)."""

from typing import Any, ClassVar

from .family import SourceFields
from .from_llama import LlamaFamily
from .weight_map import Rule, rename


def note_norms(fields: SourceFields) -> None:
    fields.notes.append(
        "weights of norms became 1 + weight, in float32 where the file has half precision; then dtype of the new config says "
        "float32, so give the dtype wanted when you load it, or convert with --dtype"
    )


class GemmaFamily(LlamaFamily):
    name = "gemma"
    model_types: ClassVar[tuple[str, ...]] = ("gemma",)
    runs_back = False  # 1 + weight was rounded

    def config(self, fields: SourceFields) -> dict[str, Any]:
        fields.expect("use_bidirectional_attention", None, False, why="attention here sees nothing that follows")
        fields.expect("hidden_activation", None, fields("hidden_act"), why="the class reads hidden_act, which says otherwise")
        note_norms(fields)
        return {
            **self.sizes(fields),
            "attention_bias": fields("attention_bias"),
            # In half precision the class rounds the factor too, to 55.5 for 55.43 say; here only the product is rounded.
            "embedding_scale": fields("hidden_size") ** 0.5,
        }

    def norm_rules(self, source: str, target: str) -> list[Rule]:
        return [rename(f"{source}.weight", f"{target}.weight", add=1.0)]
