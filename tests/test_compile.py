"""`torch.compile`: the layers are one graph, which serves step after step, with the numbers of the model as it is.

The compiler's front end alone is run (`backend="eager"`): what is compiled, and how often, does not depend on what comes after.
"""

import pytest
import torch
from helpers import biggest, tiny_model
from torch._dynamo.utils import counters

from modeling_xl import XLCache

pytestmark = pytest.mark.filterwarnings("ignore")  # the compiler looks at every attribute of a tensor, and torch warns of some
SEGMENT, MEMORY = 8, 16
COMBINATIONS = [
    ("xl", "recurrence"),
    ("rope", "recurrence"),
    ("alibi", "none"),
    ("t5", "compressive"),
    ("xl", "linear"),
    ("alibi", "linear"),
]


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def model_of(position: str, memory: str, **fields):
    if position == "xl" and memory == "linear":
        fields["clamp_len"] = 6
    sizes = {"segment_len": SEGMENT, "mem_len": MEMORY, "compressed_mem_len": 5, "compression_rate": 3}
    return tiny_model(position_type=position, memory_type=memory, **{**sizes, **fields})


def graphs() -> int:
    return counters["stats"]["unique_graphs"]


def breaks_inside() -> list[str]:
    """Why graphs were broken, but for the seam between what decides on integers and the layers."""
    return [reason for reason in counters["graph_break"] if "XLModel.forward" not in reason]


@pytest.mark.parametrize(("position", "memory"), COMBINATIONS)
def test_decoding(position, memory):
    model = model_of(position, memory)
    compiled = torch.compile(model, backend="eager")
    ids = torch.randint(0, model.config.vocab_size, (2, 70), generator=torch.Generator().manual_seed(0))
    caches, seen = [XLCache(model.config) for _ in range(2)], []
    with torch.no_grad():
        for cache in caches:
            model(ids[:, :37], cache=cache)
        for at in range(37, 70):
            token = ids[:, at : at + 1]
            found, expected = compiled(token, cache=caches[0]), model(token, cache=caches[1])
            assert biggest(found.logits, expected.logits) < 1e-12
            seen.append(graphs())
    assert breaks_inside() == []
    # Of the layers: the first step; with sizes that vary; where a buffer is full, or a segment closes, once each way.
    assert seen[-1] == seen[24] and seen[-1] - seen[0] <= 6


@pytest.mark.parametrize(
    ("position", "memory", "dropout"),
    [(*pair, 0.0) for pair in COMBINATIONS if pair[1] != "none"] + [("xl", "recurrence", 0.1), ("rope", "compressive", 0.1)],
)
def test_training(position, memory, dropout):
    options = {} if memory == "linear" else {"attention_dropout": dropout}  # linear attention has no weights to drop
    model = model_of(position, memory, hidden_dropout=dropout, **options).train()
    compiled = torch.compile(model, backend="eager")
    ids = torch.randint(0, model.config.vocab_size, (2, 81), generator=torch.Generator().manual_seed(0))
    caches, seen = [None, None], []
    for start in range(0, 80, SEGMENT):
        inputs = {"input_ids": ids[:, start : start + SEGMENT], "shift_labels": ids[:, start + 1 : start + SEGMENT + 1]}
        inputs["labels"] = inputs["shift_labels"]
        gradients = []
        for number, called in enumerate((compiled, model)):
            torch.manual_seed(start)
            output = called(**inputs, cache=caches[number])
            caches[number] = output.cache
            gradients.append(torch.autograd.grad(output.loss, list(model.parameters()), allow_unused=True))
        for found, expected in zip(*gradients, strict=True):
            assert (found is None) == (expected is None) and (found is None or biggest(found, expected) < 1e-12)
        seen.append(graphs())
    assert breaks_inside() == []
    assert seen[-1] == seen[4], "five segments fill the memory, and then every step is like the last"
