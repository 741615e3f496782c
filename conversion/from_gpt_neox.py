"""GPT-NeoX: queries, keys and values fused head by head, rotary on a part of each head, branches in parallel or not."""

from collections.abc import Iterable
from typing import Any, ClassVar

from modeling_xl.configuration_xl import XLConfig

from .family import TOKEN_IDS, Family, SourceFields
from .weight_map import Rule, both, for_each, rename, rows_by_kind


class GPTNeoXFamily(Family):
    name = "gpt-neox"
    model_types: ClassVar[tuple[str, ...]] = ("gpt_neox",)
    base_prefix = "gpt_neox."
    head = "embed_out"
    embedding = "gpt_neox.embed_in.weight"
    # Masks and frequencies that older files hold.
    drops: ClassVar[tuple[str, ...]] = (
        r"gpt_neox\.layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",
        r"gpt_neox\.rotary_emb\.inv_freq",
    )

    def config(self, fields: SourceFields) -> dict[str, Any]:
        fields.ignore("classifier_dropout", "is_decoder")
        vocab_size, max_position = fields("vocab_size"), fields("max_position_embeddings")
        return {
            **{name: fields(name) for name in self.same_fields},
            "vocab_size": vocab_size,
            "max_position_embeddings": max_position,
            "gated_mlp": False,
            "mlp_bias": True,
            "norm_type": "layernorm",
            "norm_eps": fields("layer_norm_eps"),
            "position_type": "rope",
            "rope_parameters": fields.rope_parameters(max_position),
            **fields.token_ids(vocab_size),
        }

    same_fields: ClassVar[tuple[str, ...]] = (
        *("hidden_size", "num_hidden_layers", "num_attention_heads", "intermediate_size", "hidden_act", "initializer_range"),
        *("use_parallel_residual", "attention_bias", "attention_dropout", "hidden_dropout", "tie_word_embeddings"),
    )

    def rules(self, config: XLConfig, fields: SourceFields, names: Iterable[str]) -> list[Rule]:
        source, target = "gpt_neox.layers.{i}", "model.layers.{i}"
        # The class's own name of the head has changed; it still saves it under the first one.
        head = "lm_head.weight" if "lm_head.weight" in names else "embed_out.weight"
        heads = rows_by_kind(config.num_attention_heads, 1, config.head_dim or 1)
        rules = [
            *both(f"{source}.attention.query_key_value", f"{target}.self_attn.qkv_proj", config.attention_bias, rows=heads),
            *both(f"{source}.attention.dense", f"{target}.self_attn.o_proj", config.attention_bias),
            *both(f"{source}.input_layernorm", f"{target}.self_attn.norm"),
            *both(f"{source}.post_attention_layernorm", f"{target}.mlp_norm"),
            *both(f"{source}.mlp.dense_h_to_4h", f"{target}.mlp.up_proj"),
            *both(f"{source}.mlp.dense_4h_to_h", f"{target}.mlp.down_proj"),
        ]
        return [
            rename("gpt_neox.embed_in.weight", "model.embed_tokens.weight"),
            *for_each(config.num_hidden_layers, rules),
            *both("gpt_neox.final_layer_norm", "model.norm"),
            *([] if config.tie_word_embeddings else [rename(head, "lm_head.weight")]),
        ]

    def ties(self, config: XLConfig) -> dict[str, str]:
        names = ("embed_out.weight", "lm_head.weight") if config.tie_word_embeddings else ()
        return dict.fromkeys(names, self.embedding)

    def fields(self, config: XLConfig) -> dict[str, Any]:
        rope = {"partial_rotary_factor": 1.0, **(config.rope_parameters or {})}  # the class' default is a quarter
        same = (*self.same_fields, "vocab_size", "max_position_embeddings", *TOKEN_IDS)
        return {**{name: getattr(config, name) for name in same}, "layer_norm_eps": config.norm_eps, "rope_parameters": rope}
