"""Training through memory: what gets gradient, what does not, and that the fast backward passes are the slow ones."""

import math

import pytest
import torch
from helpers import biggest, ids_for, tiny_config, tiny_model
from transformers.utils import logging

from modeling_xl import XLCache, XLForCausalLM
from modeling_xl.memories import MEMORY_MECHANISMS
from modeling_xl.positions import POSITION_SCHEMES


def gradients(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True)


def worst(found, expected) -> float:
    pairs = [(a, b) for a, b in zip(found, expected, strict=True) if a is not None or b is not None]
    return max(biggest(a, b) / max(1.0, float(b.abs().max())) for a, b in pairs)


@pytest.mark.parametrize("position", POSITION_SCHEMES)
@pytest.mark.parametrize("memory", MEMORY_MECHANISMS)
@pytest.mark.parametrize("setting", [{}, {"attention_window": 4}, {"num_sink_tokens": 2}], ids=["plain", "window", "sinks"])
def test_sdpa_equals_eager(memory, position, setting):
    """Logits and every gradient, with padding and documents, over several segments."""
    results = []
    for implementation in ("eager", "sdpa"):
        model = tiny_model(attn_implementation=implementation, position_type=position, memory_type=memory, **setting)
        ids = ids_for(model, 3, 33)
        mask = torch.ones_like(ids)
        mask[1, 20:] = 0
        mask[2, :5] = 0
        documents = torch.zeros_like(ids)
        documents[0, 14:] = 1
        output = model(ids, attention_mask=mask, document_ids=documents, labels=ids)
        results.append((output.logits, gradients(model, output.loss)))
    assert biggest(results[0][0], results[1][0]) < 1e-9
    assert worst(results[1][1], results[0][1]) < 1e-9


@pytest.mark.parametrize("position", POSITION_SCHEMES)
def test_every_parameter_learns_in_the_first_segment(position):
    """Distributed training needs a gradient for every parameter, also when there is no memory yet."""
    for shared in ({}, {"untie_r": False}, {"cutoffs": (20, 60), "div_val": 2, "tie_word_embeddings": False}):
        model = tiny_model(position_type=position, **shared)
        ids = ids_for(model, 2, 5).clamp(max=15)
        found = gradients(model, model(ids, labels=ids).loss)
        assert all(g is not None for g in found)


def loss_of(logits, ids, columns):
    return torch.nn.functional.cross_entropy(logits[0, columns], ids[0, columns])


@pytest.mark.parametrize("setting", [{}, {"num_sink_tokens": 2}, {"initial_memory": "zeros"}], ids=["plain", "sinks", "zeros"])
@pytest.mark.parametrize("block", [0, 1, 2])
def test_bptt_reaches_exactly_its_block(block, setting):
    """The loss of a segment reaches the embeddings of the segments before it in its block, and nothing earlier."""
    model = tiny_model(bptt_segments=block, **setting)
    length, segments = model.config.segment_len, 6
    ids = ids_for(model, 1, length * segments)
    embedded = model.model.embed(ids).detach().requires_grad_()
    logits = model(inputs_embeds=embedded).logits
    for segment in range(segments):
        columns = slice(length * segment, length * (segment + 1))
        (grad,) = torch.autograd.grad(loss_of(logits, ids, columns), embedded, retain_graph=True)
        reached = grad.abs().sum(-1).view(segments, length).sum(-1) > 0
        first = segment - segment % (block + 1)
        expected = torch.tensor([first <= s <= segment for s in range(segments)])
        assert torch.equal(reached, expected), segment


