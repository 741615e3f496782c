"""`XLConfig`: every size and choice of a model, checked when it is made."""

import math
import os
import sys
from itertools import pairwise
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig
from transformers.activations import ACT2FN

from .feedforward_xl import OWN_ACTIVATIONS
from .memories import MEMORY_MECHANISMS
from .position_base import PositionScheme
from .positions import POSITION_SCHEMES

# Of config.json and of the names and meaning of the weights. A change that code before it would read wrongly raises it, and
# `XLConfig.from_dict` then turns what is older into what is now.
FORMAT_VERSION = 1

# The modules that PEFT's LoraConfig adapts where it names none.
LORA_TARGETS = ["qkv_proj", "o_proj"]


@strict
class XLConfig(PreTrainedConfig):
    r"""Configuration of an XL model: a decoder in which `position_type` says how distance enters attention and
    `memory_type` what is kept of the past.

    Sizes: `vocab_size`; `hidden_size`; `num_hidden_layers`; `num_attention_heads`; `num_key_value_heads` (None: as many);
    `head_dim` (None: hidden_size / heads); `intermediate_size`; `max_position_embeddings`, the training length, no limit.

    Block: `hidden_act`, a name of `transformers.activations.ACT2FN` or `gelu_bloom`; `gated_mlp`; `norm_type` rmsnorm |
    layernorm; `norm_position` pre | post; `norm_eps`; `final_norm`; `use_parallel_residual`; `norm_residual`, whether the
    residual branches carry the normalised input (as some Bloom models do); `attention_bias`; `mlp_bias`; `clip_qkv`, largest
    size of a query's, key's or value's entries (None: no limit); `qk_norm`, RMS norm of each head's query and key before
    positions enter; `hidden_dropout`, `attention_dropout`, `embedding_dropout`; `initializer_range`.

    Embedding and head: `embedding_size` (None: hidden_size); `embedding_scale`, factor on embeddings; `embedding_norm`;
    `lm_head_bias`; `tie_word_embeddings`; adaptive input and softmax with `cutoffs` (ids at which a cluster ends) and
    `div_val` (width of cluster i: embedding_size // div_val**i); `tie_projs`, for each cluster whether its output
    projection is the input's (None: all follow `tie_word_embeddings`).

    Positions: `position_type`; `clamp_len` (xl); `untie_r` (xl: u, v a layer); `relative_attention_num_buckets`,
    `relative_attention_max_distance` (t5); `rope_parameters` (rope); `alibi_slopes` (alibi; None: the published ones).

    Memory: `memory_type`, one name or a list with one a layer; `segment_len`, tokens of a segment (None: every call is
    one segment); `mem_len`, rows kept of closed segments; `attention_window`, keys a query sees at most, itself included
    (None: no limit); `num_sink_tokens`, first tokens of a row that stay attended for ever; `initial_memory` empty |
    zeros; `bptt_segments`, segments through which gradient flows back before the one of the loss. A field applies to the
    layers whose mechanism knows it, and is refused where none does.

    Compressive memory: `compressed_mem_len`, slots; `compression_rate`, rows a slot; `compression_fn` mean | max | conv |
    dilated | most_used; `compression_dilation` (dilated); `compression_loss` attention | autoencode | None, added to the
    loss with the factor `compression_loss_coef` and training the compression only.

    Linear attention: `feature_map` elu | relu | favor; `num_random_features` (favor); `redraw_interval` (favor), training
    calls after which features are drawn anew (None: never).

    `format_version` is written when a config is saved, and says what wrote it; it is not chosen.

    Whatever cannot work raises an error that names the field, its value, the rule and the mend (a ValueError, which
    huggingface_hub wraps in its StrictDataclassClassValidationError).

    >>> XLConfig(position_type="rope", memory_type="recurrence", segment_len=128, mem_len=256).max_context
    3199
    """

    model_type = "xl"
    keys_to_ignore_at_inference: ClassVar[list[str]] = ["cache", "aux_loss"]
    _auto_class: ClassVar[str | None] = "AutoConfig"  # whatever saves a config saves its code beside it

    vocab_size: int = 259
    hidden_size: int = 512
    num_hidden_layers: int = 12
    num_attention_heads: int = 8
    num_key_value_heads: int | None = None
    head_dim: int | None = None
    intermediate_size: int = 2048
    hidden_act: str = "silu"
    gated_mlp: bool = True
    norm_type: str = "rmsnorm"
    norm_position: str = "pre"
    norm_eps: int | float = 1e-5
    final_norm: bool = True
    use_parallel_residual: bool = False
    norm_residual: bool = False
    attention_bias: bool = False
    clip_qkv: int | float | None = None
    qk_norm: bool = False
    mlp_bias: bool = False
    lm_head_bias: bool = False
    embedding_size: int | None = None
    embedding_scale: int | float = 1.0
    embedding_norm: bool = False
    cutoffs: list[int] | tuple[int, ...] = ()
    div_val: int = 1
    tie_projs: list[bool] | tuple[bool, ...] | None = None
    tie_word_embeddings: bool = True
    hidden_dropout: int | float = 0.0
    attention_dropout: int | float = 0.0
    embedding_dropout: int | float = 0.0
    initializer_range: int | float = 0.02

    position_type: str = "xl"
    clamp_len: int | None = None
    untie_r: bool = True
    relative_attention_num_buckets: int = 32
    relative_attention_max_distance: int = 128
    rope_parameters: dict | None = None
    alibi_slopes: list[int | float] | tuple[int | float, ...] | None = None

    memory_type: str | list[str] | tuple[str, ...] = "recurrence"
    segment_len: int | None = 512
    mem_len: int = 512
    attention_window: int | None = None
    num_sink_tokens: int = 0
    initial_memory: str = "empty"
    bptt_segments: int = 0
    compressed_mem_len: int = 512
    compression_rate: int = 4
    compression_fn: str = "conv"
    compression_dilation: int = 2
    compression_loss: str | None = "attention"
    compression_loss_coef: int | float = 1.0
    feature_map: str = "elu"
    num_random_features: int = 256
    redraw_interval: int | None = None

    max_position_embeddings: int = 2048
    use_cache: bool = True
    pad_token_id: int | None = None
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    format_version: int = FORMAT_VERSION

    def __post_init__(self, **kwargs):
        for name in ("cutoffs", "tie_projs", "alibi_slopes", "memory_type"):
            value = getattr(self, name)
            if isinstance(value, (list, tuple)):
                setattr(self, name, list(value))  # JSON has no tuples: equal before and after a round trip
        _at_least(self, "num_attention_heads", 1)  # before it divides
        if self.head_dim is None:
            if self.hidden_size % self.num_attention_heads:
                raise ValueError(
                    f"hidden_size={self.hidden_size} is not a multiple of num_attention_heads="
                    f"{self.num_attention_heads}; change one of them or give head_dim."
                )
            self.head_dim = self.hidden_size // self.num_attention_heads
        if self.num_key_value_heads is None:
            self.num_key_value_heads = self.num_attention_heads
        if self.embedding_size is None:
            self.embedding_size = self.hidden_size
        if self.position_type != "rope":
            self.rope_parameters = None
        super().__post_init__(**kwargs)
        if self.position_type == "rope":
            self.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0, **(self.rope_parameters or {})}
        else:
            self.rope_parameters = None

    def __init_subclass__(cls, *args, **kwargs):
        super().__init_subclass__(*args, **kwargs)
        cls._auto_class = None  # the code of another class travels if that class says so, as in Transformers

    @classmethod
    def from_dict(cls, config_dict, **kwargs):
        """As in Transformers, but a config of another model type, or of a newer format than this code knows, is refused: its
        fields would be read as if they were ours."""
        kind = config_dict.get("model_type")
        if kind not in (None, "", cls.model_type):
            raise ValueError(
                f"model_type={kind!r} is not {cls.model_type!r}: convert it with `modeling-xl convert SOURCE TARGET`; "
                "a checkpoint of 'transfo-xl' is loaded by AutoModelForCausalLM.from_pretrained as it is."
            )
        version = config_dict.get("format_version", 1)  # which the first files do not name
        if not isinstance(version, int) or not 1 <= version <= FORMAT_VERSION:
            raise ValueError(
                f"format_version={version!r} must be an integer from 1 to {FORMAT_VERSION}, the newest that this version of "
                "modeling_xl reads. A newer file needs a newer version of the package, or the code saved beside it: load it "
                "with trust_remote_code=True in a process that does not import modeling_xl."
            )
        return super().from_dict({**config_dict, "format_version": FORMAT_VERSION}, **kwargs)

    def save_pretrained(self, save_directory, push_to_hub=False, **kwargs):
        """As in Transformers. Beside the config stands all code of the package's models, and in it the class for each Auto
        class, so that whatever was saved, by itself or with a model, loads where the package is not installed."""
        if type(self) is XLConfig:
            # Not at the top, for the models import their config. That the line stands here is also what Transformers copies
            # the files by: it follows relative imports in the text of this file, wherever it lies.
            from .modeling_xl import AUTO_CLASSES

            written = getattr(self, "auto_map", None) or {}
            # A subclass of a model that was registered has just named itself, and its file lies there.
            others = {name for name in AUTO_CLASSES if _names_a_file(written.get(name), save_directory)}
            own = {name: f"modeling_xl.{model.__name__}" for name, model in AUTO_CLASSES.items() if name not in others}
            self.auto_map = {**written, **own}
        super().save_pretrained(save_directory, push_to_hub, **kwargs)

    def to_dict(self):
        # PEFT asks a model's config for this before it looks up what LoRA adapts by default, in a table that has no hook.
        peft = sys.modules.get("peft.utils.constants")
        if peft is not None:
            peft.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.setdefault(self.model_type, LORA_TARGETS)
        return super().to_dict()

    def validate_rope(self):
        """The rotary fields are checked by `RopePosition.validate`, which knows what this package computes."""

    def validate_architecture(self):
        """Checks every field and every pair of fields that cannot work together."""
        for name in ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads"):
            _at_least(self, name, 1)
        for name in ("head_dim", "intermediate_size", "embedding_size", "div_val", "max_position_embeddings"):
            _at_least(self, name, 1)
        for name in ("mem_len", "num_sink_tokens", "bptt_segments"):
            _at_least(self, name, 0)
        for name in ("segment_len", "attention_window", "clamp_len"):
            if getattr(self, name) is not None:
                _at_least(self, name, 1)
        if self.num_attention_heads % (self.num_key_value_heads or 1):
            _refuse(self, "num_key_value_heads", f"must divide num_attention_heads={self.num_attention_heads}")
        for name in ("hidden_dropout", "attention_dropout", "embedding_dropout"):
            if not 0 <= getattr(self, name) < 1:
                _refuse(self, name, "must be a probability, 0 <= p < 1")
        if not 0 < self.initializer_range < 1:
            _refuse(self, "initializer_range", "must be a number between 0 and 1, both excluded")
        if not 0 < self.norm_eps < math.inf:
            _refuse(self, "norm_eps", "must be a finite number above 0")
        if not math.isfinite(self.embedding_scale) or self.embedding_scale == 0:
            _refuse(self, "embedding_scale", "must be a finite number other than 0")
        _one_of(self, "norm_type", ("rmsnorm", "layernorm"))
        _one_of(self, "norm_position", ("pre", "post"))
        _one_of(self, "initial_memory", ("empty", "zeros"))
        _one_of(self, "position_type", POSITION_SCHEMES)
        _one_of(self, "hidden_act", {*ACT2FN, *OWN_ACTIVATIONS}, listed=False)
        if self.use_parallel_residual and self.norm_position == "post":
            _refuse(self, "use_parallel_residual", "needs norm_position='pre': branches in parallel have no norm after")
        if self.norm_residual and (self.norm_position == "post" or self.use_parallel_residual):
            _refuse(self, "norm_residual", "needs norm_position='pre' and use_parallel_residual=False")
        if self.clip_qkv is not None and not 0 < self.clip_qkv < math.inf:
            _refuse(self, "clip_qkv", "must be a finite number above 0, or None for no limit")
        if self.format_version != FORMAT_VERSION:
            _refuse(self, "format_version", f"must be {FORMAT_VERSION}, which this code writes; leave it out")
        self._validate_memory()
        self._validate_clusters()
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            value = getattr(self, name)
            ids = value if isinstance(value, (list, tuple)) else [] if value is None else [value]
            if any(not 0 <= token < self.vocab_size for token in ids):
                _refuse(self, name, f"must be an id from 0 to vocab_size - 1 = {self.vocab_size - 1}, or None")
        POSITION_SCHEMES[self.position_type].validate(self)

    def _validate_memory(self):
        if isinstance(self.memory_type, list) and len(self.memory_type) != self.num_hidden_layers:
            _refuse(
                self,
                "memory_type",
                f"has {len(self.memory_type)} entries but num_hidden_layers={self.num_hidden_layers}; give one name, or "
                "one a layer",
            )
        for name in self.layer_memory_types:
            if name not in MEMORY_MECHANISMS:
                _refuse(self, "memory_type", f"is not one of {', '.join(MEMORY_MECHANISMS)}")
        if self.bptt_segments and self.segment_len is None:
            _refuse(self, "bptt_segments", "needs a segment_len: without one every call is a single segment")
        for name, nothing, attribute in (
            ("initial_memory", "empty", "may_start_with_zeros"),
            ("attention_window", None, "uses_window"),
            ("num_sink_tokens", 0, "uses_sinks"),
            ("attention_dropout", 0, "has_weights"),
        ):
            if getattr(self, name) != nothing and not any(getattr(m, attribute) for m in self._mechanisms()):
                known = ", ".join(n for n, mechanism in MEMORY_MECHANISMS.items() if getattr(mechanism, attribute))
                _refuse(self, name, f"means nothing to memory_type={self.memory_type!r}, only to {known}; use {nothing!r}")
        for name in set(self.layer_memory_types):
            MEMORY_MECHANISMS[name].validate(self)
        self.check_mem_len(self.mem_len)

    def check_mem_len(self, mem_len: int):
        """Checks a memory length, the config's or one that an `XLCache` was given."""
        for name in set(self.layer_memory_types):
            MEMORY_MECHANISMS[name].check_mem_len(self, mem_len)

    def _validate_clusters(self):
        cutoffs = self.cutoffs
        edges = [0, *cutoffs, self.vocab_size]
        if any(low >= high for low, high in pairwise(edges)):
            _refuse(self, "cutoffs", f"must rise, from above 0 to below vocab_size={self.vocab_size}")
        if self.div_val > 1 and not cutoffs:
            _refuse(self, "div_val", "needs cutoffs: without them there is one cluster of full width")
        if self.embedding_size // self.div_val ** len(cutoffs) < 1:
            _refuse(
                self,
                "div_val",
                f"gives the last of {len(cutoffs) + 1} clusters a width of 0 (embedding_size={self.embedding_size}); "
                "choose embedding_size >= div_val ** len(cutoffs)",
            )
        if self.tie_projs is not None and len(self.tie_projs) != len(cutoffs) + 1:
            _refuse(self, "tie_projs", f"must have one entry a cluster, {len(cutoffs) + 1}")
        if self.tie_projs is not None and any(self.tie_projs) and not self.tie_word_embeddings:
            _refuse(self, "tie_projs", "ties projections, but tie_word_embeddings=False ties nothing; set all to False")

    @property
    def layer_memory_types(self) -> list[str]:
        """The mechanism of each layer."""
        if isinstance(self.memory_type, str):
            return [self.memory_type] * self.num_hidden_layers
        return list(self.memory_type)

    @property
    def position_scheme(self) -> type[PositionScheme]:
        """The class that `position_type` names."""
        return POSITION_SCHEMES[self.position_type]

    def _mechanisms(self):
        return [MEMORY_MECHANISMS[name] for name in self.layer_memory_types]

    @property
    def uses_grid(self) -> bool:
        """Whether segments, and so a memory length, mean anything to a layer."""
        return any(mechanism.uses_grid for mechanism in self._mechanisms())

    @property
    def has_two_forms(self) -> bool:
        """Whether a layer's memory is kept as hidden states or as keys and values, as `XLCache(form=…)` says."""
        return any(mechanism.has_two_forms for mechanism in self._mechanisms())

    @property
    def why_no_roll_back(self) -> str | None:
        """Why a cache cannot take tokens back, or None if it can."""
        reasons = (mechanism.why_no_roll_back(self) for mechanism in self._mechanisms())
        return next((reason for reason in reasons if reason), None)

    @property
    def can_roll_back(self) -> bool:
        return self.why_no_roll_back is None

    @property
    def max_context(self) -> int | float:
        """The largest distance, in tokens, at which a token can still change a logit; inf where nothing bounds it.

        Recurrence with N layers: (N - 1) * L * ceil(M / L) + M + L - 1; with a window W - 1 <= M: N * (W - 1). The
        figure of the paper, N * M, leaves out where in its segment a token stands.
        """
        return self.reach(self.mem_len)

    @property
    def layers_times_memory(self) -> int | None:
        """What papers give as reach, N * M: the memory lengths of all layers together. None where a layer has none."""
        lengths = [mechanism.remembered_tokens(self) for mechanism in self._mechanisms()]
        return None if None in lengths else sum(length for length in lengths if length is not None)

    def reach(self, mem_len: int) -> int | float:
        """`max_context` for another memory length."""
        if self.num_sink_tokens:
            return math.inf
        # Far enough into a text that its beginning bounds nothing; one query for each place in the pattern. The oldest
        # token seen never moves back when the query moves on, so following it from the last layer down finds the farthest.
        span = math.lcm(*(mechanism.pattern_len(self) for mechanism in self._mechanisms()))
        start = positions = torch.arange(span, device="cpu") + 2**40 // span * span
        for mechanism in reversed(self._mechanisms()):
            oldest = mechanism.oldest_visible(self, mem_len, positions)
            if oldest is None:
                return math.inf
            positions = torch.minimum(oldest, positions)
        return int((start - positions).max())

    @property
    def base_model_tp_plan(self) -> dict[str, str] | None:
        """How Transformers spreads `XLModel` over a tensor-parallel group: by heads, and by units of the feed-forward network.
        None where the position scheme or a mechanism does not say how to spread what it holds for each head."""
        plan = {
            "layers.*.self_attn.qkv_proj": "colwise_gather_output",  # `HeadShare.take` takes what belongs to the heads
            "layers.*.self_attn.o_proj": "rowwise",
            "layers.*.mlp.up_proj": "colwise",
            "layers.*.mlp.down_proj": "rowwise",
        }
        if self.gated_mlp:
            plan["layers.*.mlp.gate_proj"] = "colwise"
        if self.qk_norm:
            plan |= dict.fromkeys(("layers.*.self_attn.q_norm", "layers.*.self_attn.k_norm"), "replicated_with_grad_allreduce")
        for part in (self.position_scheme, *dict.fromkeys(self._mechanisms())):
            own = part.tp_plan(self)
            if own is None:
                return None
            plan |= own
        return plan

    def memory_fingerprint(self) -> dict[str, Any]:
        """The fields a cache depends on."""
        names = [
            *("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "norm_position"),
            *("position_type", "clamp_len", "rope_parameters", "alibi_slopes"),
            *("segment_len", "attention_window", "num_sink_tokens", "initial_memory"),
        ]
        found = {name: getattr(self, name) for name in names}
        for mechanism in dict.fromkeys(self._mechanisms()):
            found |= {name: getattr(self, name) for name in mechanism.config_fields}
        found["memory_type"] = self.layer_memory_types
        tp_size = getattr(getattr(self, "distributed_config", None), "tp_size", 1)
        if tp_size > 1:  # each process keeps its own heads
            found["tensor_parallel"] = f"process {torch.distributed.get_rank() % tp_size} of {tp_size}"
        return found


def _names_a_file(reference, folder) -> bool:
    """Whether the module of a class, as an auto_map names it, lies in the folder."""
    return isinstance(reference, str) and os.path.isfile(os.path.join(folder, f"{reference.split('.')[0]}.py"))


def _refuse(config: XLConfig, name: str, rule: str):
    raise ValueError(f"{name}={getattr(config, name)!r} {rule}.")


def _at_least(config: XLConfig, name: str, least: int):
    value = getattr(config, name)
    if isinstance(value, bool) or value < least:
        _refuse(config, name, f"must be an integer >= {least}")


def _one_of(config: XLConfig, name: str, known, listed: bool = True):
    if getattr(config, name) not in known:
        choices = f" one of {', '.join(known)}" if listed else " a name in transformers.activations.ACT2FN"
        _refuse(config, name, f"is not{choices}")
