"""Golden values of independent implementations, and a loader for the Transformer-XL checkpoints among them.

The folder `oracles` is looked for in `$MODELING_XL_SHARED`, else in `shared` beside the checkout; without it the tests
that need it are skipped.
"""

import functools
import json
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling_xl import XLConfig, XLForCausalLM
from modeling_xl.head_xl import tied_weights

CHECKOUT = Path(__file__).resolve().parents[1]


def oracle(case: str) -> Path:
    """The folder of a case; skips the test where it is absent."""
    shared = Path(os.environ.get("MODELING_XL_SHARED") or CHECKOUT.parent / "shared")
    folder = shared / "oracles" / case
    if not (folder / "golden.safetensors").is_file():
        pytest.skip(f"no golden values of {case}: set MODELING_XL_SHARED to the folder that holds oracles/{case}")
    return folder


@functools.cache
def golden(case: str) -> dict[str, torch.Tensor]:
    """The golden values of a case; floats are float64."""
    return load_file(oracle(case) / "golden.safetensors")


def transfo_xl_config(old: dict, initial_memory: str, attn_implementation: str) -> XLConfig:
    """`XLConfig` of a `transfo-xl` config.json. Its eos_token_id is left out: the golden texts run past it."""
    return XLConfig(
        vocab_size=old["vocab_size"],
        hidden_size=old["d_model"],
        num_hidden_layers=old["n_layer"],
        num_attention_heads=old["n_head"],
        head_dim=old["d_head"],
        intermediate_size=old["d_inner"],
        hidden_act="relu",
        gated_mlp=False,
        mlp_bias=True,
        attention_bias=False,
        norm_type="layernorm",
        norm_eps=old["layer_norm_epsilon"],
        norm_position="pre" if old["pre_lnorm"] else "post",
        final_norm=False,
        embedding_size=old["d_embed"],
        embedding_scale=old["d_model"] ** 0.5,
        lm_head_bias=True,
        cutoffs=old["cutoffs"],
        div_val=old["div_val"],
        tie_projs=old["tie_projs"],
        tie_word_embeddings=old.get("tie_word_embeddings", True),
        hidden_dropout=old["dropout"],
        embedding_dropout=old["dropout"],
        attention_dropout=old["dropatt"],
        position_type="xl",
        clamp_len=old["clamp_len"] if old["clamp_len"] > 0 else None,
        untie_r=old["untie_r"],
        memory_type="recurrence",
        segment_len=None,
        mem_len=old["mem_len"],
        initial_memory=initial_memory,
        attention_window=old["mem_len"] if old["same_length"] else None,
        attn_implementation=attn_implementation,
    )


def transfo_xl_names(config: XLConfig) -> dict[str, str]:
    """Name in an old checkpoint -> name in `XLForCausalLM`, tied ones included."""
    names = {}

    def both(old: str, new: str):
        names.update({f"{old}.{part}": f"{new}.{part}" for part in ("weight", "bias")})

    is_post = config.norm_position == "post"
    for i in range(config.num_hidden_layers):
        old, new = f"transformer.layers.{i}", f"model.layers.{i}"
        attention = f"{new}.self_attn"
        names[f"{old}.dec_attn.qkv_net.weight"] = f"{attention}.qkv_proj.weight"
        names[f"{old}.dec_attn.o_net.weight"] = f"{attention}.o_proj.weight"
        names[f"{old}.dec_attn.r_net.weight"] = f"{attention}.position.r_proj.weight"
        if config.untie_r:
            names[f"{old}.dec_attn.r_w_bias"] = f"{attention}.position.biases.u"
            names[f"{old}.dec_attn.r_r_bias"] = f"{attention}.position.biases.v"
        both(f"{old}.dec_attn.layer_norm", f"{new}.attention_norm" if is_post else f"{attention}.norm")
        both(f"{old}.pos_ff.CoreNet.0", f"{new}.mlp.up_proj")
        both(f"{old}.pos_ff.CoreNet.3", f"{new}.mlp.down_proj")
        both(f"{old}.pos_ff.layer_norm", f"{new}.mlp_norm")
    if not config.untie_r:
        names["transformer.r_w_bias"] = "model.shared_position.u"
        names["transformer.r_r_bias"] = "model.shared_position.v"

    num_clusters = len(config.cutoffs) + 1
    embedding = "transformer.word_emb"
    if config.div_val == 1:
        names[f"{embedding}.emb_layers.0.weight"] = "model.embed_tokens.weight"
        names[f"{embedding}.emb_projs.0"] = "model.embed_proj.weight"
    else:
        for i in range(num_clusters):
            names[f"{embedding}.emb_layers.{i}.weight"] = f"model.embed_tokens.clusters.{i}.weight"
            names[f"{embedding}.emb_projs.{i}"] = f"model.embed_tokens.projections.{i}.weight"
    if num_clusters == 1 and config.embedding_size == config.hidden_size:
        both("crit.out_layers.0", "lm_head")
        return names
    for i in range(num_clusters):
        both(f"crit.out_layers.{i}", f"lm_head.tables.{i}")
        names[f"crit.out_projs.{i}"] = f"lm_head.projections.{i}.weight"
    for part in ("cluster_weight", "cluster_bias"):
        names[f"crit.{part}"] = f"lm_head.{part}"
    return names


def load_transfo_xl(
    folder: Path, dtype: torch.dtype, initial_memory: str = "zeros", attn_implementation: str = "sdpa"
) -> XLForCausalLM:
    """The checkpoint (config.json, model.safetensors) of Transformers' former `transfo-xl` as our model, in eval mode.

    Every tensor of the file is used and every parameter of the model is filled, by name or by its tie.
    """
    old = json.loads((folder / "config.json").read_text())
    config = transfo_xl_config(old, initial_memory, attn_implementation)
    model = XLForCausalLM(config).to(dtype).eval()
    names = transfo_xl_names(config)
    source = load_file(folder / "model.safetensors")
    source.pop("transformer.pos_emb.inv_freq")  # a buffer that follows from d_model
    unknown = source.keys() - names.keys()
    assert not unknown, f"tensors without a place: {sorted(unknown)}"
    target = model.state_dict()
    loaded = {names[name]: tensor for name, tensor in source.items()}
    assert len(loaded) == len(source), "two tensors for one place"
    for name, tensor in loaded.items():
        assert name in target, f"the model has no {name}"
        assert tensor.shape == target[name].shape, f"{name}: {tensor.shape} for {target[name].shape}"
    tied = tied_weights(config) if config.tie_word_embeddings else {}
    unfilled = {name for name in target if name not in loaded and tied.get(name) not in loaded}
    assert not unfilled, f"parameters that the file does not fill: {sorted(unfilled)}"
    model.load_state_dict(loaded, strict=False)
    for name, same in tied.items():
        assert model.get_parameter(name) is model.get_parameter(same), f"{name} is not tied to {same}"
    return model