def test_bptt_of_rows_out_of_phase():
    """Rows whose segments end in different columns get the gradient they get alone."""
    model = tiny_model(bptt_segments=1)
    ids = ids_for(model, 3, 40)
    starts = [0, 3, 9]
    with torch.no_grad():
        caches = [
            model(ids_for(model, 1, n, seed=n), cache=XLCache(model.config, form="hidden")).cache if n else None for n in starts
        ]
    alone = [gradients(model, model(ids[row : row + 1], cache=caches[row], labels=ids[row : row + 1]).loss) for row in range(3)]
    with torch.no_grad():
        fed = [XLCache(model.config, form="hidden") for _ in starts]
        for cache, n in zip(fed, starts, strict=True):
            model(ids_for(model, 1, n or 5, seed=n), cache=cache)
        joined = XLCache.cat(fed)
        joined.reset_rows(torch.tensor([True, False, False]))
    together = gradients(model, model(ids, cache=joined, labels=ids).loss * 3)
    assert worst(together, [sum(parts) for parts in zip(*alone, strict=True)]) < 1e-9


@pytest.mark.parametrize("position", POSITION_SCHEMES)
def test_keys_and_values_learn_through_memory(position):
    """W_K and W_V get gradient from rows of memory although these are detached; nothing before the memory gets any."""
    model = tiny_model(position_type=position)
    length = model.config.segment_len
    ids = ids_for(model, 1, 3 * length)
    cache = model(ids[:, : 2 * length]).cache
    assert not any(t.requires_grad for state in cache.states for t in state.tensors())
    output = model(ids[:, 2 * length :], cache=cache)
    weight = model.model.layers[0].self_attn.qkv_proj.weight
    (grad,) = torch.autograd.grad(output.logits[0, 0].sum(), weight)
    # The same with memory's projection held constant: the first query's key gradient then comes from itself alone.
    attention = model.model.layers[0].self_attn
    held = attention.project_past
    attention.project_past = lambda hidden: [t.detach() for t in held(hidden)]
    cache = model(ids[:, : 2 * length]).cache
    output = model(ids[:, 2 * length :], cache=cache)
    (without,) = torch.autograd.grad(output.logits[0, 0].sum(), weight)
    first_key = model.config.num_attention_heads * model.config.head_dim
    assert biggest(grad[:first_key], without[:first_key]) < 1e-9
    assert biggest(grad[first_key:], without[first_key:]) > 1e-3


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("memory", MEMORY_MECHANISMS)
def test_checkpointing_keeps_memory(memory, use_reentrant):
    """The same loss, gradients and cache with activation checkpointing as without, with and without a cache before."""
    found = []
    for checkpointed in (False, True):
        model = tiny_model(memory_type=memory, bptt_segments=0 if use_reentrant else 1).train()
        if checkpointed:
            model.activation_checkpointing_enable({"use_reentrant": use_reentrant})
        ids = ids_for(model, 2, 38)
        cache = model(ids[:, :15]).cache
        output = model(ids[:, 15:], cache=cache, labels=ids[:, 15:])
        found.append((output.loss, gradients_or_backward(model, output.loss), output.cache))
    assert biggest(found[0][0], found[1][0]) < 1e-12
    assert worst(found[1][1], found[0][1]) < 1e-12
    assert torch.equal(found[0][2].lengths, found[1][2].lengths)
    for plain, checkpointed in zip(found[0][2].states, found[1][2].states, strict=True):
        for name in plain.rows:
            assert torch.equal(plain.last(name, plain.size), checkpointed.last(name, checkpointed.size))


def test_reentrant_checkpointing_is_refused_where_it_would_lose_gradient():
    """It gives none to what comes in beside the hidden states, so not to a memory that is part of the graph."""
    model = tiny_model(bptt_segments=1).train()
    model.activation_checkpointing_enable({"use_reentrant": True})
    with pytest.raises(ValueError, match="use_reentrant"):
        model(ids_for(model, 2, 20))


