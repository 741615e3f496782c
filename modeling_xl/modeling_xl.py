"""The models: `XLModel` runs a call over the segment grid, the others put a head on it.

Legend: B batch, T columns of a call, E hidden size, V vocabulary, N layers.
"""

import importlib
import itertools
import math
from typing import ClassVar, cast

import torch
from torch import nn
from transformers import PreTrainedModel
from transformers.utils import can_return_tuple, logging

from .cache_xl import LayerState, XLCache
from .configuration_xl import XLConfig
from .feedforward_xl import make_norm
from .few_rows_xl import apply_linear
from .generation_xl import XLGenerationMixin, accepts_cache_aliases, check_cache
from .grid_xl import CallPlan, Packing, Piece, plan_call
from .head_xl import Projection, XLHead, make_embedding, make_head, resized_embedding, tied_weights
from .layer_xl import XLDecoderLayer
from .memory_base import MemoryMechanism
from .outputs_xl import XLCausalLMOutput, XLClassifierOutput, XLModelOutput, XLQuestionAnsweringOutput
from .position_base import PositionContext
from .positions import POSITION_SCHEMES

logger = logging.get_logger(__name__)

# How far back a recording cache can go at least, a segment if that is longer; up to 4 times as far after a longer call.
LEAST_UNDO = 64

# Without segments and without gradient, a call is worked on in pieces of this length: what a layer holds meanwhile does not
# grow with the text.
LONGEST_PIECE = 1024


