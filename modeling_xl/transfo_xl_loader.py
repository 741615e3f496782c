"""`transfo-xl`, the model type that Transformers had until version 4: its folders load as they are, as models of this package.

Importing the package registers the classes here. What is loaded is an `XLForCausalLM` or `XLModel`, and is saved as one. The
names and the config are translated by `conversion/from_transfo_xl.py`.
"""

import re
from typing import Any, ClassVar

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .configuration_xl import XLConfig
from .modeling_xl import XLForCausalLM, XLModel
from .text import InputError


@strict
class TransfoXLConfig(PreTrainedConfig):
    """The former config, field by field with its defaults, so that such a file can be read; it builds no model itself."""

    model_type = "transfo-xl"
    attribute_map: ClassVar[dict[str, str]] = {
        "n_token": "vocab_size",
        "hidden_size": "d_model",
        "num_attention_heads": "n_head",
        "num_hidden_layers": "n_layer",
    }

    vocab_size: int = 267735
    cutoffs: list[int] | tuple[int, ...] = (20000, 40000, 200000)
    d_model: int = 1024
    d_embed: int = 1024
    n_head: int = 16
    d_head: int = 64
    d_inner: int = 4096
    div_val: int = 4
    pre_lnorm: bool = False
    n_layer: int = 18
    mem_len: int = 1600
    clamp_len: int = 1000
    same_length: bool = True
    proj_share_all_but_first: bool = True
    tie_projs: list[bool] | tuple[bool, ...] | None = None
    attn_type: int = 0
    sample_softmax: int = -1
    adaptive: bool = True
    dropout: int | float = 0.1
    dropatt: int | float = 0.0
    untie_r: bool = True
    init: str = "normal"
    init_range: int | float = 0.01
    proj_init_std: int | float = 0.01
    init_std: int | float = 0.02
    layer_norm_epsilon: int | float = 1e-5
    tie_word_embeddings: bool = True
    # Fields of the first files only: lengths of a run, and a word for tie_word_embeddings.
    tgt_len: int | None = None
    ext_len: int = 0
    tie_weight: bool | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = 0
    pad_token_id: int | None = None

    def __post_init__(self, **kwargs):
        for name in ("cutoffs", "tie_projs"):
            value = getattr(self, name)
            setattr(self, name, None if value is None else list(value))  # as JSON gives them
        if self.tie_projs is None:
            self.tie_projs = [False] + [self.proj_share_all_but_first] * len(self.cutoffs)
        super().__post_init__(**kwargs)


# Settings of any config, that a caller may have given for the old one.
COMMON_FIELDS = ("dtype", "output_hidden_states", "output_attentions", "return_dict", "use_cache")


def _translated(config: TransfoXLConfig, **changes: Any) -> tuple[XLConfig, dict[str, str]]:
    """This package's config, with `changes` of its fields, and new names of tensors by patterns of the old ones."""
    # Not at the top: in a checkout that is not installed, the package is whole but for `conversion`.
    from .conversion.from_transfo_xl import TransfoXLFamily
    from .conversion.sources import transformers_fields

    if any(config.tie_projs or ()) and not config.tie_word_embeddings:
        raise InputError(
            f"{config.name_or_path}: ties projections (tie_projs) and not words (tie_word_embeddings): its files lack tensors "
            "that this package needs; convert it: modeling-xl convert SOURCE TARGET"
        )
    family, fields = TransfoXLFamily(), transformers_fields(config.name_or_path or "config", config)
    changes = {name: getattr(config, name) for name in COMMON_FIELDS if hasattr(config, name)} | changes
    ours = XLConfig(**family.config(fields) | changes, attn_implementation=config._attn_implementation)
    fields.check_all_understood()
    rules = family.rules(ours, fields, [])
    return ours, {f"^{re.escape(rule.sources[0])}$": rule.target for rule in rules}


class _Loader:
    """In place of the former classes: gives models of this package."""

    loads: type[XLModel] | type[XLForCausalLM]

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path, *args: Any, config: Any = None, **kwargs: Any):
        """As `PreTrainedModel.from_pretrained`. Fields of the old config and of `XLConfig` may be given, such as `mem_len`."""
        if config is None:
            config, kwargs = TransfoXLConfig.from_pretrained(pretrained_model_name_or_path, return_unused_kwargs=True, **kwargs)
        changes = {name: kwargs.pop(name) for name in list(kwargs) if name in XLConfig.__annotations__}
        ours, key_mapping = _translated(config, **changes)
        loaded = cls.loads.from_pretrained(pretrained_model_name_or_path, *args, config=ours, key_mapping=key_mapping, **kwargs)
        model = loaded[0] if isinstance(loaded, tuple) else loaded
        # Transformers keeps the renaming and would undo it where the model is saved.
        model._weight_conversions = []
        return loaded

    @classmethod
    def _from_config(cls, config: TransfoXLConfig, **kwargs: Any):
        return cls.loads._from_config(_translated(config)[0], **kwargs)


class TransfoXLModel(_Loader):
    config_class = TransfoXLConfig
    loads = XLModel


class TransfoXLLMHeadModel(_Loader):
    config_class = TransfoXLConfig
    loads = XLForCausalLM
