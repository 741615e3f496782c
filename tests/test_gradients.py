"""Training through memory: what gets gradient, what does not, and that the fast backward passes are the slow ones."""

import math

import pytest
import torch
from helpers import biggest, ids_for, memory_cases, tiny_config, tiny_model
from reference import dense_pass
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
@pytest.mark.parametrize(("memory", "setting"), memory_cases("plain", "window", "sinks"))
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
        for name in plain.fixed:
            assert biggest(plain.fixed[name], checkpointed.fixed[name]) < 1e-12
        for name in plain.rows:
            count = min(plain.size, checkpointed.size)  # without gradient more is left than is needed
            assert biggest(plain.last(name, count), checkpointed.last(name, count)) < 1e-12


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


@pytest.mark.parametrize("memory", ["none", "recurrence"])
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


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"compression_fn": "mean"},
        {"compression_fn": "max", "mem_len": 5, "compressed_mem_len": 2},
        {"compression_rate": 3, "segment_len": 6, "mem_len": 6, "compressed_mem_len": 2},
        {"compression_rate": 3, "segment_len": 7, "mem_len": 8, "compressed_mem_len": 3},
        {"compression_fn": "dilated", "compression_rate": 3, "segment_len": 9, "mem_len": 9, "compressed_mem_len": 4},
        {"num_hidden_layers": 1},
        {"memory_type": ["compressive", "recurrence"], "num_hidden_layers": 2},
    ],
    ids=str,
)
def test_max_context_of_compressive_memory_is_exact(changes):
    """No gradient reaches what a slot was made from, so tokens are changed one by one and logits compared."""
    trained = changes.get("compression_fn", "conv") in ("conv", "dilated")
    changes = {
        "memory_type": "compressive",
        "num_hidden_layers": 2,
        "compression_loss": "attention" if trained else None,
        **changes,
    }
    model = tiny_model(**changes)
    config, length = model.config, model.config.segment_len
    reach = config.max_context
    memory, rate = config.mem_len, config.compression_rate
    is_even = not (memory % length or memory % rate or length % rate)
    if is_even and isinstance(config.memory_type, str) and config.compression_fn != "dilated":
        span = memory + rate * config.compressed_mem_len
        assert reach == (config.num_hidden_layers - 1) * length * -(-span // length) + span + length - 1
    total = reach + 4 * length
    embedded = model.model.embed(ids_for(model, 1, total)).detach()
    changed = embedded.expand(total, -1, -1).clone()
    changed[torch.arange(total), torch.arange(total)] += 3 * torch.randn(total, embedded.shape[-1], dtype=torch.float64)
    with torch.no_grad():
        logits, other = model(inputs_embeds=embedded).logits, model(inputs_embeds=changed).logits
    differs = (logits - other).abs().amax(-1) > 1e-9  # row: the token changed; column: the query. Below: rounding
    apart = torch.arange(total)[None] - torch.arange(total)[:, None]
    assert int(apart[differs].max()) == reach


def test_linear_attention_reaches_everything():
    for position in POSITION_SCHEMES:
        model = tiny_model(position_type=position, memory_type="linear", num_hidden_layers=1, alibi_slopes=[0.1] * 4)
        assert model.config.max_context == math.inf
        ids = ids_for(model, 1, 200)
        other = ids.clone()
        other[0, 0] = (ids[0, 0] + 1) % 97
        assert (model(ids).logits[0, -1] != model(other).logits[0, -1]).all()


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


FUNCTIONS = pytest.mark.parametrize("function", ["conv", "dilated"])


@FUNCTIONS
@pytest.mark.parametrize("kind", ["attention", "autoencode"])
def test_auxiliary_loss_trains_the_compression_only(function, kind):
    """Its gradient reaches the compression and nothing else, and the loss of the text reaches everything else only."""
    model = tiny_model(memory_type="compressive", compression_fn=function, compression_loss=kind).train()
    ids = ids_for(model, 2, 31)
    output = model(ids, labels=ids)
    own = {name for name, _ in model.named_parameters() if "compression" in name}
    names = [name for name, _ in model.named_parameters()]
    assert len(own) == 3 * (3 if kind == "autoencode" else 2)
    by_aux = dict(zip(names, gradients_of(model, output.aux_loss), strict=True))
    by_text = dict(zip(names, gradients_of(model, output.loss - output.aux_loss), strict=True))
    for name in names:
        assert (by_aux[name] is not None and bool(by_aux[name].any())) == (name in own), name
        assert by_text[name] is None or bool(by_text[name].any()) == (name not in own), name
    before = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    output.loss.backward()
    optimizer.step()
    for name, parameter in model.named_parameters():
        assert parameter.requires_grad and not torch.equal(parameter, before[name])


def gradients_of(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, retain_graph=True)


def test_auxiliary_loss_is_a_mean():
    """Its size depends neither on the number of layers, nor of segments, nor of rows; pads and phases change nothing."""
    model = tiny_model(memory_type="compressive", num_hidden_layers=1).train()
    ids = ids_for(model, 3, 50)
    rows = [model(ids[row : row + 1, :n]).aux_loss.item() for row, n in enumerate((50, 23, 31))]
    evictions = [sum(1 for k in range(1, n // 5 + 1) if max(0, 5 * k - 7) // 2 > max(0, 5 * k - 12) // 2) for n in (50, 23, 31)]
    mask = (torch.arange(50)[None] < torch.tensor([[50], [23], [31]])).long()
    for way in (mask, mask.flip(1)):
        text = torch.stack([ids[row].roll(0 if way is mask else 50 - n) for row, n in enumerate((50, 23, 31))])
        together = model(text, attention_mask=way).aux_loss.item()
        expected = sum(loss * count for loss, count in zip(rows, evictions, strict=True)) / sum(evictions)
        assert abs(together - expected) < 1e-12
    deeper = tiny_model(memory_type=["compressive", "recurrence", "recurrence"]).train()
    assert 0.2 < deeper(ids).aux_loss.item() / model(ids).aux_loss.item() < 5


def test_auxiliary_loss_where_there_is_none():
    model = tiny_model(memory_type="compressive").train()
    ids = ids_for(model, 2, 9)
    output = model(ids[:, :4], labels=ids[:, :4])
    assert output.aux_loss.item() == 0 and all(g is not None for g in gradients_of(model, output.loss))
    model.eval()
    assert model(ids).aux_loss is None  # evaluation measures the text only
    assert tiny_model(memory_type="compressive", compression_loss=None).train()(ids).aux_loss is None
    assert tiny_model().train()(ids).aux_loss is None


def test_auxiliary_loss_is_weighed():
    """By the coefficient, and with num_items_in_batch by the call's part of the items, so that accumulated steps add up."""
    model = tiny_model(memory_type="compressive", compression_loss_coef=0.25).train()
    ids = ids_for(model, 2, 31)
    output = model(ids, labels=ids)
    plain = tiny_model(memory_type="compressive", compression_loss_coef=0).train()(ids, labels=ids)
    assert abs((output.loss - plain.loss - 0.25 * output.aux_loss).item()) < 1e-12
    part = model(ids, labels=ids, num_items_in_batch=240)
    assert abs((part.loss - output.loss * 60 / 240).item()) < 1e-12


@pytest.mark.parametrize("position", POSITION_SCHEMES)
@pytest.mark.parametrize("feature_map", ["elu", "relu", "favor"])
def test_linear_attention_has_the_gradient_of_all_pairs(position, feature_map, monkeypatch):
    """In blocks, recomputed or not, with padding and documents: the gradient of the dense pass of each row."""
    monkeypatch.setattr("modeling_xl.linear_xl.BLOCK", 8)
    model = tiny_model(position_type=position, memory_type="linear", feature_map=feature_map)
    ids = ids_for(model, 2, 37)
    mask = torch.ones_like(ids)
    mask[1, 9:20] = 0
    documents = torch.zeros_like(ids)
    documents[0, 14:] = 1
    logits = model(ids, attention_mask=mask, document_ids=documents).logits
    direction = torch.randn(logits.shape, generator=torch.Generator().manual_seed(1), dtype=logits.dtype)
    found = gradients(model, (logits * direction * mask[..., None]).sum())
    total = 0
    for row in range(2):
        real = mask[row].bool()
        dense, _ = dense_pass(model, ids[row, real], documents=documents[row, real])
        total = total + (dense * direction[row, real]).sum()
    assert worst(found, gradients(model, total)) < 1e-9
