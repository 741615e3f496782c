"""Checkpoints of the original TensorFlow code (`model.ckpt-N.index` and `.data-…`), the published large models among them.

What the variables' shapes say is read from them; memory and distances are settings of a run and have to be given.
"""

import re
from collections.abc import Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any, ClassVar

import torch

from modeling_xl.configuration_xl import XLConfig
from modeling_xl.text import InputError

from .family import ForeignFiles, SourceFields
from .from_transfo_xl import div_val_of, xl_config
from .tensorflow_checkpoint import TensorFlowCheckpoint, checkpoint_prefix
from .weight_map import Rule, for_each, rename


class TensorFlowFiles:
    """Variables of a checkpoint as a source of tensors."""

    def __init__(self, prefix: Path):
        self.where = str(prefix)
        self.checkpoint = TensorFlowCheckpoint(prefix)

    def names(self) -> list[str]:
        return self.checkpoint.names()

    def read(self, name: str) -> torch.Tensor:
        return self.checkpoint.tensor(name)

    def close(self) -> None:
        """Nothing stays open between two reads."""


class TransfoXLTensorFlow(ForeignFiles):
    name = "transfo-xl-tensorflow"
    # What the optimizer keeps, and the step.
    drops: ClassVar[tuple[str, ...]] = (r"(.*/)?global_step", r".*/Adam(_\d+)?", r"(.*/)?beta\d_power(_\d+)?")
    settings: ClassVar[tuple[str, ...]] = ("mem_len", "clamp_len", "same_length")

    def find(self, source: Path) -> Path | None:
        return checkpoint_prefix(source)

    def open(self, prefix: Path) -> TensorFlowFiles:
        return TensorFlowFiles(prefix)

    def shown(self, files: TensorFlowFiles) -> dict[str, Any]:
        """The fields that names and shapes of the variables show."""
        shapes = {name: files.checkpoint.shape(name) for name in files.names()}

        def shape(name: str) -> tuple[int, ...]:
            if name not in shapes:
                raise InputError(f"{files.where}: has no variable {name}; is it of Transformer-XL's TensorFlow code?")
            return shapes[name]

        biases = shape("transformer/r_w_bias")
        layers = {int(found[1]) for name in shapes if (found := re.match(r"transformer/layer_(\d+)/", name))}
        clusters = {
            int(found[1]) for name in shapes if (found := re.match(r"transformer/adaptive_softmax/cutoff_(\d+)/b$", name))
        }
        sizes = [shape(f"transformer/adaptive_softmax/cutoff_{i}/b")[0] for i in range(len(clusters))]
        embedding, is_split = "transformer/adaptive_embed", "transformer/adaptive_embed/cutoff_0/lookup_table" in shapes
        widths = [shape(f"{embedding}/cutoff_{i}/lookup_table")[1] for i in range(len(sizes))] if is_split else []
        width = widths[0] if is_split else shape(f"{embedding}/lookup_table")[1]
        ends = [sum(sizes[: i + 1]) for i in range(len(sizes))]
        is_tied = [f"transformer/adaptive_softmax/cutoff_{i}/proj" not in shapes for i in range(max(1, len(sizes)))]
        return {
            "vocab_size": ends[-1] if ends else shape(f"{embedding}/lookup_table")[0],
            "n_layer": len(layers),
            "n_head": biases[-2],
            "d_head": biases[-1],
            "untie_r": len(biases) == 3,
            "d_model": shape("transformer/layer_0/ff/LayerNorm/gamma")[0],
            "d_inner": shape("transformer/layer_0/ff/layer_1/bias")[0],
            "d_embed": width,
            "cutoffs": ends[:-1],
            "div_val": div_val_of(files.where, widths),
            "tie_projs": is_tied,
            "layer_norm_epsilon": 1e-12,  # of TensorFlow's contrib.layers.layer_norm
            "pre_lnorm": False,
        }

    def config(self, fields: SourceFields) -> dict[str, Any]:
        fields.ignore("proj_share_all_but_first")  # which the variables show
        return xl_config(fields, window_beyond_memory=1, initial_memory="zeros")

    def ties(self, config: XLConfig) -> dict[str, str]:
        return {}  # each variable is there once

    def rules(self, config: XLConfig, fields: SourceFields, names: Iterable[str]) -> list[Rule]:
        source, target = "transformer/layer_{i}", "model.layers.{i}"
        attention = f"{target}.self_attn"
        rules = [
            *(
                rename(f"{source}/rel_attn/{a}/kernel", f"{attention}.{b}.weight", transpose=True)
                for a, b in (("qkv", "qkv_proj"), ("r", "position.r_proj"), ("o", "o_proj"))
            ),
            *_norm(f"{source}/rel_attn/LayerNorm", f"{target}.attention_norm"),
            *_norm(f"{source}/ff/LayerNorm", f"{target}.mlp_norm"),
            *_dense(f"{source}/ff/layer_1", f"{target}.mlp.up_proj"),
            *_dense(f"{source}/ff/layer_2", f"{target}.mlp.down_proj"),
        ]
        rules = for_each(config.num_hidden_layers, rules)
        for source, letter in (("transformer/r_w_bias", "u"), ("transformer/r_r_bias", "v")):
            if config.untie_r:
                count = config.num_hidden_layers
                target = "model.layers.{}.self_attn.position.biases." + letter
                rules += [rename(source, target.format(i), share=(i, count)) for i in range(count)]
            else:
                rules.append(rename(source, f"model.shared_position.{letter}"))
        return [*rules, *self._vocabulary_rules(config)]

    def _vocabulary_rules(self, config: XLConfig) -> list[Rule]:
        """Words are always tied, projections where there is no variable of the head's own."""
        embedding, softmax = "transformer/adaptive_embed", "transformer/adaptive_softmax"
        num_clusters = len(config.cutoffs) + 1
        is_split, is_projected = config.div_val > 1, config.embedding_size != config.hidden_size
        if is_split:
            rules = [
                rename(f"{embedding}/cutoff_{{i}}/lookup_table", "model.embed_tokens.clusters.{i}.weight"),
                rename(f"{embedding}/cutoff_{{i}}/proj_W", "model.embed_tokens.projections.{i}.weight", transpose=True),
                rename(f"{softmax}/cutoff_{{i}}/b", "lm_head.tables.{i}.bias"),
            ]
            rules = for_each(num_clusters, rules)
        else:
            rules = [rename(f"{embedding}/lookup_table", "model.embed_tokens.weight")]
            if is_projected:
                rules.append(rename(f"{embedding}/proj_W", "model.embed_proj.weight", transpose=True))
            edges = [0, *config.cutoffs, config.vocab_size]
            bias = "lm_head.tables.0.bias" if is_projected or num_clusters > 1 else "lm_head.bias"
            if num_clusters == 1:
                rules.append(rename(f"{softmax}/bias", bias))
            else:
                sizes = tuple(high - low for low, high in pairwise(edges))
                rules.append(Rule(bias, tuple(f"{softmax}/cutoff_{i}/b" for i in range(num_clusters)), sizes))
        for i, is_tied in enumerate(config.tie_projs or []):
            if not is_tied and (is_split or is_projected):
                rules.append(rename(f"{softmax}/cutoff_{i}/proj", f"lm_head.projections.{i}.weight", transpose=True))
        if num_clusters > 1:
            for source, target in (("cluster_W", "cluster_weight"), ("cluster_b", "cluster_bias")):
                rules.append(rename(f"{softmax}/cutoff_0/{source}", f"lm_head.{target}"))
        return rules


def _norm(source: str, target: str) -> list[Rule]:
    return [rename(f"{source}/gamma", f"{target}.weight"), rename(f"{source}/beta", f"{target}.bias")]


def _dense(source: str, target: str) -> list[Rule]:
    return [rename(f"{source}/kernel", f"{target}.weight", transpose=True), rename(f"{source}/bias", f"{target}.bias")]
