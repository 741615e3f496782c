"""What the tests of public bug reports share: the kinds of model they run over, and two measures."""

import pytest
import torch
from helpers import accepts, ids_for, randomise, tiny_config, tiny_model

from modeling_xl import XLForCausalLM
from modeling_xl.memories import MEMORY_MECHANISMS
from modeling_xl.positions import POSITION_SCHEMES

SCHEMES = list(POSITION_SCHEMES)
MEMORIES = list(MEMORY_MECHANISMS)
PAIRS = [(scheme, memory) for scheme in SCHEMES for memory in MEMORIES]
# Heads of every layout: tied or not, projected, adaptive over one table and over tables of their own.
HEADS = {
    "dense": {},
    "untied": {"tie_word_embeddings": False},
    "biased": {"lm_head_bias": True},
    "projected": {"embedding_size": 10},
    "adaptive_one_table": {"cutoffs": (20, 51)},
    "adaptive": {"cutoffs": (20, 51), "div_val": 2},
    "adaptive_untied": {"cutoffs": (20, 51), "div_val": 2, "tie_word_embeddings": False, "lm_head_bias": True},
}
# float64, sums in another order over two layers.
EXACT = 1e-9
# float32: logits here are of size 10 to 30, so this is some roundings, and sums are in another order.
CLOSE = 1e-4


def memory_and(*changes, ids=None):
    """Parametrizes (memory, changes) over all mechanisms, without those that refuse the changes."""
    names = ids or [str(change) for change in changes]
    cases = [
        pytest.param(memory, change, id=f"{memory}-{name}")
        for memory in MEMORIES
        for name, change in zip(names, changes, strict=True)
        if accepts(memory, **change)
    ]
    return pytest.mark.parametrize(("memory", "changes"), cases)


# Mechanisms with softmax weights to look at, and those of them whose weights stand one for each token.
WEIGHTED = [memory for memory in MEMORIES if MEMORY_MECHANISMS[memory].has_weights]
TOKENWISE = [memory for memory in WEIGHTED if memory != "compressive"]
every_pair = pytest.mark.parametrize(("scheme", "memory"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
every_scheme = pytest.mark.parametrize("scheme", SCHEMES)
every_memory = pytest.mark.parametrize("memory", MEMORIES)
every_head = pytest.mark.parametrize("head", HEADS)


def make(scheme="xl", memory="recurrence", **changes):
    return tiny_model(position_type=scheme, memory_type=memory, **{"num_hidden_layers": 2, **changes})


def make_other(model_class, dtype=torch.float64, **changes):
    """Like `make`, of another class than the language model."""
    torch.manual_seed(0)
    return randomise(model_class(tiny_config(**changes))).to(dtype).eval()


def off(a, b) -> float:
    """Largest difference; not a number where either is."""
    assert a.shape == b.shape, (a.shape, b.shape)
    return float((a.detach().double() - b.detach().double()).abs().max())


def grads_of(model) -> dict[str, torch.Tensor]:
    """Gradients that there are: outside of training a compression has none."""
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def worst(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    assert a.keys() == b.keys()
    return max(off(a[name], b[name]) for name in a)


def alone(model, ids, lengths) -> list[torch.Tensor]:
    """Logits of the first `lengths[row]` tokens of each row, the row by itself."""
    return [model(ids[row : row + 1, :length]).logits[0] for row, length in enumerate(lengths)]


def padded(ids, lengths, side: str):
    """The first tokens of each row with pads (random ids) on a side, and the mask: (B, T) both."""
    columns = int(max(lengths)) + 3
    mask = torch.zeros(len(lengths), columns, dtype=torch.long)
    for row, length in enumerate(lengths):
        if side == "left":
            mask[row, columns - length :] = 1
        elif side == "right":
            mask[row, :length] = 1
        else:  # inside: every other column at first
            order = [*range(0, columns, 2), *range(1, columns, 2)]
            mask[row, sorted(order[:length])] = 1
    filled = torch.randint(0, int(ids.max()), mask.shape, generator=torch.Generator().manual_seed(8))
    for row, length in enumerate(lengths):
        filled[row, mask[row].bool()] = ids[row, :length]
    return filled, mask


def greedy(model: XLForCausalLM, ids, count: int, **options) -> torch.Tensor:
    """The ids that `generate` adds, without sampling."""
    found = model.generate(ids, max_new_tokens=count, do_sample=False, **options)
    return found[:, ids.shape[1] :]


def greedy_by_hand(model: XLForCausalLM, ids, count: int) -> torch.Tensor:
    """The ids that the largest logit of a whole pass adds each time: no cache, no `generate`."""
    start = ids.shape[1]
    for _ in range(count):
        ids = torch.cat([ids, model(ids).logits[:, -1:].argmax(-1)], 1)
    return ids[:, start:]


__all__ = [
    "CLOSE",
    "EXACT",
    "HEADS",
    "MEMORIES",
    "PAIRS",
    "SCHEMES",
    "TOKENWISE",
    "WEIGHTED",
    "accepts",
    "alone",
    "every_head",
    "every_memory",
    "every_pair",
    "every_scheme",
    "grads_of",
    "greedy",
    "greedy_by_hand",
    "ids_for",
    "make",
    "make_other",
    "memory_and",
    "off",
    "padded",
    "worst",
]
