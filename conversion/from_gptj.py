"""GPT-J: branches in parallel behind one norm, rotary pairs interleaved, biases in the feed-forward part and the head."""

import math
from collections.abc import Iterable
from typing import Any, ClassVar

import torch

from modeling_xl.configuration_xl import XLConfig
from modeling_xl.text import InputError

from .family import TOKEN_IDS, Family, SourceFields
from .from_llama import join_qkv
from .weight_map import Rule, both, for_each, rename, rows_by_half


def _fraction(part: int, whole: int) -> float:
    """part / whole, such that int(whole * fraction) is the part again."""
    fraction = part / whole
    return fraction if int(whole * fraction) == part else math.nextafter(fraction, 1)


class GPTJFamily(Family):
    name = "gptj"
    model_types: ClassVar[tuple[str, ...]] = ("gptj",)
    base_prefix = "transformer."
    embedding = "transformer.wte.weight"
    # Masks and angles that older files hold.
    drops: ClassVar[tuple[str, ...]] = (r"transformer\.h\.\d+\.attn\.(bias|masked_bias|embed_positions)",)

    def config(self, fields: SourceFields) -> dict[str, Any]:
        fields.expect("tie_word_embeddings", False, why="the head has a bias, which a tied one here has not")
        fields.ignore("scale_attn_weights", "summary_type", "summary_use_proj", "summary_activation", "summary_proj_to_labels")
        fields.ignore("summary_first_dropout", "rotary", "n_ctx")
        vocab_size, width, heads = fields("vocab_size"), fields("n_embd"), fields("n_head")
        rotary_dim = fields("rotary_dim")
        if rotary_dim is None:
            raise InputError(
                f"{fields.where}: rotary_dim is null, so positions are not rotary but sinusoids, which do not convert"
            )
        head_dim = width // heads
        if rotary_dim == 0 or rotary_dim > head_dim:
            raise InputError(f"{fields.where}: rotary_dim={rotary_dim} must be from 2 to the head size {head_dim}")
        return {
            "vocab_size": vocab_size,
            "hidden_size": width,
            "num_hidden_layers": fields("n_layer"),
            "num_attention_heads": heads,
            "intermediate_size": fields("n_inner") or 4 * width,
            "hidden_act": fields("activation_function"),
            "gated_mlp": False,
            "mlp_bias": True,
            "lm_head_bias": True,
            "norm_type": "layernorm",
            "norm_eps": fields("layer_norm_epsilon"),
            "use_parallel_residual": True,
            "tie_word_embeddings": False,
            "hidden_dropout": fields("resid_pdrop"),
            "embedding_dropout": fields("embd_pdrop"),
            "attention_dropout": fields("attn_pdrop"),
            "initializer_range": fields("initializer_range"),
            "position_type": "rope",
            "rope_parameters": {"rope_theta": 10000.0, "partial_rotary_factor": _fraction(rotary_dim, head_dim)},
            "max_position_embeddings": fields("n_positions"),
            **fields.token_ids(vocab_size),
        }

    def rules(self, config: XLConfig, fields: SourceFields, names: Iterable[str]) -> list[Rule]:
        source, target = "transformer.h.{i}", "model.layers.{i}"
        heads, head_dim = config.num_attention_heads, config.head_dim or 1
        halves = rows_by_half(heads, head_dim, fields("rotary_dim"))
        size = heads * head_dim
        rows = torch.cat([halves, halves + size, torch.arange(2 * size, 3 * size)])
        rules = [
            *join_qkv(config, f"{source}.attn.{{p}}_proj", has_bias=False, rows=rows),
            rename(f"{source}.attn.out_proj.weight", f"{target}.self_attn.o_proj.weight"),
            *both(f"{source}.ln_1", f"{target}.self_attn.norm"),
            *both(f"{source}.ln_1", f"{target}.mlp_norm"),
            *both(f"{source}.mlp.fc_in", f"{target}.mlp.up_proj"),
            *both(f"{source}.mlp.fc_out", f"{target}.mlp.down_proj"),
        ]
        return [
            rename("transformer.wte.weight", "model.embed_tokens.weight"),
            *for_each(config.num_hidden_layers, rules),
            *both("transformer.ln_f", "model.norm"),
            *both("lm_head", "lm_head"),
        ]

    def fields(self, config: XLConfig) -> dict[str, Any]:
        rope = config.rope_parameters or {}
        return {
            "vocab_size": config.vocab_size,
            "n_embd": config.hidden_size,
            "n_layer": config.num_hidden_layers,
            "n_head": config.num_attention_heads,
            "n_inner": None if config.intermediate_size == 4 * config.hidden_size else config.intermediate_size,
            "activation_function": config.hidden_act,
            "layer_norm_epsilon": config.norm_eps,
            "resid_pdrop": config.hidden_dropout,
            "embd_pdrop": config.embedding_dropout,
            "attn_pdrop": config.attention_dropout,
            "initializer_range": config.initializer_range,
            "rotary_dim": round((config.head_dim or 1) * rope.get("partial_rotary_factor", 1.0)),
            "n_positions": config.max_position_embeddings,
            **{name: getattr(config, name) for name in TOKEN_IDS},
        }