def gradients_or_backward(model, loss):
    """Reentrant checkpointing works with `backward` only."""
    loss.backward()
    return [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("memory", MEMORY_MECHANISMS)
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"segment_len": 4, "mem_len": 4},
        {"segment_len": 4, "mem_len": 8},
        {"segment_len": 6, "mem_len": 2},
        {"mem_len": 0},
        {"attention_window": 3},
        {"attention_window": 10},
        {"num_hidden_layers": 1},
    ],
    ids=str,
)
def test_max_context_is_exact(memory, changes):
    """A token at that distance changes a logit for some place of the query in its segment; one beyond never does."""
    config = tiny_config(memory_type=memory, **changes)
    if math.isinf(config.max_context):
        assert memory == "none" and "attention_window" not in changes
        return
    layers, length, memory_len = config.num_hidden_layers, config.segment_len, config.mem_len
    window = changes.get("attention_window")
    if window is not None and (window - 1 <= memory_len or memory == "none"):
        assert config.max_context == layers * (window - 1)
    elif window is None:
        assert config.max_context == (layers - 1) * length * -(-memory_len // length) + memory_len + length - 1
    model = tiny_model(memory_type=memory, **changes)
    reach = config.max_context
    total = reach + 3 * length
    embedded = model.model.embed(ids_for(model, 1, total)).detach().requires_grad_()
    config.bptt_segments = model.config.bptt_segments = total  # so that gradient shows what a logit depends on
    logits = model(inputs_embeds=embedded).logits
    farthest = 0
    for query in range(total - length, total):
        (grad,) = torch.autograd.grad(logits[0, query].square().sum(), embedded, retain_graph=True)
        reached = grad[0].abs().sum(-1).nonzero()[:, 0]
        farthest = max(farthest, query - int(reached.min()))
    assert farthest == reach


def test_max_context_of_unbounded_memories():
    assert tiny_config(segment_len=None).max_context == math.inf
    assert tiny_config(segment_len=None, attention_window=4).max_context == 3 * 3
    assert tiny_config(num_sink_tokens=1).max_context == math.inf


@pytest.mark.parametrize("position", POSITION_SCHEMES)
@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_attention_dropout(position, implementation):
    """Unbiased, and the backward pass drops what the forward pass dropped: the directional derivative agrees."""
    changes = {"attention_dropout": 0.4, "segment_len": 150}  # one segment: memory is constant to the gradient
    model = tiny_model(position_type=position, attn_implementation=implementation, **changes).train()
    ids = ids_for(model, 2, 140)
    embedded = model.model.embed(ids).detach()
    direction = torch.randn(embedded.shape, generator=torch.Generator().manual_seed(1), dtype=embedded.dtype)

    def loss(step):
        torch.manual_seed(5)
        return model(inputs_embeds=embedded + step * direction).logits.square().mean()

    step = torch.zeros((), dtype=torch.float64, requires_grad=True)
    (slope,) = torch.autograd.grad(loss(step), step)
    small = 1e-6
    measured = (loss(small).detach() - loss(-small).detach()) / (2 * small)
    assert abs(float(slope) - float(measured)) < 1e-5 * max(1.0, abs(float(slope)))
    torch.manual_seed(1)
    first, second = model(ids).logits, model(ids).logits
    assert biggest(first, second) > 1e-3
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


def test_training_call_inside_a_segment_warns_once(caplog):
    logging.set_verbosity_warning()
    logging.enable_propagation()
    model = tiny_model().train()
    logging.get_logger("transformers").warning_once.cache_clear() if hasattr(
        logging.get_logger().warning_once, "cache_clear"
    ) else None
    ids = ids_for(model, 1, 8)
    with caplog.at_level("WARNING"):
        cache = model(ids[:, :5]).cache
        cache = model(ids[:, :7], cache=cache).cache
        model(ids[:, :4], cache=cache)
    assert sum("inside a segment" in record.message for record in caplog.records) == 1


def test_adaptive_training_computes_what_labels_need():
    """Logits are None in training with labels; the loss is that of the log-probabilities."""
    model = XLForCausalLM(tiny_config(cutoffs=[20, 60], div_val=2, lm_head_bias=True)).double()
    ids = ids_for(model, 2, 11)
    model.train()
    output = model(ids, labels=ids)
    assert output.logits is None
    model.eval()
    scored = model(ids, labels=ids)
    expected = torch.nn.functional.nll_loss(scored.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    assert biggest(scored.logits.exp().sum(-1), torch.ones(2, 11).double()) < 1e-12
    assert biggest(scored.loss, expected) < 1e-12 and biggest(output.loss, expected) < 1e-12
