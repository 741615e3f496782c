"""Bloom: ALiBi, a norm on the embeddings, queries, keys and values fused head by head, biases everywhere but in the head."""

from collections.abc import Iterable
from typing import Any, ClassVar

from modeling_xl.configuration_xl import XLConfig
from modeling_xl.text import InputError

from .family import TOKEN_IDS, Family, SourceFields
from .weight_map import Rule, both, for_each, rename, rows_by_kind


class BloomFamily(Family):
    name = "bloom"
    model_types: ClassVar[tuple[str, ...]] = ("bloom",)
    base_prefix = "transformer."
    embedding = "transformer.word_embeddings.weight"

    def config(self, fields: SourceFields) -> dict[str, Any]:
        is_sliced, slices = fields("slow_but_exact"), fields("pretraining_tp")
        if is_sliced and slices > 1:
            raise InputError(
                f"{fields.where}: slow_but_exact with pretraining_tp > 1 leaves out biases; set slow_but_exact to false"
            )
        fields.ignore("offset_alibi", "attention_softmax_in_fp32", "skip_bias_add")
        fields.ignore("skip_bias_add_qkv", "bias_dropout_fusion", "masked_softmax_fusion", "seq_length")
        fields.expect(
            "n_inner", None, 4 * fields("hidden_size"), why="the class makes it 4 times hidden_size whatever stands here"
        )
        vocab_size = fields("vocab_size")
        return {
            "vocab_size": vocab_size,
            "hidden_size": fields("hidden_size"),
            "num_hidden_layers": fields("n_layer"),
            "num_attention_heads": fields("n_head"),
            "intermediate_size": 4 * fields("hidden_size"),
            "hidden_act": "gelu_bloom",
            "gated_mlp": False,
            "attention_bias": True,
            "mlp_bias": True,
            "norm_type": "layernorm",
            "norm_eps": fields("layer_norm_epsilon"),
            "norm_residual": fields("apply_residual_connection_post_layernorm"),
            "embedding_norm": True,
            "hidden_dropout": fields("hidden_dropout"),
            "attention_dropout": fields("attention_dropout"),
            "initializer_range": fields("initializer_range"),
            "tie_word_embeddings": fields("tie_word_embeddings"),
            "position_type": "alibi",
            **fields.token_ids(vocab_size),
        }

    def rules(self, config: XLConfig, fields: SourceFields, names: Iterable[str]) -> list[Rule]:
        source, target = "transformer.h.{i}", "model.layers.{i}"
        heads = rows_by_kind(config.num_attention_heads, 1, config.head_dim or 1)
        rules = [
            *both(f"{source}.self_attention.query_key_value", f"{target}.self_attn.qkv_proj", rows=heads),
            *both(f"{source}.self_attention.dense", f"{target}.self_attn.o_proj"),
            *both(f"{source}.input_layernorm", f"{target}.self_attn.norm"),
            *both(f"{source}.post_attention_layernorm", f"{target}.mlp_norm"),
            *both(f"{source}.mlp.dense_h_to_4h", f"{target}.mlp.up_proj"),
            *both(f"{source}.mlp.dense_4h_to_h", f"{target}.mlp.down_proj"),
        ]
        return [
            rename("transformer.word_embeddings.weight", "model.embed_tokens.weight"),
            *both("transformer.word_embeddings_layernorm", "model.embed_norm"),
            *for_each(config.num_hidden_layers, rules),
            *both("transformer.ln_f", "model.norm"),
            *([] if config.tie_word_embeddings else [rename("lm_head.weight", "lm_head.weight")]),
        ]

    def fields(self, config: XLConfig) -> dict[str, Any]:
        same = ("vocab_size", "hidden_size", "hidden_dropout", "attention_dropout", "initializer_range", "tie_word_embeddings")
        return {
            **{name: getattr(config, name) for name in (*same, *TOKEN_IDS)},
            "n_layer": config.num_hidden_layers,
            "n_head": config.num_attention_heads,
            "layer_norm_epsilon": config.norm_eps,
            "apply_residual_connection_post_layernorm": config.norm_residual,
        }
