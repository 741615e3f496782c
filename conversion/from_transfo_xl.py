"""`transfo-xl`, the Transformer-XL that Transformers had until version 4: its folders, converted or loaded as they are.

Every tensor keeps its layout and changes its name only.
"""

from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch

from modeling_xl.configuration_xl import XLConfig
from modeling_xl.text import InputError

from .family import Family, SourceFields
from .weight_map import Rule, both, for_each, rename


def check_attn_type(where: str, attn_type: int) -> None:
    if attn_type != 0:
        raise InputError(
            f"{where}: attn_type={attn_type!r} cannot be converted: types 1 to 3 (learned relative, absolute "
            "sinusoidal, learned absolute embeddings) are of ablations, and this package has no such position scheme; 0 can"
        )


def div_val_of(where: str, widths: Sequence[int]) -> int:
    """The div_val that gives the widths of the clusters' tables; 1 where there is one table."""
    if len(widths) < 2:
        return 1
    for div_val in range(2, widths[0] + 1):
        if all(width == widths[0] // div_val**i for i, width in enumerate(widths)):
            return div_val
    raise InputError(
        f"{where}: the tables of its clusters are {', '.join(map(str, widths))} wide, which no div_val gives (cluster i is "
        "d_embed // div_val**i wide, and at least 1)"
    )


def xl_config(fields: SourceFields, window_beyond_memory: int, initial_memory: str) -> dict[str, Any]:
    """Fields of `XLConfig` from those of the original code and its ports, which have one set of names for sizes.

    window_beyond_memory: with `same_length` a query sees mem_len keys, itself included, in PyTorch, and one more in
    TensorFlow. initial_memory: what the code begins with.
    """
    check_attn_type(fields.where, fields("attn_type", 0))
    fields.expect("sample_softmax", -1, 0, why="a sampled softmax estimates the loss, and its head has other parameters")
    vocab_size, mem_len, clamp_len = fields("vocab_size"), fields("mem_len"), fields("clamp_len")
    cutoffs = [cutoff for cutoff in fields("cutoffs", []) if cutoff != vocab_size]
    tie_projs = fields("tie_projs", None) or [False] * (len(cutoffs) + 1)
    ties_words = fields("tie_word_embeddings", True)
    if any(tie_projs) and not ties_words:
        fields.notes.append("tied projections are untied: the source ties them while its words are not tied")
        tie_projs = [False] * len(tie_projs)
    window = mem_len + window_beyond_memory if fields("same_length") else None
    if window == 0:
        raise InputError(f"{fields.where}: same_length with mem_len=0 hides every key from every query; set one of them")
    return {
        "vocab_size": vocab_size,
        "hidden_size": fields("d_model"),
        "num_hidden_layers": fields("n_layer"),
        "num_attention_heads": fields("n_head"),
        "head_dim": fields("d_head"),
        "intermediate_size": fields("d_inner"),
        "hidden_act": "relu",
        "gated_mlp": False,
        "mlp_bias": True,
        "norm_type": "layernorm",
        "norm_eps": fields("layer_norm_epsilon", 1e-5),
        "norm_position": "pre" if fields("pre_lnorm") else "post",
        "final_norm": False,
        "lm_head_bias": True,
        "embedding_size": fields("d_embed"),
        "embedding_scale": fields("d_model") ** 0.5,
        "cutoffs": cutoffs,
        "div_val": fields("div_val", 1),
        "tie_projs": tie_projs,
        "tie_word_embeddings": ties_words,
        "hidden_dropout": fields("dropout", 0.0),
        "embedding_dropout": fields("dropout", 0.0),
        "attention_dropout": fields("dropatt", 0.0),
        "initializer_range": fields("init_std", 0.02),
        "position_type": "xl",
        "clamp_len": clamp_len if clamp_len > 0 else None,
        "untie_r": fields("untie_r"),
        "memory_type": "recurrence",
        "segment_len": None,
        "mem_len": mem_len,
        "initial_memory": initial_memory,
        "attention_window": window,
        **fields.token_ids(vocab_size),
    }


def decoder_rules(config: XLConfig, prefix: str) -> list[Rule]:
    """The layers, from names of the PyTorch code, which begin with `prefix`."""
    source, target = f"{prefix}layers.{{i}}", "model.layers.{i}"
    attention, is_post = f"{target}.self_attn", config.norm_position == "post"
    rules = [
        rename(f"{source}.dec_attn.qkv_net.weight", f"{attention}.qkv_proj.weight"),
        rename(f"{source}.dec_attn.o_net.weight", f"{attention}.o_proj.weight"),
        rename(f"{source}.dec_attn.r_net.weight", f"{attention}.position.r_proj.weight"),
        *both(f"{source}.dec_attn.layer_norm", f"{target}.attention_norm" if is_post else f"{attention}.norm"),
        *both(f"{source}.pos_ff.CoreNet.0", f"{target}.mlp.up_proj"),
        *both(f"{source}.pos_ff.CoreNet.3", f"{target}.mlp.down_proj"),
        *both(f"{source}.pos_ff.layer_norm", f"{target}.mlp_norm"),
    ]
    if config.untie_r:
        rules.append(rename(f"{source}.dec_attn.r_w_bias", f"{attention}.position.biases.u"))
        rules.append(rename(f"{source}.dec_attn.r_r_bias", f"{attention}.position.biases.v"))
    rules = for_each(config.num_hidden_layers, rules)
    if not config.untie_r:
        rules.append(rename(f"{prefix}r_w_bias", "model.shared_position.u"))
        rules.append(rename(f"{prefix}r_r_bias", "model.shared_position.v"))
    return rules


def vocabulary_rules(
    config: XLConfig, prefix: str, fields: SourceFields, names: Iterable[str], cluster_rows: torch.Tensor | None = None
) -> list[Rule]:
    """Embedding and head. cluster_rows: the order of the clusters' rows in the file, if not ours."""
    names, embedding = set(names), f"{prefix}word_emb"
    num_clusters = len(config.cutoffs) + 1
    tied_there = fields("tie_projs", None) or [False] * num_clusters  # and may be untied here
    is_split, is_projected = config.div_val > 1, config.embedding_size != config.hidden_size
    num_tables = num_clusters if is_split else 1
    rules = []
    tables = "model.embed_tokens.clusters.{i}.weight" if is_split else "model.embed_tokens.weight"
    projections = "model.embed_tokens.projections.{i}.weight" if is_split else "model.embed_proj.weight"
    rules += for_each(num_tables, [rename(f"{embedding}.emb_layers.{{i}}.weight", tables)])
    if is_split or is_projected:
        rules += for_each(num_tables, [rename(f"{embedding}.emb_projs.{{i}}", projections)])
    is_plain = num_clusters == 1 and not is_projected
    output = "lm_head" if is_plain else "lm_head.tables.{i}"
    rules += for_each(num_tables, [rename("crit.out_layers.{i}.bias", f"{output}.bias")])
    if not config.tie_word_embeddings:
        rules += for_each(num_tables, [rename("crit.out_layers.{i}.weight", f"{output}.weight")])
    if is_plain:
        return rules
    if is_split or is_projected:
        for i, is_tied in enumerate(config.tie_projs or [config.tie_word_embeddings] * num_clusters):
            if is_tied:
                continue
            source = f"crit.out_projs.{i}"
            if tied_there[i] and source not in names:  # a file of safetensors holds no tensor twice
                source = f"{embedding}.emb_projs.{i if is_split else 0}"
            rules.append(rename(source, f"lm_head.projections.{i}.weight"))
    if num_clusters > 1:
        for part in ("cluster_weight", "cluster_bias"):
            rules.append(rename(f"crit.{part}", f"lm_head.{part}", rows=cluster_rows))
    return rules


def tied_names(config: XLConfig, prefix: str) -> dict[str, str]:
    """Tensors of the head that are the embedding's and may lie in a file a second time -> those of the embedding."""
    num_clusters, is_split = len(config.cutoffs) + 1, config.div_val > 1
    names = {}
    for i in range(num_clusters if is_split else 1):
        if config.tie_word_embeddings:
            names[f"crit.out_layers.{i}.weight"] = f"{prefix}word_emb.emb_layers.{i}.weight"
    for i, is_tied in enumerate(config.tie_projs or []):
        if is_tied:
            names[f"crit.out_projs.{i}"] = f"{prefix}word_emb.emb_projs.{i if is_split else 0}"
    return names


class TransfoXLFamily(Family):
    name = "transfo-xl"
    model_types: ClassVar[tuple[str, ...]] = ("transfo-xl",)
    base_prefix = "transformer."
    drops: ClassVar[tuple[str, ...]] = (r"transformer\.pos_emb\.inv_freq",)
    has_full_attention = False
    has_word_vocabulary = True

    def config(self, fields: SourceFields) -> dict[str, Any]:
        # How it was initialised and run, and what tie_projs says already.
        fields.ignore("adaptive", "init", "init_range", "proj_init_std", "proj_share_all_but_first", "tgt_len")
        fields.expect("ext_len", 0, why="tokens that are fed twice belong to a run, not to a model; set it to 0")
        fields.expect("tie_weight", None, True, why="use tie_word_embeddings=false")
        return xl_config(fields, window_beyond_memory=0, initial_memory="zeros")

    def rules(self, config: XLConfig, fields: SourceFields, names: Iterable[str]) -> list[Rule]:
        return [*decoder_rules(config, self.base_prefix), *vocabulary_rules(config, self.base_prefix, fields, names)]

    def ties(self, config: XLConfig) -> dict[str, str]:
        names = tied_names(config, self.base_prefix)
        if not config.untie_r:  # the shared biases again, under each layer that uses them
            for i in range(config.num_hidden_layers):
                for bias in ("r_w_bias", "r_r_bias"):
                    names[f"transformer.layers.{i}.dec_attn.{bias}"] = f"transformer.{bias}"
        return names

    def fields(self, config: XLConfig) -> dict[str, Any]:
        return {
            "model_type": self.model_types[0],
            "architectures": ["TransfoXLLMHeadModel"],
            "vocab_size": config.vocab_size,
            "d_model": config.hidden_size,
            "n_layer": config.num_hidden_layers,
            "n_head": config.num_attention_heads,
            "d_head": config.head_dim,
            "d_inner": config.intermediate_size,
            "layer_norm_epsilon": config.norm_eps,
            "pre_lnorm": config.norm_position == "pre",
            "d_embed": config.embedding_size,
            "cutoffs": config.cutoffs,
            "div_val": config.div_val,
            "tie_projs": config.tie_projs or [config.tie_word_embeddings] * (len(config.cutoffs) + 1),
            "tie_word_embeddings": config.tie_word_embeddings,
            "dropout": config.hidden_dropout,
            "dropatt": config.attention_dropout,
            "init_std": config.initializer_range,
            "clamp_len": config.clamp_len or -1,
            "untie_r": config.untie_r,
            "mem_len": config.mem_len,
            "same_length": config.attention_window is not None,
            "eos_token_id": config.eos_token_id,
            "bos_token_id": config.bos_token_id,
            "pad_token_id": config.pad_token_id,
        }
