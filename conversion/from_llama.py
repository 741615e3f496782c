"""Llama, and what the decoders named like it share. Attention is fused here, so three tensors become one."""

from collections.abc import Iterable
from typing import Any, ClassVar

from modeling_xl.configuration_xl import XLConfig
from modeling_xl.text import InputError

from .family import TOKEN_IDS, Family, SourceFields
from .weight_map import Rule, both, fill, for_each, rename

LAYER = "model.layers.{i}"  # the same in both


def join_qkv(config: XLConfig, source: str, has_bias: bool, names: str = "qkv", **options) -> list[Rule]:
    """Query, key and value projections, `source` with {p} for the letter of each, to the fused one."""
    size, kv = config.num_attention_heads, config.num_key_value_heads or 1
    sizes = tuple(heads * (config.head_dim or 1) for heads in (size, kv, kv))
    return [
        Rule(
            f"model.layers.{{i}}.self_attn.qkv_proj.{part}",
            tuple(f"{source}.{part}".replace("{p}", letter) for letter in names),
            sizes,
            **options,
        )
        for part in (("weight", "bias") if has_bias else ("weight",))
    ]


def head_rules(config: XLConfig, source: str = "lm_head") -> list[Rule]:
    rules = both(source, "lm_head", config.lm_head_bias)
    return rules[1:] if config.tie_word_embeddings else rules  # a bias is not tied