class XLPreTrainedModel(PreTrainedModel):
    """Loading, saving, initialisation and what Transformers may do with these models."""

    config: XLConfig
    config_class = XLConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["XLDecoderLayer"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["cache"]
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_flash_attn = False  # its kernels take no bias, and no key before the first query
    _supports_attention_backend = False
    _supports_context_parallel = False  # a memory does not lie on one rank's part of the text
    _can_compile_fullgraph = False
    # In files of the former Transformer-XL: sinusoids, which follow from the config, and what is tied, a second time.
    _keys_to_ignore_on_load_unexpected: ClassVar[list[str]] = [
        *(r"\bpos_emb\.inv_freq$", r"\bdec_attn\.r_[wr]_bias$", r"^crit\.out_(layers\.\d+\.weight|projs\.\d+)$")
    ]

    @torch.no_grad()
    def _init_weights(self, module):
        super()._init_weights(module)
        if hasattr(module, "init_parameters"):
            module.init_parameters(self.config.initializer_range)

    @classmethod
    def _supports_default_dynamic_cache(cls) -> bool:
        return False

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
        """As in Transformers, which spreads weights; under tensor parallelism each process computes its share of the heads."""
        if mesh_manager is not None and distributed_config.pp_size > 1:
            raise ValueError(
                f"pp_size={distributed_config.pp_size}: pipeline parallelism is not offered, for its stages hand on hidden "
                "states and no memory; set tp_size or fsdp_size instead."
            )
        if mesh_manager is not None and distributed_config.tp_size > 1:
            config = model.config
            if config.base_model_tp_plan is None:
                raise ValueError(
                    f"tp_size={distributed_config.tp_size}: position_type={config.position_type!r} or memory_type="
                    f"{config.memory_type!r} does not say how it is spread over processes; its class must define `tp_plan`."
                )
            for layer in model.base_model.layers:
                layer.self_attn.share_heads(mesh_manager.get_mesh("tp"))
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)

    def _upload_modified_files(self, working_dir, repo_id, *args, **kwargs):
        """As in Transformers, for `push_to_hub`. Where the package is installed, a repository without a model card gets the
        package's in place of an empty one."""
        try:
            hub = importlib.import_module(".hub", __package__)  # it does not travel, so no statement may name it
        except ImportError:
            pass
        else:
            hub.fill_card(self, working_dir, repo_id, token=kwargs.get("token"), revision=kwargs.get("revision"))
        return super()._upload_modified_files(working_dir, repo_id, *args, **kwargs)

    def _with_aux(self, loss, outputs, share=1.0):
        """The loss with that of the mechanisms, as the config weighs it. share: this call's part of the loss's divisor."""
        if loss is None or outputs.aux_loss is None:
            return loss
        return loss + outputs.aux_loss.to(loss.device) * (self.config.compression_loss_coef * share)

    def resize_token_embeddings(self, new_num_tokens=None, pad_to_multiple_of=None, mean_resizing=True):
        """As in Transformers; with clusters the last one grows or shrinks, and the cutoffs stay."""
        base = getattr(self, self.base_model_prefix, self)
        head = getattr(self, "lm_head", None)
        first = self.config.cutoffs[-1] if self.config.cutoffs else 0
        if new_num_tokens is not None and new_num_tokens <= first:
            raise ValueError(f"new_num_tokens={new_num_tokens} must exceed the last of cutoffs={self.config.cutoffs}.")
        if base.config.div_val == 1 and not isinstance(head, XLHead):
            return super().resize_token_embeddings(new_num_tokens, pad_to_multiple_of, mean_resizing)
        size = self.config.vocab_size if new_num_tokens is None else new_num_tokens
        if pad_to_multiple_of is not None:
            size = -(-size // pad_to_multiple_of) * pad_to_multiple_of
        embedding = base.embed_tokens
        if size != self.config.vocab_size:
            if self.config.div_val == 1:
                embedding = base.embed_tokens = resized_embedding(embedding, size)
            else:
                embedding.clusters[-1] = resized_embedding(embedding.clusters[-1], size - first)
            if head is not None:
                head.resize(size)
            self.config.vocab_size = size
            self.tie_weights()
        return embedding


class XLModel(XLPreTrainedModel):
    """The decoder without a head: ids to hidden states, over any length, with memory.

    The text of a row is cut into segments of `config.segment_len` real tokens, counted from its first; however it is fed,
    in one call, a call a segment or a call a token with the cache handed on, the numbers are the same.
    """

    def __init__(self, config: XLConfig):
        super().__init__(config)
        config.validate_architecture()  # it may have been changed since it was made
        self.embed_tokens = make_embedding(config)
        self.embed_proj = None
        embedding_size = config.embedding_size or config.hidden_size
        if config.div_val == 1 and embedding_size != config.hidden_size:
            self.embed_proj = Projection(embedding_size, config.hidden_size)
        self.embed_norm = make_norm(config) if config.embedding_norm else None
        self.embed_dropout = nn.Dropout(config.embedding_dropout)
        self.shared_position = POSITION_SCHEMES[config.position_type].shared_module(config)
        self.layers = nn.ModuleList(XLDecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = make_norm(config) if config.final_norm else None
        self.final_dropout = nn.Dropout(config.hidden_dropout)
        self._mechanisms = {type(layer.self_attn.memory) for layer in self.layers}
        self._uses_grid = config.uses_grid
        self.gradient_checkpointing = False
        self.post_init()

    def init_parallel_plans(self):
        super().init_parallel_plans()
        if self.norm is None:
            self._fsdp_plan.pop("norm")

    def get_input_embeddings(self):
        return self.embed_tokens

    def set_input_embeddings(self, value):
        self.embed_tokens = value

    def embed(self, input_ids):
        """(B, T) ids -> (B, T, E), scaled, before norm and dropout: what `inputs_embeds` stands for."""
        embedded = self.embed_tokens(input_ids)
        if self.embed_proj is not None:
            embedded = self.embed_proj(embedded)
        return embedded if self.config.embedding_scale == 1 else embedded * self.config.embedding_scale

    @accepts_cache_aliases
    @can_return_tuple
    @torch.compiler.disable(recursive=False)
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: XLCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        use_cache: bool | None = None,
        document_ids: torch.LongTensor | None = None,
        output_hidden_states: bool | None = None,
        output_attentions: bool | None = None,
        **kwargs,
    ) -> XLModelOutput:
        """Runs new tokens through the layers.

        input_ids (B, T), or inputs_embeds (B, T, E). attention_mask (B, T or longer), 1 at tokens, 0 at pads, which count
        as never fed; of a longer mask the last T columns are read. position_ids (B or 1, T): rising inside a document;
        without document_ids a 0 begins one. document_ids (B, T): a document is a run of equal ids and sees only itself.
        cache: the state of the tokens before, changed and returned, unless use_cache is False; also as past_key_values or
        mems. None: an empty one. output_hidden_states and output_attentions (eager only) cover the whole call.

        Returns hidden states (B, T, E), zero at pads, and the rest of `XLModelOutput`. Raises ValueError for shapes, ids and
        positions that cannot be, and for a cache of another batch size, kind of model or form; TypeError for any cache but an
        `XLCache`. The cache is then as it was.
        """
        output_hidden_states = self._setting("output_hidden_states", output_hidden_states)
        output_attentions = self._setting("output_attentions", output_attentions)
        inputs, packing, work = self._begin_call(input_ids, attention_mask, inputs_embeds, cache, output_attentions)
        if inputs_embeds is None:
            inputs = self.embed(inputs)
        if self.embed_norm is not None:
            inputs = self.embed_norm(inputs)
        hidden_states = self.embed_dropout(inputs)

        # Layer inputs and weights of whole calls are kept only where they are asked for: a call may be a whole book.
        finished: list[torch.Tensor] = []
        inputs_of: list[list[torch.Tensor]] = []
        weights: list[list[torch.Tensor]] = []
        aux_terms: torch.Tensor | None = None  # their sum and number
        plan = self._plan(work, packing, document_ids, position_ids, hidden_states.device, output_attentions)
        for piece in plan.pieces if plan else ():
            here = hidden_states[:, piece.start : piece.stop]
            self._prepare(here, work, piece)
            here, work.states, kept, attended, terms = self._run_layers(here, work.states, piece, output_hidden_states)
            finished.append(here)
            inputs_of.append(kept)
            weights.append(attended)
            if terms is not None:
                aux_terms = terms if aux_terms is None else aux_terms + terms
        last = torch.cat(finished, 1) if finished else hidden_states
        if self.norm is not None:
            last = self.norm(last)
        last = self.final_dropout(last)
        return self._end_call(
            hidden_states, last, plan, packing, work, cache, use_cache, aux_terms,
            all_hidden=inputs_of if output_hidden_states else None,
            weights=weights if output_attentions else None,
        )  # fmt: skip

    def _run_layers(self, hidden_states, states: list[LayerState | None], piece: Piece, keeps_inputs: bool):
        """The layers on a piece: hidden states (B, t, E) before and after, with the new states; of each layer its input where
        asked for, and attention weights; the terms of an auxiliary loss (2,) or None. torch.compile makes one graph of it."""
        inputs, new_states, weights, aux_terms = [], [], [], None
        for layer, state in zip(self.layers, states, strict=True):
            if keeps_inputs:
                inputs.append(hidden_states)
            hidden_states, state, attended, terms = layer(hidden_states, memory_state=state, piece=piece)
            new_states.append(state)
            weights.append(attended)
            if terms is not None:
                aux_terms = terms if aux_terms is None else aux_terms + terms.to(aux_terms.device)
        return hidden_states, new_states, inputs, weights, aux_terms

    # What follows is arithmetic on integers, which decides what is computed: never compiled.

    @torch.compiler.disable
    def _begin_call(self, input_ids, attention_mask, inputs_embeds, cache: XLCache | None, output_attentions: bool):
        """The packed inputs of a call, how they were packed, and a copy of the cache to work on."""
        inputs, real = self._check_inputs(input_ids, attention_mask, inputs_embeds)
        if cache is not None:
            check_cache(cache, self.config)
        if output_attentions and self.config._attn_implementation != "eager":
            raise ValueError(
                f"output_attentions=True needs attn_implementation='eager', not {self.config._attn_implementation!r}: other "
                "kernels do not hold the weights. Call model.set_attn_implementation('eager')."
            )
        work = XLCache(self.config) if cache is None else cache.working_copy()
        self._fix_form(work)
        work.start(len(real))
        packing = Packing(real)
        return packing.pack(inputs), packing, work

    @torch.compiler.disable
    def _plan(self, work: XLCache, packing: Packing, document_ids, position_ids, device, output_attentions) -> CallPlan | None:
        """None where all columns are pads."""
        if not packing.width:
            return None
        # Asked here: where layers are checkpointed, gradient may be off while they run.
        learns = self.training and torch.is_grad_enabled()
        plan = plan_call(
            work,
            packing.counts,
            self._per_token("document_ids", document_ids, packing),
            self._per_token("position_ids", position_ids, packing),
            device=device,
            segment_len=self.config.segment_len if self._uses_grid else None,
            longest_piece=None if self._uses_grid or torch.is_grad_enabled() else LONGEST_PIECE,
            bptt_segments=self.config.bptt_segments,
            needs_row_lines=torch.is_grad_enabled() or any(m.needs_row_lines for m in self._mechanisms),
            kept_rows=int(max((n for n in self._kept_rows(work) if math.isfinite(n)), default=0)),
            undo_limit=self._undo_limit(work, packing.real.shape[1]),
            context=self._position_context(work),
            wants_weights=bool(output_attentions),
            wants_aux_loss=learns,
        )
        work.detach()
        if learns:
            for mechanism in self.modules():
                if isinstance(mechanism, MemoryMechanism):
                    mechanism.before_call(is_fresh=not bool(work.lengths.any()))
        return plan

    @torch.compiler.disable
    def _prepare(self, hidden_states, work: XLCache, piece: Piece) -> None:
        """Ends gradients where the piece says so, and lets the layers get ready for it."""
        self._check_reentrant(piece)
        for index, layer in enumerate(self.layers):
            state, memory = work.states[index], cast(MemoryMechanism, layer.self_attn.memory)
            if piece.cut is not None and state is not None and memory.uses_grid:
                state = work.states[index] = state.detach(None if bool(piece.cut.all()) else piece.cut)
            memory.prepare(layer.self_attn, hidden_states, state, piece)

    @torch.compiler.disable
    def _end_call(
        self, first, last, plan: CallPlan | None, packing, work, cache, use_cache, aux_terms, all_hidden, weights
    ) -> XLModelOutput:
        """Moves the cache on, and unpacks what is returned. first, last: packed states before the layers and after the end."""
        columns = packing.real.shape[1]
        if plan is None:
            work.columns += columns
        else:
            plan.write(work, columns)
        use_cache = self._setting("use_cache", use_cache)
        if use_cache:
            if cache is not None and plan is not None:
                self._warn_of_open_segment(plan)
            work.detach()
            if cache is None:
                cache = work
            else:
                cache.commit(work)
        last = packing.unpack(last)
        if all_hidden is not None:
            # What one piece saw is handed out itself, so that gradients of it can be had.
            by_layer = zip(*all_hidden, strict=True)
            joined = [layer[0] if len(layer) == 1 else torch.cat(layer, 1) for layer in by_layer] or [first] * len(self.layers)
            all_hidden = (*(packing.unpack(layer) for layer in joined), last)
        if weights is not None:
            weights = list(zip(*weights, strict=True)) or [()] * len(self.layers)
            weights = self._join_weights(weights, plan.pieces if plan else [], packing)
        return XLModelOutput(
            last_hidden_state=last,
            cache=cache if use_cache else None,
            hidden_states=all_hidden,
            attentions=weights,
            aux_loss=None if aux_terms is None else aux_terms[0] / aux_terms[1].clamp(min=1),
        )

    def _setting(self, name: str, value):
        return getattr(self.config, name) if value is None else value

    def _check_inputs(self, input_ids, attention_mask, inputs_embeds):
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Give either input_ids or inputs_embeds, and only one of them.")
        inputs = input_ids if inputs_embeds is None else inputs_embeds
        dims = 2 if inputs_embeds is None else 3
        if inputs.dim() != dims:
            name = "input_ids" if dims == 2 else "inputs_embeds"
            raise ValueError(f"{name} has shape {tuple(inputs.shape)}; it must have {dims} axes, batch and length first.")
        if dims == 3 and inputs.shape[-1] != self.config.hidden_size:
            raise ValueError(f"inputs_embeds has size {inputs.shape[-1]}; it must be hidden_size={self.config.hidden_size}.")
        batch, columns = inputs.shape[:2]
        if not batch or not columns:
            raise ValueError(f"The input has shape {tuple(inputs.shape)}: a call needs at least one row and one token.")
        if dims == 2 and columns > 1 and inputs.device.type == "cpu" and not torch.compiler.is_compiling():
            least, most = int(inputs.min()), int(inputs.max())
            if least < 0 or most >= self.config.vocab_size:
                raise ValueError(
                    f"input_ids hold ids from {least} to {most}; they must lie in 0 ... vocab_size - 1 = "
                    f"{self.config.vocab_size - 1}. Does the tokenizer belong to this model?"
                )
        if attention_mask is None:
            return inputs, torch.ones(batch, columns, dtype=torch.bool, device=inputs.device)
        if attention_mask.dim() != 2 or attention_mask.shape[0] != batch or attention_mask.shape[1] < columns:
            raise ValueError(
                f"attention_mask has shape {tuple(attention_mask.shape)}; it must be (batch, length) = ({batch}, {columns}) "
                "or longer, of which the last columns are read: 1 at tokens, 0 at pads."
            )
        if attention_mask.is_floating_point() and bool((attention_mask < 0).any()):
            raise ValueError(
                "attention_mask holds negative numbers, as a mask that is added to scores does; it must be 1 at tokens and "
                "0 at pads."
            )
        return inputs, attention_mask[:, -columns:].bool()

    def _per_token(self, name: str, values, packing: Packing):
        if values is None:
            return None
        batch, columns = packing.real.shape
        if values.dim() != 2 or values.shape[0] not in (1, batch) or values.shape[1] != columns:
            raise ValueError(
                f"{name} has shape {tuple(values.shape)}; it must be (batch, length) = ({batch}, {columns}), one entry for "
                "each new token."
            )
        return packing.pack(values.expand(batch, -1)).cpu().long()

    def _fix_form(self, cache: XLCache) -> None:
        gradient = torch.is_grad_enabled()
        if cache.form is None:
            cache.form = "hidden" if gradient else "key_value"
        elif gradient and cache.form == "key_value" and self.config.has_two_forms:
            raise ValueError(
                "The cache holds keys and values of frozen weights (form='key_value') but gradient is enabled: nothing would "
                "reach W_K and W_V through memory. Call the model under torch.no_grad(), or begin with "
                "XLCache(model.config, form='hidden'), which works with and without gradient."
            )

    def _position_context(self, cache: XLCache) -> PositionContext:
        derived = None if torch.is_grad_enabled() else cache.derived
        return PositionContext(self.shared_position, derived=derived, derived_limit=2 * max(self._kept_rows(cache)) + 256)

    def _kept_rows(self, cache: XLCache) -> list[float]:
        """Most tokens that the layers look back to, for each mechanism."""
        return [mechanism.kept_rows(self.config, cache.mem_len) for mechanism in self._mechanisms]

    def _undo_limit(self, cache: XLCache, columns: int) -> float:
        """How many tokens `XLCache.crop` can take back after this call."""
        if min(self._kept_rows(cache)) == math.inf:
            return math.inf
        if not cache.record_past or not cache.is_croppable:
            return 0
        least = max(self.config.segment_len or 0, LEAST_UNDO)
        return min(max(columns, least), 4 * least)

    def _warn_of_open_segment(self, plan) -> None:
        segment = self.config.segment_len
        if segment is None or not self._uses_grid:
            return
        if self.training and torch.is_grad_enabled() and bool((plan.lengths % segment != 0).any()):
            logger.warning_once(
                f"A training call ended inside a segment of {segment} tokens: the next call gives no gradient to the part "
                "of the segment that was fed. Feed multiples of segment_len."
            )

    def _check_reentrant(self, piece) -> None:
        """Reentrant checkpointing gives no gradient to the memory a layer reads, so none may have to flow there."""
        if not piece.start or not (self.gradient_checkpointing and self.training and torch.is_grad_enabled()):
            return
        options = getattr(self.layers[0]._gradient_checkpointing_func, "keywords", {})
        memory_is_cut = piece.cut is not None and bool(piece.cut.all()) and all(m.uses_grid for m in self._mechanisms)
        if options.get("use_reentrant") and not memory_is_cut:
            raise ValueError(
                "use_reentrant=True in activation checkpointing would silently drop the gradient through memory here "
                "(bptt_segments > 0, or rows whose segments end in different columns); use {'use_reentrant': False}."
            )

    def _join_weights(self, weights, pieces, packing: Packing):
        """N tensors (B, H, T, K): sinks, rows attended at the call's start, the call's columns."""
        joined: list[torch.Tensor | None] = []
        for layer in weights:
            if any(part is None for part in layer) or not layer:
                joined.append(None)
                continue
            if len(layer) == 1 and packing.is_identity:
                joined.append(layer[0])
                continue
            sinks = self.config.num_sink_tokens
            before = max(part.shape[-1] - sinks - piece.width - piece.start for part, piece in zip(layer, pieces, strict=True))
            before = max(before, 0)
            width = packing.width
            whole = layer[0].new_zeros(*layer[0].shape[:2], width, sinks + before + width)
            for part, piece in zip(layer, pieces, strict=True):
                first = sinks + before + piece.stop - (part.shape[-1] - sinks)
                whole[:, :, piece.start : piece.stop, first : sinks + before + piece.stop] = part[..., sinks:]
                whole[:, :, piece.start : piece.stop, :sinks] = part[..., :sinks]
            # Queries, then the call's keys, back to the columns they came from.
            whole = packing.unpack(whole.transpose(1, 2)).transpose(1, 2)
            if not packing.is_identity:
                keys = packing.unpack(whole[..., sinks + before :].permute(0, 3, 1, 2)).permute(0, 2, 3, 1)
                whole = torch.cat([whole[..., : sinks + before], keys], -1)
            joined.append(whole)
        return tuple(joined)


def next_token_targets(labels, attention_mask, ignore_index: int):
    """(B, T) labels -> (B, T): at each token the label of the row's next one; ignore_index at the last and at pads."""
    columns = labels.shape[1]
    real = None if attention_mask is None else attention_mask[:, -columns:].bool()
    if real is None or bool(real.all()):
        return nn.functional.pad(labels[:, 1:], (0, 1), value=ignore_index)
    packing = Packing(real)
    packed = nn.functional.pad(packing.pack(labels), (0, 1), value=ignore_index)[:, 1:]
    past_end = torch.arange(packing.width)[None] >= packing.counts[:, None] - 1
    packed = packed.masked_fill(past_end.to(labels.device), ignore_index)
    return packing.unpack(packed).masked_fill(~real, ignore_index)


class XLForCausalLM(XLPreTrainedModel, XLGenerationMixin):
    """The language model: logits over the next token, loss, and `generate` with bounded memory."""

    _tp_plan: ClassVar[dict[str, str]] = {"lm_head": "colwise_gather_output"}
    _fsdp_plan: ClassVar[dict[str, str]] = {"lm_head": "keep_full_weight"}

    def __init__(self, config: XLConfig):
        super().__init__(config)
        self._tied_weights_keys = tied_weights(config)
        self.model = XLModel(config)
        self.lm_head = make_head(config)
        self.post_init()

    def init_parallel_plans(self):
        super().init_parallel_plans()
        if isinstance(self.lm_head, XLHead):  # what it shares with the embedding is used in parts: both stay whole
            for plan, name in itertools.product((self._tp_plan, self._fsdp_plan), ("lm_head", "model.embed_tokens")):
                plan.pop(name, None)

    def get_output_embeddings(self):
        return self.lm_head if isinstance(self.lm_head, nn.Linear) else None

    def set_output_embeddings(self, value):
        self.lm_head = value

    @accepts_cache_aliases
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: XLCache | None = None,
        inputs_embeds: torch.FloatTensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        document_ids: torch.LongTensor | None = None,
        num_items_in_batch: int | torch.Tensor | None = None,
        ignore_index: int = -100,
        **kwargs,
    ) -> XLCausalLMOutput:
        """Inputs as `XLModel.forward`. labels (B, T): ids, shifted here to the row's next real token. shift_labels (B, T):
        targets already in place (a segment's last token then predicts the first of the next one); they win over labels.
        num_items_in_batch: what the summed loss is divided by, instead of the number of targets in this call.
        logits_to_keep: how many last columns, or which columns, to compute logits of; 0: all. ignore_index: the target that
        counts for nothing.

        Returns `XLCausalLMOutput`. The loss is the mean of -log P over the targets, in nats, in float32 at least; in training
        it holds the memory's own, `aux_loss`, too. Raises ValueError as `XLModel.forward`, and for labels of another shape
        than the input.
        """
        # Not in the signature: Trainer takes every parameter with "label" in its name for a column it must find.
        shift_labels = kwargs.pop("shift_labels", None)
        for name, ids in (("labels", labels), ("shift_labels", shift_labels)):
            given = input_ids if inputs_embeds is None else inputs_embeds
            if ids is not None and given is not None and ids.shape != given.shape[:2]:
                raise ValueError(
                    f"{name} has shape {tuple(ids.shape)}; it must be that of the input, {tuple(given.shape[:2])}."
                )
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            document_ids=document_ids,
            **kwargs,
        )
        hidden_states = outputs.last_hidden_state
        loss = logits = None
        head = self.lm_head
        targets: torch.Tensor | None = shift_labels
        if targets is None and labels is not None:
            targets = next_token_targets(labels, attention_mask, ignore_index)
        elif targets is not None and attention_mask is not None:
            targets = targets.masked_fill(~attention_mask[:, -targets.shape[1] :].bool(), ignore_index)
        if targets is not None and isinstance(head, XLHead) and head.is_adaptive:
            chosen = targets != ignore_index
            losses = head(hidden_states[chosen], targets[chosen])
            loss = losses.sum() / _num_items(chosen, num_items_in_batch)
        elif targets is not None:
            logits = head(hidden_states)
            raised = logits.to(torch.promote_types(logits.dtype, torch.float32)).flatten(0, 1)
            summed = nn.functional.cross_entropy(raised, targets.flatten(), ignore_index=ignore_index, reduction="sum")
            loss = summed / _num_items(targets != ignore_index, num_items_in_batch)
        if targets is not None and num_items_in_batch is not None:
            share = (targets != ignore_index).sum() / _num_items(targets, num_items_in_batch)
            loss = self._with_aux(loss, outputs, share)
        else:
            loss = self._with_aux(loss, outputs)
        keep = slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
        if logits is None:
            if loss is None or not self.training:
                logits = apply_linear(head, hidden_states[:, keep])
        elif keep != slice(0, None):  # FSDP warns of outputs that are views
            logits = logits[:, keep]
        return XLCausalLMOutput(
            loss=loss,
            logits=logits,
            **_passed_on(outputs),
        )


