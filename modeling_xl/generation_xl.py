"""`generate` with this model's memory: which cache it uses, and what of a text is new to it. No decoding of its own.

Written against `GenerationMixin` of Transformers 5.24.
"""

import copy
import functools
from collections.abc import Iterable, Iterator

import torch
from transformers import GenerationMixin
from transformers.generation import GenerationMode

from .cache_xl import XLCache

CACHE_ALIASES = ("past_key_values", "mems")
# Logits of one call, in elements: long calls are fast, and 2^24 of them are 64 MB in float32.
MAX_LOGITS = 2**24


def take_aliases(kwargs: dict) -> dict:
    """Moves a cache given under an older name to `cache`."""
    for alias in CACHE_ALIASES:
        given = kwargs.pop(alias, None)
        if given is not None:
            if kwargs.get("cache") is not None:
                raise ValueError(f"Both cache and {alias} were given; they are one argument, give it as cache.")
            kwargs["cache"] = given
    return kwargs


def accepts_cache_aliases(forward):
    """Lets a forward method take its cache as `past_key_values` or `mems` too."""

    @functools.wraps(forward)
    def wrapper(self, *args, **kwargs):
        return forward(self, *args, **take_aliases(kwargs))

    return wrapper


def check_cache(cache, config) -> None:
    if not isinstance(cache, XLCache):
        raise TypeError(
            f"cache is a {type(cache).__name__}, which cannot hold this model's memory; pass an XLCache(model.config), or "
            "nothing: the model makes one."
        )
    cache.check_config(config)


def log_probs(model, ids, cache, mask=None):
    """Reads ids (B, T) but the last, in calls of bounded size; yields log-probabilities (B, n) of those but the first.

    mask (B, T): 0 at pads, whose log-probabilities mean nothing.
    """
    length = ids.shape[1] - 1
    step = length if model.config.segment_len is None else MAX_LOGITS // (len(ids) * model.config.vocab_size)
    for start in range(0, length, max(1, step)):
        stop = min(length, start + step)
        real = None if mask is None else mask[:, start:stop]
        logits = model(input_ids=ids[:, start:stop], attention_mask=real, cache=cache, use_cache=True).logits
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        yield logits.log_softmax(-1).gather(-1, ids[:, start + 1 : stop + 1, None])[..., 0]