class LlamaFamily(Family):
    """Llama, and the frame of the families below it, which say what is other with them:

    eps: field of the norms' epsilon. rotates_part: whether the class heeds `partial_rotary_factor`. output: the attention's
    output projection. output_has_bias: whether it has a bias where queries, keys and values have. mlp_names: projection of
    the feed-forward network here -> there. lacks: fields of Llama's config that the family's has not, a head size only if it
    does not follow from the others.
    """

    name = "llama"
    model_types: ClassVar[tuple[str, ...]] = ("llama",)
    base_prefix = "model."
    drops: ClassVar[tuple[str, ...]] = (r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"model\.rotary_emb\.inv_freq")
    eps = "rms_norm_eps"
    norm_type = "rmsnorm"
    final_norm = "model.norm"
    rotates_part = False
    output = "o_proj"
    output_has_bias = True
    mlp_names: ClassVar[dict[str, str]] = {"gate_proj": "gate_proj", "up_proj": "up_proj", "down_proj": "down_proj"}
    lacks: ClassVar[tuple[str, ...]] = ()

    def config(self, fields: SourceFields) -> dict[str, Any]:
        # An older name of a length, and in how many parts a product is summed: other rounding, the same model.
        fields.ignore("max_sequence_length", "pretraining_tp")
        return {
            **self.sizes(fields),
            "attention_bias": fields("attention_bias", False),
            "mlp_bias": fields("mlp_bias", False),
        }

    def sizes(self, fields: SourceFields) -> dict[str, Any]:
        """What all families with these names of fields share."""
        vocab_size, max_position = fields("vocab_size"), fields("max_position_embeddings")
        return {
            "vocab_size": vocab_size,
            "hidden_size": fields("hidden_size"),
            "num_hidden_layers": fields("num_hidden_layers"),
            "num_attention_heads": fields("num_attention_heads"),
            "num_key_value_heads": fields("num_key_value_heads"),
            "head_dim": fields("head_dim", None),
            "intermediate_size": fields("intermediate_size"),
            "hidden_act": fields("hidden_act"),
            "gated_mlp": "gate_proj" in self.mlp_names,
            "norm_type": self.norm_type,
            "norm_eps": self.norm_eps(fields),
            "attention_dropout": fields("attention_dropout", 0.0) or 0.0,
            "initializer_range": fields("initializer_range", 0.02),
            "tie_word_embeddings": fields("tie_word_embeddings"),
            "position_type": "rope",
            "rope_parameters": self.rope(fields, max_position),
            "max_position_embeddings": max_position,
            **fields.token_ids(vocab_size),
        }

    def norm_eps(self, fields: SourceFields) -> float:
        return fields(self.eps)

    def rope(self, fields: SourceFields, max_position: int) -> dict[str, Any]:
        rope = fields.rope_parameters(max_position)
        factor = rope.get("partial_rotary_factor", 1.0)
        if self.rotates_part and factor != 1 and rope.get("rope_type") == "proportional":
            raise InputError(
                f"{fields.where}: rope_type 'proportional' cannot be converted for {self.name}: its class fails on it"
            )
        if self.rotates_part:
            # Their default is another, so that the whole has to be said there and not here.
            return rope if factor != 1 else {name: value for name, value in rope.items() if name != "partial_rotary_factor"}
        if factor != 1 and rope.get("rope_type") != "proportional":
            raise InputError(
                f"{fields.where}: partial_rotary_factor={factor} cannot be converted: {self.name}'s class rotates whole heads"
            )
        return rope

    def rules(self, config: XLConfig, fields: SourceFields, names: Iterable[str]) -> list[Rule]:
        # With branches in parallel these families have one norm for both.
        second = "input_layernorm" if config.use_parallel_residual else "post_attention_layernorm"
        rules = [
            *self.attention_rules(config),
            *self.norm_rules(f"{LAYER}.input_layernorm", f"{LAYER}.self_attn.norm"),
            *self.norm_rules(f"{LAYER}.{second}", f"{LAYER}.mlp_norm"),
            *self.mlp_rules(config),
        ]
        return [
            rename("model.embed_tokens.weight", "model.embed_tokens.weight"),
            *for_each(config.num_hidden_layers, rules),
            *self.norm_rules(self.final_norm, "model.norm"),
            *head_rules(config),
        ]

    def attention_rules(self, config: XLConfig) -> list[Rule]:
        has_bias = config.attention_bias and self.output_has_bias
        return [
            *join_qkv(config, f"{LAYER}.self_attn.{{p}}_proj", config.attention_bias),
            *both(f"{LAYER}.self_attn.{self.output}", f"{LAYER}.self_attn.o_proj", has_bias),
            *([] if self.output_has_bias else unbiased_output(config)),
        ]

    def mlp_rules(self, config: XLConfig) -> list[Rule]:
        pairs = [(f"{LAYER}.mlp.{theirs}", f"{LAYER}.mlp.{ours}") for ours, theirs in self.mlp_names.items()]
        return [rule for source, target in pairs for rule in both(source, target, config.mlp_bias)]

    def norm_rules(self, source: str, target: str) -> list[Rule]:
        return both(source, target, has_bias=self.norm_type == "layernorm")

    def fields(self, config: XLConfig) -> dict[str, Any]:
        rope, lacks = config.rope_parameters or {}, set(self.lacks)
        if (config.head_dim or 0) * config.num_attention_heads != config.hidden_size:
            lacks.discard("head_dim")
        values = {
            "model_type": self.model_types[0],
            **{name: getattr(config, name) for name in self.same_fields},
            "rope_parameters": {"partial_rotary_factor": 1.0, **rope} if self.rotates_part else rope,
            self.eps: config.norm_eps,
        }
        return {name: value for name, value in values.items() if name not in lacks}

    # Fields that both configs have, with one meaning.
    same_fields: ClassVar[tuple[str, ...]] = (
        *("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads", "head_dim"),
        *("intermediate_size", "hidden_act", "initializer_range", "tie_word_embeddings", "max_position_embeddings"),
        *("attention_bias", "mlp_bias", "attention_dropout", *TOKEN_IDS),
    )


def unbiased_output(config: XLConfig) -> list[Rule]:
    """Where queries, keys and values have biases and the output has none."""
    return [fill("model.layers.{i}.self_attn.o_proj.bias", 0.0)] if config.attention_bias else []


def hidden_dropout(fields: SourceFields, name: str) -> float:
    """Dropout of what a branch adds, which here drops at more places."""
    value = fields(name, 0.0)
    if value:
        fields.notes.append(
            f"{name}={value} became hidden_dropout, which in training drops parts of both branches, of the feed-forward "
            "network's inner states and of the last hidden states; set it to 0.0 if that is not wanted"
        )
    return value
