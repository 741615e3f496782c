"""MPT: ALiBi, no bias anywhere, queries, keys and values fused kind by kind and clipped where `clip_qkv` says so."""

from collections.abc import Iterable
from typing import Any, ClassVar

from modeling_xl.configuration_xl import XLConfig
from modeling_xl.position_alibi import alibi_slopes
from modeling_xl.text import InputError

from .family import TOKEN_IDS, Family, SourceFields
from .weight_map import Rule, fill, for_each, rename


def mpt_slopes(num_heads: int, bias_max: float) -> list[float]:
    """2^(-bias_max i / p) for i = 1 ... p, the next power of two; for other head counts every second of these first."""
    power = 1 << (num_heads - 1).bit_length()
    slopes = [2.0 ** (-bias_max * (i + 1) / power) for i in range(power)]
    return slopes if power == num_heads else (slopes[1::2] + slopes[0::2])[:num_heads]


class MPTFamily(Family):
    name = "mpt"
    model_types: ClassVar[tuple[str, ...]] = ("mpt",)
    base_prefix = "transformer."
    embedding = "transformer.wte.weight"

    def config(self, fields: SourceFields) -> dict[str, Any]:
        # The class of Transformers reads none of these; the feed-forward network is always 4 times as wide.
        fields.ignore("expansion_ratio", "learned_pos_emb", "init_device", "embedding_fraction", "norm_type", "emb_pdrop")
        fields.ignore("resid_pdrop", "init_config", "verbose")
        fields.expect("logit_scale", None, why="logits are not scaled here")
        fields.expect("no_bias", True, why="the class of Transformers has no biases")
        attention = SourceFields(f"{fields.where} (attn_config)", fields("attn_config"), dict(fields.defaults["attn_config"]))
        attention.expect("alibi", True, why="without it the model has no positions that are known here")
        attention.expect("attn_type", "multihead_attention", why="the class of Transformers has multi-head attention only")
        for name in ("prefix_lm", "qk_ln", "attn_uses_sequence_id"):
            attention.expect(name, False, why="the class of Transformers does not know it")
        attention.ignore("attn_impl")
        clip_qkv = attention("clip_qkv") or None
        vocab_size, width, heads = fields("vocab_size"), fields("d_model"), fields("n_heads")
        dropout, bias_max = attention("attn_pdrop"), attention("alibi_bias_max")
        slopes = mpt_slopes(heads, bias_max)
        if bias_max != 8:
            fields.not_compared = f"Transformers' class does not heed alibi_bias_max={bias_max} and computes as with 8"
        attention.expect("softmax_scale", None, (width / heads) ** -0.5, why="scores are scaled by 1 / sqrt(head size) here")
        attention.check_all_understood()
        if width % heads:
            raise InputError(f"{fields.where}: d_model={width} is not a multiple of n_heads={heads}")
        return {
            "vocab_size": vocab_size,
            "hidden_size": width,
            "num_hidden_layers": fields("n_layers"),
            "num_attention_heads": heads,
            "intermediate_size": 4 * width,
            "hidden_act": "gelu",
            "gated_mlp": False,
            "norm_type": "layernorm",
            "norm_eps": fields("layer_norm_epsilon"),
            "clip_qkv": clip_qkv,
            "hidden_dropout": dropout,
            "attention_dropout": dropout,
            "initializer_range": fields("initializer_range"),
            "tie_word_embeddings": fields("tie_word_embeddings"),
            "position_type": "alibi",
            "alibi_slopes": None if slopes == alibi_slopes(heads) else slopes,
            "max_position_embeddings": fields("max_seq_len"),
            **fields.token_ids(vocab_size),
        }

    def rules(self, config: XLConfig, fields: SourceFields, names: Iterable[str]) -> list[Rule]:
        source, target = "transformer.blocks.{i}", "model.layers.{i}"
        rules = [
            rename(f"{source}.attn.Wqkv.weight", f"{target}.self_attn.qkv_proj.weight"),
            rename(f"{source}.attn.out_proj.weight", f"{target}.self_attn.o_proj.weight"),
            rename(f"{source}.norm_1.weight", f"{target}.self_attn.norm.weight"),
            fill(f"{target}.self_attn.norm.bias", 0.0),
            rename(f"{source}.norm_2.weight", f"{target}.mlp_norm.weight"),
            fill(f"{target}.mlp_norm.bias", 0.0),
            rename(f"{source}.ffn.up_proj.weight", f"{target}.mlp.up_proj.weight"),
            rename(f"{source}.ffn.down_proj.weight", f"{target}.mlp.down_proj.weight"),
        ]
        return [
            rename("transformer.wte.weight", "model.embed_tokens.weight"),
            *for_each(config.num_hidden_layers, rules),
            rename("transformer.norm_f.weight", "model.norm.weight"),
            fill("model.norm.bias", 0.0),
            *([] if config.tie_word_embeddings else [rename("lm_head.weight", "lm_head.weight")]),
        ]

    def fields(self, config: XLConfig) -> dict[str, Any]:
        slopes, heads = config.alibi_slopes, config.num_attention_heads
        # The last slope of the sequence is 2^(-alibi_bias_max); whether all follow from it is seen by converting again.
        bias_max = next((m for m in range(1, 65) if slopes == mpt_slopes(heads, m)), 8)
        return {
            "vocab_size": config.vocab_size,
            "d_model": config.hidden_size,
            "n_layers": config.num_hidden_layers,
            "n_heads": heads,
            "layer_norm_epsilon": config.norm_eps,
            "initializer_range": config.initializer_range,
            "tie_word_embeddings": config.tie_word_embeddings,
            "max_seq_len": config.max_position_embeddings,
            "attn_config": {
                "alibi_bias_max": bias_max,
                "clip_qkv": config.clip_qkv,
                "attn_pdrop": int(config.attention_dropout),
            },
            **{name: getattr(config, name) for name in TOKEN_IDS},
        }