class XLGenerationMixin(GenerationMixin):
    """What `XLForCausalLM` adds to `GenerationMixin`."""

    def generate(self, inputs=None, *args, new_tokens_only: bool = False, **kwargs):
        """`GenerationMixin.generate` with this model's memory.

        cache: an `XLCache` to continue from, also as past_key_values or mems. By Transformers' rule `inputs` then holds the
        whole text, or new ids with a mask that covers seen and new columns. new_tokens_only: `inputs` holds the new ids
        alone, and a mask, if given, covers just them: the form for streams and sessions.

        Returns what `GenerationMixin.generate` does: ids (B, T + new), `inputs` first. The cache has then read all of them but
        the last of each row. A cache of one row given to several prompts, beams or return sequences is copied and stays as it
        was. Raises ValueError where nothing in `inputs` is new, for another `cache_implementation`, and for assisted decoding
        with a memory that cannot take tokens back.
        """
        kwargs = take_aliases(kwargs)
        cache = kwargs.get("cache")
        if cache is not None:
            check_cache(cache, self.config)
        ids = inputs if inputs is not None else kwargs.get("input_ids")
        mask, seen = kwargs.get("attention_mask"), 0
        if cache is not None and cache.get_seq_length():
            if new_tokens_only:
                if ids is None:
                    raise ValueError("new_tokens_only=True needs the new token ids as input_ids.")
                if mask is not None and mask.shape != ids.shape:
                    raise ValueError(
                        f"attention_mask has shape {tuple(mask.shape)}; with new_tokens_only=True it must cover the new ids "
                        f"alone, {tuple(ids.shape)}."
                    )
                # The new ids are then the whole text: a mask over all columns ever seen would grow without end.
                seen, cache.columns = cache.columns, 0
            else:
                text = ids if kwargs.get("inputs_embeds") is None else kwargs["inputs_embeds"]
                is_whole = text is not None and (mask is None or mask.shape[1] == text.shape[1])
                if is_whole or kwargs.get("inputs_embeds") is not None:  # embeddings are always taken for the whole text
                    if text.shape[1] <= cache.get_seq_length():
                        raise ValueError(
                            f"The input has {text.shape[1]} columns and the cache has seen {cache.get_seq_length()}: nothing "
                            "in it is new. Give the whole text, or the new ids alone with new_tokens_only=True."
                        )
                    kwargs["seen_columns"] = cache.get_seq_length()
        recorded = cache is not None and cache.record_past
        try:
            return super().generate(inputs, *args, **kwargs)
        finally:
            if cache is not None:
                cache.columns += seen
                cache.record_past = recorded  # assisted decoding asks for rows that later calls need not keep

    def init_continuous_batching(self, *args, **kwargs):
        """Refused: what `generate_batch` and `transformers serve --continuous-batching` call first."""
        raise ValueError(
            "Continuous batching keeps keys and values in pages of its own, which cannot hold this model's memory; call "
            "generate on a padded batch, which gives each row the numbers it has alone."
        )

    def stream(self, ids_pieces: Iterable[torch.Tensor], cache: XLCache | None = None) -> Iterator[torch.Tensor]:
        """Scores a text that comes in pieces: for each piece of ids, the log-probabilities of its tokens given all before.

        ids_pieces: ids (T,), or (B, T) of B texts side by side, T >= 0; taken one by one, so that the text may have no
        end. Yields nats of the piece's shape, in float32 at least. The first token of all has nothing before it: nan.
        Any cutting gives the same numbers, but with segment_len=None, where a piece is a segment.

        cache: a state to continue from, which changes as pieces are read (None: a new one). As after `generate` it has
        read all tokens but the last: begin the next call, of either, with that one. No gradient flows. Dropout acts in
        training mode: put the model into eval mode before.
        """
        if cache is not None:
            check_cache(cache, self.config)
        return self._stream(ids_pieces, XLCache(self.config) if cache is None else cache)

    @torch.no_grad()
    def _stream(self, ids_pieces, cache):
        last = None  # (B, 1), the token before the piece, not read yet
        for piece in ids_pieces:
            if piece.dim() not in (1, 2):
                raise ValueError(f"A piece has shape {tuple(piece.shape)}; it must be ids (T,) or (batch, T).")
            ids = (piece if piece.dim() == 2 else piece[None]).to(self.device)
            if last is None:
                joined = ids
            elif len(ids) == len(last):
                joined = torch.cat([last, ids], 1)
            else:
                raise ValueError(f"A piece has {len(ids)} rows and those before had {len(last)}; all must have as many.")
            parts = [torch.full(ids[:, :1].shape, torch.nan, device=self.device)] if last is None else []
            parts.extend(log_probs(self, joined, cache))
            last = joined[:, -1:] if joined.shape[1] else None
            yield torch.cat(parts, 1).view(piece.shape) if parts else torch.empty(piece.shape, device=self.device)

    def _prepare_position_ids_for_generation(self, inputs_tensor, model_kwargs):
        return None  # the cache counts real tokens itself; ids that begin at 0 again would begin a document

    def prepare_inputs_for_generation(
        self,
        input_ids,
        next_sequence_length=None,
        cache=None,
        attention_mask=None,
        inputs_embeds=None,
        is_first_iteration=False,
        document_ids=None,
        seen_columns=None,
        **kwargs,
    ):
        if seen_columns and is_first_iteration and next_sequence_length is None:
            next_sequence_length = input_ids.shape[1] - seen_columns
        inputs = super().prepare_inputs_for_generation(
            input_ids,
            next_sequence_length=next_sequence_length,
            cache=cache,
            attention_mask=attention_mask,
            inputs_embeds=inputs_embeds,
            is_first_iteration=is_first_iteration,
            **kwargs,
        )
        if document_ids is not None:
            fed = 0 if cache is None else cache.get_seq_length()
            given = inputs["input_ids"] if inputs.get("input_ids") is not None else inputs["inputs_embeds"]
            length = given.shape[1]
            if fed + length <= document_ids.shape[1]:
                inputs["document_ids"] = document_ids[:, fed : fed + length]
            elif fed < document_ids.shape[1]:
                more = document_ids[:, -1:].expand(-1, fed + length - document_ids.shape[1])
                inputs["document_ids"] = torch.cat([document_ids[:, fed:], more], 1)  # what is generated goes on with it
        return inputs

    def _prepare_cache_for_generation(self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length):
        cache = model_kwargs.get("cache")
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={implementation!r} names a cache that cannot hold this model's memory; leave it out, "
                "or pass cache=XLCache(model.config)."
            )
        if generation_config.use_cache is False:
            if cache is not None:
                raise ValueError("use_cache=False does not go with a cache to continue from; leave one of them out.")
            return
        # Assisted decoding alone does not ask which columns a cache has seen; the others must not be told twice.
        is_assisted = generation_mode == GenerationMode.ASSISTED_GENERATION
        if not is_assisted:
            model_kwargs.pop("seen_columns", None)
        elif not self.config.can_roll_back:
            raise ValueError(
                f"Assisted and prompt-lookup decoding take tokens back, and this memory cannot: {self.config.why_no_roll_back}"
            )
        elif cache is not None and model_kwargs.get("attention_mask") is not None and not model_kwargs.get("seen_columns"):
            raise ValueError(
                "Assisted and prompt-lookup decoding of new ids after a cache take no padding; leave the pads out."
            )
        rows = batch_size * max(generation_config.num_beams or 1, generation_config.num_return_sequences or 1)
        if cache is None:
            cache = XLCache(self.config)
        elif cache.batch_size not in (-1, rows):
            if cache.batch_size not in (1, batch_size):
                raise ValueError(
                    f"The cache holds {cache.batch_size} rows for {batch_size} prompts; it must hold one for each prompt, or "
                    "one for all. Take rows with cache.select(...)."
                )
            cache = copy.deepcopy(cache)  # the caller's stays as it was
            cache.batch_repeat_interleave(rows // cache.batch_size)
        else:
            cache._is_user_defined = True
        model_kwargs["cache"] = cache
        if generation_config.is_assistant:
            cache.activate_past_recording()
