"""Falcon, with rotary positions or ALiBi, in its three ways to fuse queries, keys and values and to place norms."""

from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from modeling_xl.configuration_xl import XLConfig
from modeling_xl.position_alibi import alibi_slopes
from modeling_xl.text import InputError

from .family import Family, SourceFields
from .weight_map import Rule, both, for_each, rename, rows_by_kind


def falcon_slopes(num_heads: int, head_dim: int) -> list[float]:
    """The class adds ALiBi before it scales scores, and holds slopes in bfloat16."""
    return [float(slope) * head_dim**-0.5 for slope in torch.tensor(alibi_slopes(num_heads)).bfloat16()]


class FalconFamily(Family):
    name = "falcon"
    model_types: ClassVar[tuple[str, ...]] = ("falcon",)
    base_prefix = "transformer."
    embedding = "transformer.word_embeddings.weight"
    runs_back = False  # which of its three layouts a model had is not kept
    drops: ClassVar[tuple[str, ...]] = (r"transformer\.h\.\d+\.self_attention\.rotary_emb\.inv_freq",)

    def config(self, fields: SourceFields) -> dict[str, Any]:
        fields.ignore("apply_residual_connection_post_layernorm", "multi_query", "num_kv_heads", "num_ln_in_parallel_attn")
        vocab_size, max_position = fields("vocab_size"), fields("max_position_embeddings")
        heads, width = fields("num_attention_heads"), fields("hidden_size")
        if width % heads:
            raise InputError(f"{fields.where}: hidden_size={width} is not a multiple of num_attention_heads={heads}")
        is_new, is_parallel = fields("new_decoder_architecture"), fields("parallel_attn")
        if is_new and not is_parallel:
            raise InputError(f"{fields.where}: new_decoder_architecture needs parallel_attn; the class cannot run otherwise")
        if fields("alibi"):
            position: dict[str, Any] = {"position_type": "alibi", "alibi_slopes": falcon_slopes(heads, width // heads)}
            fields.ignore("rope_parameters")
        else:
            rope = fields.rope_parameters(max_position)
            if rope.get("partial_rotary_factor", 1.0) != 1:
                raise InputError(f"{fields.where}: partial_rotary_factor cannot be converted: the class rotates whole heads")
            position = {"position_type": "rope", "rope_parameters": rope}
        return {
            "vocab_size": vocab_size,
            "hidden_size": width,
            "num_hidden_layers": fields("num_hidden_layers"),
            "num_attention_heads": heads,
            "num_key_value_heads": fields("num_kv_heads") if is_new else 1 if fields("multi_query") else heads,
            "intermediate_size": fields("ffn_hidden_size"),
            "hidden_act": fields("activation"),
            "gated_mlp": False,
            "attention_bias": fields("bias"),
            "mlp_bias": fields("bias"),
            "norm_type": "layernorm",
            "norm_eps": fields("layer_norm_epsilon"),
            "use_parallel_residual": is_parallel,
            "hidden_dropout": fields("hidden_dropout"),
            "attention_dropout": fields("attention_dropout"),
            "initializer_range": fields("initializer_range"),
            "tie_word_embeddings": fields("tie_word_embeddings"),
            "max_position_embeddings": max_position,
            **position,
            **fields.token_ids(vocab_size),
        }

    def tolerance(self, config: XLConfig) -> float:
        # The class rounds ALiBi to bfloat16, entry by entry.
        return 0.05 if config.position_type == "alibi" else super().tolerance(config)

    def rules(self, config: XLConfig, fields: SourceFields, names: Iterable[str]) -> list[Rule]:
        source, target, has_bias = "transformer.h.{i}", "model.layers.{i}", config.attention_bias
        heads, groups = config.num_attention_heads, config.num_key_value_heads or 1
        rows = rows_by_kind(groups, heads // groups, config.head_dim or 1)
        rules = [
            *both(f"{source}.self_attention.query_key_value", f"{target}.self_attn.qkv_proj", has_bias, rows=rows),
            *both(f"{source}.self_attention.dense", f"{target}.self_attn.o_proj", has_bias),
            *both(f"{source}.mlp.dense_h_to_4h", f"{target}.mlp.up_proj", has_bias),
            *both(f"{source}.mlp.dense_4h_to_h", f"{target}.mlp.down_proj", has_bias),
        ]
        for norm, place in zip(self._norms(config, fields), ("self_attn.norm", "mlp_norm"), strict=True):
            rules += both(f"{source}.{norm}", f"{target}.{place}")
        return [
            rename("transformer.word_embeddings.weight", "model.embed_tokens.weight"),
            *for_each(config.num_hidden_layers, rules),
            *both("transformer.ln_f", "model.norm"),
            *([] if config.tie_word_embeddings else [rename("lm_head.weight", "lm_head.weight")]),
        ]

    @staticmethod
    def _norms(config: XLConfig, fields: SourceFields) -> tuple[str, str]:
        """Before attention and before the feed-forward network; branches in parallel may share one."""
        count = fields("num_ln_in_parallel_attn", None) or (2 if fields("new_decoder_architecture") else 1)
        if not config.use_parallel_residual:
            return "input_layernorm", "post_attention_layernorm"
        if fields("new_decoder_architecture") and count == 2:
            return "ln_attn", "ln_mlp"
        return "input_layernorm", "input_layernorm"