def _num_items(chosen, num_items_in_batch):
    """What a summed loss is divided by; 1 where there is no target, so that the loss is 0 and not undefined."""
    if num_items_in_batch is None:
        return chosen.sum().clamp(min=1)
    return num_items_in_batch.to(chosen.device) if isinstance(num_items_in_batch, torch.Tensor) else num_items_in_batch


def _passed_on(outputs: XLModelOutput) -> dict:
    """What every model with a head returns as the base model did."""
    return {name: getattr(outputs, name) for name in ("cache", "hidden_states", "attentions", "aux_loss")}


class XLForSequenceClassification(XLPreTrainedModel):
    """A score of each class from the last real token of a row."""

    def __init__(self, config: XLConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = XLModel(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    @accepts_cache_aliases
    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, labels=None, inputs_embeds=None, **kwargs) -> XLClassifierOutput:
        """Inputs as `XLModel.forward`. labels (B,): classes, or numbers for regression. The last real token is found by the
        mask; without one, and with a pad_token_id, it is the last id that is not padding. Returns logits (B, num_labels)."""
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        hidden_states = outputs.last_hidden_state
        columns = torch.arange(hidden_states.shape[1], device=hidden_states.device)
        real = torch.ones_like(columns)[None].expand(hidden_states.shape[:2])
        if attention_mask is not None:
            real = attention_mask[:, -hidden_states.shape[1] :].bool()
        elif self.config.pad_token_id is not None and input_ids is not None:
            real = input_ids != self.config.pad_token_id
        last = (columns * real).argmax(1)
        pooled = self.score(hidden_states[torch.arange(len(last), device=last.device), last])
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=None, labels=labels, pooled_logits=pooled, config=self.config)
        return XLClassifierOutput(
            loss=self._with_aux(loss, outputs),
            logits=pooled,
            **_passed_on(outputs),
        )


