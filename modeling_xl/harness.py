"""The model `modeling-xl` of lm-evaluation-harness: documents and contexts are read through the cache, with memory carried.

The harness' own `--model hf` runs these models too, but in windows of `max_length` tokens that know nothing of each other.
`python -m modeling_xl.harness` is the harness' command with this model registered.
"""

import sys
from collections.abc import Sequence
from typing import Any

import torch
from lm_eval.__main__ import cli_evaluate
from lm_eval.api.registry import register_model
from lm_eval.models.huggingface import HFLM
from tqdm import tqdm

from .cache_xl import XLCache
from .configuration_xl import XLConfig
from .generation_xl import MAX_LOGITS
from .text import InputError

READ_COLUMNS = 4096  # of contexts in one call


@register_model("modeling-xl")
class StreamingLM(HFLM):
    """Arguments are those of `hf` without `max_length`: a text is never cut. Further ones go to `from_pretrained`, and so to
    the config (`mem_len=512`)."""

    add_bos_token: bool | None

    def __init__(self, pretrained: str | torch.nn.Module, max_length: int | None = None, **options: Any):
        if max_length is not None:
            raise InputError(
                f"max_length={max_length}: the model modeling-xl reads whole texts; leave it out, or use --model hf"
            )
        super().__init__(pretrained, **options)
        config = self.model.config
        if not isinstance(config, XLConfig):
            raise InputError(f"{pretrained}: is a model of type {config.model_type!r} and not 'xl'; use --model hf")
        if config.segment_len is None:
            raise InputError(f"{pretrained}: has segment_len=None (every call is one segment); give a segment_len")
        if not str(self.batch_size).isdecimal():
            raise InputError(f"batch_size={self.batch_size}: is not found by trying for this model; give a number")
        if self.tokenizer.encode("a")[-1:] != self.tokenizer.encode("a", add_special_tokens=False)[-1:]:
            # It ends every text with a token, which would come between a context and what follows. Nor can it begin with one.
            if self.add_bos_token:
                raise InputError(f"add_bos_token={self.add_bos_token}: the tokenizer adds no token in front; leave it out")
            self.add_bos_token = False

    @property
    def max_length(self) -> int:
        return sys.maxsize

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Nats (negative) of each document given the prefix token, every token with all of the document before it."""
        documents = [request.args[0] for request in requests]
        read = [(None, [self.prefix_token_id], self.tok_encode(document)) for document in documents]
        found = [nats for nats, _ in self._loglikelihood_tokens(read, disable_tqdm)]
        for document, nats in zip(documents, found, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", (document,), nats)
        return found

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[Any], disable_tqdm: bool = False, override_bs: int | None = None
    ) -> list[tuple[float, bool]]:
        """Nats (negative) of each continuation after its context, and whether it is what greedy search gives.

        requests: (key, context ids, continuation ids). A context that several share is read once.
        """
        size = int(override_bs or self.batch_size)
        sharing: dict[tuple[int, ...], list[int]] = {}
        for index, (_, context, _) in enumerate(requests):
            # A context of spaces only becomes none at all, its spaces being counted to what follows.
            sharing.setdefault(tuple(context) or (self.prefix_token_id,), []).append(index)
        contexts = sorted(sharing, key=len, reverse=True)  # such of like lengths side by side, the most work first
        found: list[tuple[float, bool]] = [(0.0, True)] * len(requests)
        with tqdm(total=len(requests), disable=disable_tqdm or self.rank != 0) as bar:
            for batch in _parts(contexts, size):
                read = self._read([context[:-1] for context in batch])
                rows = [(row, index) for row, context in enumerate(batch) for index in sharing[context]]
                rows.sort(key=lambda place: len(requests[place[1]][2]), reverse=True)
                for part in _parts(rows, size):
                    texts = [[batch[row][-1], *requests[index][2]] for row, index in part]
                    answers = self._score(read.select([row for row, _ in part]), texts)
                    for (_, index), answer in zip(part, answers, strict=True):
                        found[index] = answer
                        if requests[index][0] is not None:
                            self.cache_hook.add_partial("loglikelihood", requests[index][0], answer)
                    bar.update(len(part))
        return found

    def _read(self, texts: Sequence[Sequence[int]]) -> XLCache:
        cache = XLCache(self.model.config)
        cache.start(len(texts))
        ids, mask = self._padded(texts)
        for part, real in zip(ids.split(READ_COLUMNS, 1), mask.split(READ_COLUMNS, 1), strict=True):
            if part.shape[1]:
                self.model(input_ids=part, attention_mask=real, cache=cache, use_cache=True, logits_to_keep=1)
        return cache

    def _score(self, cache: XLCache, texts: Sequence[Sequence[int]]) -> list[tuple[float, bool]]:
        """Of each text all tokens but the first, behind what the cache has seen."""
        ids, mask = self._padded(texts)
        nats = torch.zeros(len(texts), dtype=torch.float64)
        is_greedy = torch.ones(len(texts), dtype=torch.bool)
        columns = max(1, MAX_LOGITS // (len(texts) * self.model.config.vocab_size))
        inputs, targets, real = (tensor.split(columns, 1) for tensor in (ids[:, :-1], ids[:, 1:], mask[:, 1:]))
        for part, wanted, counts in zip(inputs, targets, real, strict=True):
            if not part.shape[1]:
                break  # empty texts
            logits = self.model(input_ids=part, attention_mask=counts, cache=cache, use_cache=True).logits
            logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
            scored = logits.log_softmax(-1).gather(-1, wanted[..., None])[..., 0]
            nats += scored.double().masked_fill(~counts, 0).sum(1).cpu()
            is_greedy &= ((logits.argmax(-1) == wanted) | ~counts).all(1).cpu()
        return list(zip(nats.tolist(), is_greedy.tolist(), strict=True))

    def _padded(self, texts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
        """Ids (B, T), filled up with zeros on the right, and where they are real."""
        lengths = torch.tensor([len(text) for text in texts])
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        ids = torch.zeros(mask.shape, dtype=torch.long)
        ids[mask] = torch.tensor([token for text in texts for token in text], dtype=torch.long)
        return ids.to(self.device), mask.to(self.device)


def _parts(items: Sequence[Any], size: int) -> list[Sequence[Any]]:
    return [items[start : start + size] for start in range(0, len(items), size)]


if __name__ == "__main__":
    try:
        cli_evaluate()
    except InputError as error:
        sys.stderr.write(f"modeling_xl.harness: error: {error}\n")
        sys.exit(2)
