"""Fifty random combinations of all options from a fixed seed: however rows are fed, each has the numbers of the dense pass."""

import random

import pytest
import torch
from helpers import biggest, feed, ids_for, random_splits, tiny_model
from huggingface_hub.errors import StrictDataclassError
from reference import dense_pass

from modeling_xl.memories import MEMORY_MECHANISMS
from modeling_xl.positions import POSITION_SCHEMES

COUNT = 50
OPTIONS = {
    "position_type": list(POSITION_SCHEMES),
    "memory_type": [*MEMORY_MECHANISMS] * 2 + ["mixture"] * 2,
    "num_key_value_heads": [1, 2, 4],
    "head_dim": [None, 6, 10],
    "norm_type": ["rmsnorm", "layernorm"],
    "norm_position": ["pre", "pre", "post"],
    "final_norm": [True, False],
    "use_parallel_residual": [False, False, True],
    "norm_residual": [False, False, True],
    "qk_norm": [False, True],
    "clip_qkv": [None, 0.8],
    "gated_mlp": [True, False],
    "attention_bias": [True, False],
    "embedding_size": [None, 10],
    "embedding_scale": [1.0, 3.0],
    "embedding_norm": [True, False],
    "tie_word_embeddings": [True, False],
    "clamp_len": [None, 1, 4, 9],
    "untie_r": [True, False],
    "alibi_slopes": [None, [0.0, 0.5, 2.0, 0.1]],
    "rope_parameters": [None, {"rope_type": "default", "partial_rotary_factor": 0.5}],
    "segment_len": [1, 3, 5, 8],
    "mem_len": [0, 3, 8, 11],
    "attention_window": [None, None, 2, 6, 12],
    "num_sink_tokens": [0, 0, 1, 4],
    "initial_memory": ["empty", "empty", "zeros"],
    "bptt_segments": [0, 1, 3],
    "compressed_mem_len": [1, 4, 6],
    "compression_rate": [1, 2, 3],
    "compression_fn": ["mean", "max", "conv", "dilated", "most_used"],
    "compression_dilation": [1, 2, 3],
    "compression_loss": [None, None, "attention", "autoencode"],
    "feature_map": ["elu", "relu", "favor"],
    "relative_attention_max_distance": [9, 20, 60],
}


def combinations():
    """Draws until so many are accepted; what the config refuses is tested where it is refused."""
    drawn, found = random.Random(20), []
    while len(found) < COUNT:
        changes = {name: drawn.choice(values) for name, values in OPTIONS.items()}
        if changes["memory_type"] == "mixture":
            changes["memory_type"] = [drawn.choice([*MEMORY_MECHANISMS]) for _ in range(3)]
        if changes["clamp_len"] is None:
            del changes["clamp_len"]
        try:
            tiny_model(**changes)
        except (ValueError, StrictDataclassError):
            continue
        found.append(changes)
    return found


COMBINATIONS = combinations()


def test_every_member_is_drawn():
    for name, members in (("position_type", POSITION_SCHEMES), ("memory_type", MEMORY_MECHANISMS)):
        assert {changes[name] for changes in COMBINATIONS if isinstance(changes[name], str)} == set(members)
    assert sum(isinstance(changes["memory_type"], list) for changes in COMBINATIONS) > 5


@pytest.mark.parametrize("number", range(COUNT))
@pytest.mark.parametrize("gradient", [False, True], ids=["no_grad", "gradient"])
def test_combination(number, gradient):
    changes = COMBINATIONS[number]
    model = tiny_model(**changes)
    generator = torch.Generator().manual_seed(number)
    columns, lengths = 38, [38, 21]
    ids = ids_for(model, 2, columns)
    mask = torch.zeros(2, columns, dtype=torch.long)
    for row, length in enumerate(lengths):
        mask[row, torch.randperm(columns, generator=generator)[:length]] = 1
    # A document begins at one token in nine; ids at pads mean nothing.
    documents = (torch.rand(2, columns, generator=generator) < 1 / 9).long().cumsum(1)
    with torch.set_grad_enabled(gradient):
        expected = [
            dense_pass(model, ids[row, real], documents=documents[row, real])[0] for row, real in enumerate(mask.bool())
        ]
        for parts in ([columns], random_splits(columns, 9, generator), [1] * columns):
            logits, cache = feed(model, ids, parts, attention_mask=mask, document_ids=documents)
            assert cache.lengths.tolist() == lengths
            for row, real in enumerate(mask.bool()):
                assert biggest(logits[row, real], expected[row]) < 1e-9, (parts, row, changes)