class XLForTokenClassification(XLPreTrainedModel):
    """A score of each class at every token."""

    def __init__(self, config: XLConfig):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = XLModel(config)
        self.dropout = nn.Dropout(config.hidden_dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @accepts_cache_aliases
    @can_return_tuple
    def forward(self, input_ids=None, attention_mask=None, labels=None, inputs_embeds=None, **kwargs) -> XLClassifierOutput:
        """Inputs as `XLModel.forward`. labels (B, T): classes, -100 where there is none. Returns logits (B, T, num_labels)."""
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        logits = self.score(self.dropout(outputs.last_hidden_state))
        loss = None if labels is None else self.loss_function(logits, labels, self.config)
        return XLClassifierOutput(
            loss=self._with_aux(loss, outputs),
            logits=logits,
            **_passed_on(outputs),
        )


class XLForQuestionAnswering(XLPreTrainedModel):
    """Scores of each token as the first and the last of an answer."""

    def __init__(self, config: XLConfig):
        super().__init__(config)
        self.model = XLModel(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @accepts_cache_aliases
    @can_return_tuple
    def forward(
        self, input_ids=None, attention_mask=None, start_positions=None, end_positions=None, inputs_embeds=None, **kwargs
    ) -> XLQuestionAnsweringOutput:
        """Inputs as `XLModel.forward`. start_positions, end_positions (B,): columns of the answer's first and last token.
        Returns start_logits and end_logits (B, T)."""
        outputs = self.model(input_ids=input_ids, attention_mask=attention_mask, inputs_embeds=inputs_embeds, **kwargs)
        start_logits, end_logits = self.qa_outputs(outputs.last_hidden_state).unbind(-1)
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions)
        return XLQuestionAnsweringOutput(
            loss=self._with_aux(loss, outputs),
            start_logits=start_logits,
            end_logits=end_logits,
            **_passed_on(outputs),
        )


# By which Auto class each is loaded: the package registers them, and every saved config names them.
AUTO_CLASSES: dict[str, type[XLPreTrainedModel]] = {
    "AutoModel": XLModel,
    "AutoModelForCausalLM": XLForCausalLM,
    "AutoModelForSequenceClassification": XLForSequenceClassification,
    "AutoModelForTokenClassification": XLForTokenClassification,
    "AutoModelForQuestionAnswering": XLForQuestionAnswering,
    # `transformers serve` tries this one, and then looks for the class in Transformers alone.
    "AutoModelForDecision": XLForCausalLM,
}
