"""What `speed.py` compares: builders of models that make one step of a case.

All models have the same width, depth and heads, a feed-forward network of as many products (2048 wide, or gated and 1376), a
vocabulary of 256, float32, no dropout. A case says what a step is:

train: forward, backward and fused AdamW on B rows of T tokens, behind a memory of M. Where a package carries its memory, it is
carried on; a Llama has M detached keys and values in its cache, which it need not project again.
read: T tokens in one call, logits of all of them, behind M. prefill: T tokens, nothing before them, logits of the last one.
decode: C calls of one token. This package's segments have 128 tokens there, so that a query sees M and 64 more on average; a
Llama's cache holds as many. window: what one new token costs a model without memory that reads M tokens anew for it.
attend, attend_train: attention alone, T queries and keys of all heads, without gradient and with.

A builder takes the case and returns a function that does one step and says how many tokens it was. Imports are those of the
package that is built, for no environment has all.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch.nn import functional as F

WIDTH, HEADS, VOCAB = 512, 8, 256
INNER, GATED_INNER = 2048, 1376
SEGMENT = 128  # of decoding

# Where and in what the models are made; `gpu.py` changes them.
DEVICE, DTYPE = torch.device("cpu"), torch.float32

Step = Callable[[], int]


class Case(NamedTuple):
    kind: str
    batch: int = 1
    tokens: int = 1
    memory: int = 0
    layers: int = 12
    calls: int = 32  # of decoding


def build(candidate: str, **case: Any) -> Step:
    """The step of a candidate: `llama`, a peer, or `<position_type>-<memory_type>` of this package.

    `+<setting>` behind the latter is one of PyTorch's: `onednn` lets oneDNN do products of float32, `bfloat16` is autocast,
    `compile` is torch.compile, `graph` decodes by a CUDA graph (`captured`; `llama_static` by torch.compile's).
    """
    make = BUILDERS.get(candidate)
    if make:
        return make(Case(**case))
    name, _, setting = candidate.partition("+")
    if setting == "onednn":
        torch.backends.mkldnn.matmul.fp32_precision = "bf16"
    step = modeling_xl(*name.split("-"), Case(**case), setting)

    def in_bfloat16() -> int:
        with torch.autocast("cpu", torch.bfloat16):
            return step()

    return in_bfloat16 if setting == "bfloat16" else step


def some_ids(*shape: int) -> torch.Tensor:
    return torch.randint(0, VOCAB, shape, device=DEVICE)


def some_rows(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE, dtype=DTYPE)


def trained(model: torch.nn.Module, loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], case: Case) -> Step:
    """A step of training on the loss of tokens (B, T) and the targets (B, T) of each."""
    model.train()
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-4, fused=True)

    def step() -> int:
        loss(some_ids(case.batch, case.tokens), some_ids(case.batch, case.tokens)).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return case.batch * case.tokens

    return step


def without_gradient(model: torch.nn.Module, call: Callable[[torch.Tensor], Any], case: Case) -> Step:
    """A step of reading or decoding."""
    model.eval()
    calls = case.calls if case.kind == "decode" else 1

    def step() -> int:
        with torch.inference_mode():
            for _ in range(calls):
                call(some_ids(case.batch, case.tokens))
        return case.batch * case.tokens * calls

    return step


def cross_entropy(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def captured(model: torch.nn.Module, cache: Any) -> Callable[[torch.Tensor], torch.Tensor]:
    """A function ids (B, 1) -> logits (B, 1, V), valid until the next call, that goes on behind the cache: the exported step,
    and the copy of its new state over the old one, as one CUDA graph. On CPUs the step runs as it is."""
    from modeling_xl.export import export_step

    exported = export_step(model.eval(), cache.batch_size)
    step, state = exported.program.module(), exported.state_of(cache)
    ids = torch.zeros(cache.batch_size, 1, dtype=torch.long, device=model.device)
    graph = logits = None

    @torch.no_grad()
    def advance() -> torch.Tensor:
        logits, found = step(ids, state)
        for name, tensor in state.items():
            tensor.copy_(found[name])
        return logits

    if ids.is_cuda:
        before = {name: tensor.clone() for name, tensor in state.items()}
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # libraries make their workspaces at the first run, which no graph may hold
            advance()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            logits = advance()
        for name, tensor in state.items():
            tensor.copy_(before[name])

    def call(token: torch.Tensor) -> torch.Tensor:
        ids.copy_(token)
        if graph is None:
            return advance()
        graph.replay()
        return logits

    return call


def modeling_xl(position: str, memory: str, case: Case, setting: str = "") -> Step:
    """This package. Compressive memory has half of M as slots, so that a query attends to as many keys."""
    from modeling_xl import XLCache, XLConfig, XLForCausalLM

    segment = {"decode": SEGMENT, "prefill": case.tokens // 4}.get(case.kind, case.tokens)
    rows, slots = case.memory, None
    if memory == "compressive":
        slots = max(case.memory // 2, segment // 4)
        rows = max(case.memory - slots, segment)
    fields: dict[str, Any] = {} if slots is None else {"compressed_mem_len": slots}
    if memory == "linear" and position == "xl":
        fields["clamp_len"] = 128
    config = XLConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        num_hidden_layers=case.layers,
        num_attention_heads=HEADS,
        intermediate_size=INNER,
        gated_mlp=False,
        hidden_act="relu",
        norm_type="layernorm",
        position_type=position,
        memory_type=memory,
        segment_len=segment,
        mem_len=rows,
        **fields,
    )
    model = XLForCausalLM(config).to(DEVICE, DTYPE)
    cache = XLCache(config, form="hidden" if case.kind == "train" else None)
    if case.kind != "prefill":
        seen = case.memory if slots is None else rows + slots * config.compression_rate
        with torch.no_grad():
            for _ in range(-(-seen // segment)):
                model(some_ids(case.batch, segment), cache=cache, logits_to_keep=1)
    if setting == "compile":
        model.compile()
    if setting == "graph":
        return without_gradient(model, captured(model, cache), case)
    if case.kind == "train":
        return trained(model, lambda ids, targets: model(ids, labels=targets, shift_labels=targets, cache=cache).loss, case)
    if case.kind == "prefill":
        return without_gradient(model, lambda ids: model(ids, logits_to_keep=1), case)
    return without_gradient(model, lambda ids: model(ids, cache=cache), case)


def llama(case: Case, static: bool = False, compiled: bool = False) -> Step:
    """Transformers' Llama with SDPA. Its cache holds M random rows, and is cut back after each call; or a static one, which
    is as long as the case needs and written to in place. compiled: to CUDA graphs where there is a GPU."""
    from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, StaticCache

    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=GATED_INNER,
        num_hidden_layers=case.layers,
        num_attention_heads=HEADS,
        max_position_embeddings=2**18,
        attn_implementation="sdpa",
    )
    model = LlamaForCausalLM(config).to(DEVICE, DTYPE)
    if case.kind == "window":
        model.eval()
        window = some_ids(1, case.memory)

        def step() -> int:
            with torch.inference_mode():
                model(window, use_cache=False, logits_to_keep=1)
            return 1

        return step
    if case.kind == "prefill":
        return without_gradient(model, lambda ids: model(ids, logits_to_keep=1), case)
    if case.kind == "train" and not case.memory:
        return trained(model, lambda ids, targets: cross_entropy(model(ids, use_cache=False).logits, targets), case)
    past = case.memory + (SEGMENT // 2 if case.kind == "decode" else 0)
    rows = [some_rows(2, case.batch, HEADS, past, WIDTH // HEADS) for _ in range(case.layers)]

    def filled() -> DynamicCache:
        cache = DynamicCache()
        for layer, (key, value) in enumerate(rows):
            cache.update(key, value, layer)
        return cache

    if case.kind == "train":
        return trained(
            model,
            lambda ids, targets: cross_entropy(model(ids, past_key_values=filled(), use_cache=True).logits, targets),
            case,
        )
    if static:
        fixed = StaticCache(config, max_cache_len=past + case.tokens)
        for layer, (key, value) in enumerate(rows):
            fixed.update(key, value, layer)
        rows.clear()
        lengths = [layer.cumulative_length for layer in fixed.layers]
        if compiled:
            model.forward = torch.compile(model.forward, mode="reduce-overhead", fullgraph=True)

        def call_static(ids: torch.Tensor) -> None:
            for length in lengths:
                length.fill_(past)
            model(ids, past_key_values=fixed)

        return without_gradient(model, call_static, case)
    cache = filled()
    rows.clear()

    def call(ids: torch.Tensor) -> None:
        model(ids, past_key_values=cache, use_cache=True)
        cache.crop(-ids.shape[1])

    return without_gradient(model, call, case)


def attention(biased: bool) -> Callable[[Case], Step]:
    """Attention over the queries and keys of a text: torch's, or with the position scores of Transformer-XL."""

    def make(case: Case) -> Step:
        from modeling_xl.few_rows_xl import for_dot_products
        from modeling_xl.position_base import SPARE, DistanceBias
        from modeling_xl.softmax_xl import blocked_attention, trained_attention

        has_gradient = case.kind == "attend_train"
        shape = (case.batch, HEADS, case.tokens, WIDTH // HEADS)
        query, key, value, position_query = (some_rows(*shape).requires_grad_(has_gradient) for _ in range(4))
        if has_gradient:
            table, spare = some_rows(HEADS, case.tokens, WIDTH // HEADS).requires_grad_(), 0
        else:  # as a cache keeps it
            table, spare = for_dot_products(some_rows(HEADS, case.tokens + SPARE, WIDTH // HEADS)), SPARE
        scaling = (WIDTH // HEADS) ** -0.5

        def step() -> int:
            with torch.set_grad_enabled(has_gradient):
                if not biased:
                    output = F.scaled_dot_product_attention(query, key, value, is_causal=True)
                else:
                    bias = DistanceBias(position_query * scaling, table, spare)
                    if has_gradient:
                        output = trained_attention(query, key, value, bias, None, scaling, 0.0)
                    else:
                        output = blocked_attention(query, key, value, bias, None, scaling)
                if has_gradient:
                    output.sum().backward()
            return case.batch * case.tokens

        return step

    return make


def transfo_xl(case: Case) -> Step:
    """The former Transformers' Transformer-XL; the call that no version of PyTorch takes is mended."""
    from peers import former_classes, former_config

    config = former_config(VOCAB, WIDTH, HEADS, INNER, case.layers, case.memory)
    model = former_classes()[1](config)
    memory = [torch.randn(case.memory, case.batch, WIDTH) for _ in range(case.layers)]
    if case.kind == "train":
        return trained(model, lambda ids, targets: model(ids, mems=memory, labels=targets).loss, case)
    return without_gradient(model, lambda ids: model(ids, mems=memory).prediction_scores, case)


def x_transformers(**positions: bool) -> Callable[[Case], Step]:
    def make(case: Case) -> Step:
        from x_transformers import Decoder, TransformerWrapper

        layers = Decoder(dim=WIDTH, depth=case.layers, heads=HEADS, attn_dim_head=WIDTH // HEADS, ff_mult=4, **positions)
        model = TransformerWrapper(
            num_tokens=VOCAB, max_seq_len=2**16, max_mem_len=case.memory, use_abs_pos_emb=False, attn_layers=layers
        )
        memory = [torch.randn(case.batch, case.memory, WIDTH) for _ in range(case.layers)]
        if case.kind == "train":
            return trained(
                model, lambda ids, targets: cross_entropy(model(ids, mems=memory, return_mems=True)[0], targets), case
            )
        return without_gradient(model, lambda ids: model(ids, mems=memory, return_mems=True), case)

    return make


def compressive_transformer(case: Case) -> Step:
    """compressive-transformer-pytorch, which takes the gradient of its key projection away in each forward pass."""
    from compressive_transformer_pytorch import CompressiveTransformer

    if case.tokens == 1:
        raise NotImplementedError("decodes no single token")
    rows = max(case.memory // 2, case.tokens)
    slots = max(case.memory - rows, -(-rows // 4))
    model = CompressiveTransformer(
        num_tokens=VOCAB,
        dim=WIDTH,
        depth=case.layers,
        seq_len=case.tokens,
        mem_len=rows,
        cmem_len=slots,
        cmem_ratio=4,
        heads=HEADS,
        gru_gated_residual=False,
    )
    memory = tuple(torch.randn(case.layers, case.batch, length, WIDTH) for length in (rows, slots))

    def loss(ids: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        for layer in model.attn_layers:
            layer.fn.fn.to_kv.weight.requires_grad_(True)
        logits, _, own = model(ids, memory)
        return cross_entropy(logits, targets) + own.sum()

    return trained(model, loss, case) if case.kind == "train" else without_gradient(model, lambda ids: model(ids, memory), case)


def infini_transformer(case: Case) -> Step:
    """infini-transformer-pytorch. Its state does not grow with M; decoding has half of a local window of 256 before it."""
    from infini_transformer_pytorch import InfiniTransformer

    model = InfiniTransformer(num_tokens=VOCAB, dim=WIDTH, depth=case.layers, dim_head=WIDTH // HEADS, heads=HEADS)
    model.eval()
    with torch.no_grad():
        memory = model(some_ids(case.batch, 128), return_new_memories=True).past_memories
    options = {"past_memories": memory, "return_new_memories": True}
    if case.kind == "train":
        return trained(model, lambda ids, targets: cross_entropy(model(ids, **options).logits, targets), case)
    if case.kind == "decode":
        before = some_ids(case.batch, 128)
        with torch.inference_mode():
            kept = model(before, past_memories=memory).cached_kvs
        return without_gradient(
            model, lambda ids: model(torch.cat([before, ids], 1), past_memories=memory, cached_kv=kept), case
        )
    return without_gradient(model, lambda ids: model(ids, **options), case)


def without_memory(package: str, name: str) -> Callable[[Case], Step]:
    """Linear attention of performer-pytorch and linear-attention-transformer, which have no state to go on from."""

    def make(case: Case) -> Step:
        import importlib

        if case.kind == "decode" or (case.kind == "read" and case.memory):
            raise NotImplementedError("cannot go on from a state")
        make_model = getattr(importlib.import_module(package), name)
        model = make_model(
            num_tokens=VOCAB,
            dim=WIDTH,
            depth=case.layers,
            heads=HEADS,
            dim_head=WIDTH // HEADS,
            max_seq_len=case.tokens,
            causal=True,
        )
        if case.kind == "train":
            return trained(model, lambda ids, targets: cross_entropy(model(ids), targets), case)
        return without_gradient(model, model, case)

    return make


BUILDERS: dict[str, Callable[[Case], Step]] = {
    "llama": llama,
    "llama_static": lambda case: llama(case, static=True),
    "llama_static+graph": lambda case: llama(case, static=True, compiled=True),
    "attention": attention(biased=False),
    "attention_xl": attention(biased=True),
    "transfo_xl": transfo_xl,
    "x_rotary": x_transformers(rotary_pos_emb=True, attn_flash=True),
    "x_t5": x_transformers(rel_pos_bias=True),
    "x_alibi": x_transformers(alibi_pos_bias=True),
    "compressive_transformer": compressive_transformer,
    "infini_transformer": infini_transformer,
    "performer": without_memory("performer_pytorch", "PerformerLM"),
    "linear_transformer": without_memory("linear_attention_transformer", "LinearAttentionTransformerLM"),
}
