"""XLNet of attn_type 'uni': Transformer-XL's positions and memory, projections as (E, H, D).

Token types and the stream that predicts permuted places are left out.
"""

from collections.abc import Iterable
from typing import Any, ClassVar

from modeling_xl.configuration_xl import XLConfig

from .family import Family, SourceFields
from .weight_map import Rule, both, for_each, rename


class XLNetFamily(Family):
    name = "xlnet"
    model_types: ClassVar[tuple[str, ...]] = ("xlnet",)
    base_prefix = "transformer."
    embedding = "transformer.word_embedding.weight"
    head = "lm_loss"
    # For token types, and for the stream that predicts permuted places: a decoder has neither.
    drops: ClassVar[tuple[str, ...]] = (
        r"transformer\.mask_emb",
        r"transformer\.layer\.\d+\.rel_attn\.(r_s_bias|seg_embed)",
    )
    has_full_attention = False
    runs_back = False

    def config(self, fields: SourceFields) -> dict[str, Any]:
        fields.expect("attn_type", "uni", why="attention to both sides is no decoder's")
        fields.expect("bi_data", False, why="halves of a batch are read in opposite directions")
        fields.expect("reuse_len", None, 0, why="only a part of a segment would enter the memory")
        fields.expect("same_length", False, why="its window grows with the memory, and is 1 token in the first segment")
        fields.ignore("mem_len")
        if fields("use_mems_eval"):
            fields.expect("mem_len", *range(1, 1 << 20), why="the memory would grow with the text; set a length")
        fields.ignore("use_mems_train", "summary_type", "summary_use_proj", "summary_activation", "summary_last_dropout")
        fields.ignore("start_n_top", "end_n_top", "untie_r")
        vocab_size, dropout, clamp_len = fields("vocab_size"), fields("dropout"), fields("clamp_len")
        return {
            "vocab_size": vocab_size,
            "hidden_size": fields("d_model"),
            "num_hidden_layers": fields("n_layer"),
            "num_attention_heads": fields("n_head"),
            "head_dim": fields("d_head"),
            "intermediate_size": fields("d_inner"),
            "hidden_act": fields("ff_activation"),
            "gated_mlp": False,
            "mlp_bias": True,
            "lm_head_bias": True,
            "norm_type": "layernorm",
            "norm_eps": fields("layer_norm_eps"),
            "norm_position": "post",
            "final_norm": False,
            "hidden_dropout": dropout,
            "attention_dropout": dropout,
            "embedding_dropout": dropout,
            "initializer_range": fields("initializer_range"),
            "tie_word_embeddings": fields("tie_word_embeddings"),
            "position_type": "xl",
            "clamp_len": clamp_len if clamp_len > 0 else None,
            "memory_type": "recurrence",
            "segment_len": None,
            "mem_len": fields("mem_len") if fields("use_mems_eval") else 0,
            **fields.token_ids(vocab_size),
        }

    def rules(self, config: XLConfig, fields: SourceFields, names: Iterable[str]) -> list[Rule]:
        source, target = "transformer.layer.{i}", "model.layers.{i}"
        attention = f"{target}.self_attn"
        sizes = (config.num_attention_heads * (config.head_dim or 1),) * 3
        rules = [
            Rule(
                f"{attention}.qkv_proj.weight",
                tuple(f"{source}.rel_attn.{letter}" for letter in "qkv"),
                sizes,
                folded=True,
                transpose=True,
            ),
            rename(f"{source}.rel_attn.r", f"{attention}.position.r_proj.weight", folded=True, transpose=True),
            rename(f"{source}.rel_attn.o", f"{attention}.o_proj.weight", folded=True),
            rename(f"{source}.rel_attn.r_w_bias", f"{attention}.position.biases.u"),
            rename(f"{source}.rel_attn.r_r_bias", f"{attention}.position.biases.v"),
            *both(f"{source}.rel_attn.layer_norm", f"{target}.attention_norm"),
            *both(f"{source}.ff.layer_1", f"{target}.mlp.up_proj"),
            *both(f"{source}.ff.layer_2", f"{target}.mlp.down_proj"),
            *both(f"{source}.ff.layer_norm", f"{target}.mlp_norm"),
        ]
        return [
            rename("transformer.word_embedding.weight", "model.embed_tokens.weight"),
            *for_each(config.num_hidden_layers, rules),
            rename("lm_loss.bias", "lm_head.bias"),
            *([] if config.tie_word_embeddings else [rename("lm_loss.weight", "lm_head.weight")]),
        ]
