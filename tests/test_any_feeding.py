"""The central property: however a text is fed, the numbers are those of the dense pass under the staircase mask."""

import pytest
import torch
from helpers import accepts, biggest, feed, ids_for, memory_cases, random_splits, tiny_model
from reference import dense_pass

from modeling_xl.memories import MEMORY_MECHANISMS
from modeling_xl.positions import POSITION_SCHEMES

# float64: sums in another order, over at most 3 layers. float32: the same in 2^-24, logits of size ~10.
TOLERANCE = {torch.float64: 1e-9, torch.float32: 1e-4}
LENGTH = 37
# Settings that differ in what padding, batching and documents touch.
SOME = ("plain", "window", "sinks", "zeros", "remainder", "dilated", "most_used", "favor")


def check_feeding(model, form: str, seed: int, dtype):
    ids = ids_for(model, 1, LENGTH)
    with torch.set_grad_enabled(form == "hidden"):
        reference, _ = dense_pass(model, ids[0])
        whole = model(ids).logits
        assert biggest(whole[0], reference) < TOLERANCE[dtype]
        generator = torch.Generator().manual_seed(seed)
        ways = [[1] * LENGTH, *(random_splits(LENGTH, longest, generator) for longest in (9, 30))]
        for parts in ways:
            logits, cache = feed(model, ids, parts)
            assert biggest(logits[0], reference) < TOLERANCE[dtype], parts
            assert cache.lengths.tolist() == [LENGTH] and cache.get_seq_length() == LENGTH


@pytest.mark.parametrize("form", ["key_value", "hidden"])
@pytest.mark.parametrize("position", POSITION_SCHEMES)
@pytest.mark.parametrize(("memory", "setting"), memory_cases())
def test_any_split_equals_dense_pass(memory, setting, position, form):
    model = tiny_model(position_type=position, memory_type=memory, **setting)
    check_feeding(model, form, seed=len(position), dtype=torch.float64)


@pytest.mark.parametrize("form", ["key_value", "hidden"])
@pytest.mark.parametrize("position", POSITION_SCHEMES)
@pytest.mark.parametrize("memory", MEMORY_MECHANISMS)
def test_any_split_in_float32(memory, position, form):
    model = tiny_model(dtype=torch.float32, position_type=position, memory_type=memory)
    check_feeding(model, form, seed=5, dtype=torch.float32)


@pytest.mark.parametrize("attn_implementation", ["eager", "sdpa"])
@pytest.mark.parametrize("position", POSITION_SCHEMES)
@pytest.mark.parametrize(
    "block",
    [
        {"norm_position": "post", "norm_type": "layernorm", "final_norm": False, "gated_mlp": False, "hidden_act": "relu"},
        {"use_parallel_residual": True, "attention_bias": True, "mlp_bias": True, "embedding_norm": True},
        {"head_dim": 10, "num_key_value_heads": 1, "embedding_scale": 3.0, "clamp_len": 4, "untie_r": False},
        {"num_attention_heads": 3, "num_key_value_heads": 3, "embedding_size": 10, "tie_word_embeddings": False},
        {"qk_norm": True, "clip_qkv": 0.7, "norm_residual": True, "norm_type": "layernorm"},
    ],
    ids=["post", "parallel", "head_dim_clamp_shared", "projected", "norms_and_clip"],
)
def test_block_options(block, position, attn_implementation):
    model = tiny_model(position_type=position, attn_implementation=attn_implementation, **block)
    for form in ("key_value", "hidden"):
        check_feeding(model, form, seed=2, dtype=torch.float64)


@pytest.mark.parametrize("window", [None, 6])
@pytest.mark.parametrize("start", ["empty", "zeros"])
def test_every_call_is_a_segment(start, window):
    """segment_len=None: a call closes its segment, so the numbers depend on the calls, as the dense pass says."""
    model = tiny_model(segment_len=None, initial_memory=start, attention_window=window)
    ids = ids_for(model, 1, 31)
    for form in (True, False):
        with torch.set_grad_enabled(form):
            for parts in ([31], [9, 9, 9, 4], [1] * 31, [20, 1, 1, 2, 7]):
                calls = torch.tensor([0, *parts]).cumsum(0)[:-1].tolist()
                reference, _ = dense_pass(model, ids[0], calls=calls)
                assert biggest(feed(model, ids, parts)[0][0], reference) < 1e-9


@pytest.mark.parametrize("form", ["key_value", "hidden"])
@pytest.mark.parametrize("position", POSITION_SCHEMES)
@pytest.mark.parametrize(("memory", "setting"), memory_cases(*SOME))
def test_padding_and_batching_change_nothing(memory, setting, position, form):
    """Rows of different lengths, padded anywhere, fed in random pieces, out of phase: each as the row alone."""
    model = tiny_model(position_type=position, memory_type=memory, **setting)
    generator = torch.Generator().manual_seed(7)
    columns, lengths = 44, [29, 44, 3, 17]
    ids = ids_for(model, len(lengths), columns)
    mask = torch.zeros(len(lengths), columns, dtype=torch.long)
    with torch.set_grad_enabled(form == "hidden"):
        for row, length in enumerate(lengths):
            mask[row, torch.randperm(columns, generator=generator)[:length]] = 1
        ways = {
            "anywhere": mask,
            "left": mask.sort(1).values,
            "right": mask.sort(1, descending=True).values,
        }
        for name, way in ways.items():
            for parts in ([columns], random_splits(columns, 13, generator)):
                logits, cache = feed(model, ids, parts, attention_mask=way)
                assert cache.lengths.tolist() == lengths
                for row in range(len(lengths)):
                    real = way[row].bool()
                    reference, _ = dense_pass(model, ids[row, real])
                    assert biggest(logits[row, real], reference) < 1e-9, (name, parts, row)


@pytest.mark.parametrize("position", POSITION_SCHEMES)
@pytest.mark.parametrize(("memory", "setting"), memory_cases(*SOME))
def test_documents_see_themselves_only(memory, setting, position):
    model = tiny_model(position_type=position, memory_type=memory, **setting)
    generator = torch.Generator().manual_seed(11)
    ids = ids_for(model, 2, 40)
    documents = torch.tensor([[0] * 6 + [1] * 19 + [5] * 2 + [1] * 13, [3] * 11 + [4] + [3] * 28])
    restarts = torch.stack(
        [torch.cat([torch.arange(int(n)) for n in row.unique_consecutive(return_counts=True)[1]]) for row in documents]
    )
    for form in (True, False):
        with torch.set_grad_enabled(form):
            for parts in ([40], random_splits(40, 8, generator)):
                by_id, _ = feed(model, ids, parts, document_ids=documents)
                by_position, _ = feed(model, ids, parts, position_ids=restarts)
                for row in range(2):
                    reference, _ = dense_pass(model, ids[row], documents=documents[row])
                    assert biggest(by_id[row], reference) < 1e-9
                    assert biggest(by_position[row], reference) < 1e-9


@pytest.mark.parametrize("position", POSITION_SCHEMES)
@pytest.mark.parametrize("memory", ["none", "linear", ["linear", "none", "linear"]], ids=str)
def test_pieces_of_a_call_without_segments(memory, position, monkeypatch):
    """Without gradient a long call is worked on piece by piece; pads and documents cross the joints."""
    monkeypatch.setattr("modeling_xl.modeling_xl.LONGEST_PIECE", 7)
    model = tiny_model(position_type=position, memory_type=memory)
    ids = ids_for(model, 2, 40)
    mask = torch.ones_like(ids)
    mask[0, 12:24] = 0
    documents = torch.zeros_like(ids)
    documents[1, 14:] = 1  # at a joint
    documents[0, 30:] = 1
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, document_ids=documents).logits
        for row, real in enumerate(mask.bool()):
            reference, _ = dense_pass(model, ids[row, real], documents=documents[row, real])
            assert biggest(logits[row, real], reference) < 1e-9


def test_short_document_equals_itself_alone():
    """A document of at most M + 1 tokens equals itself alone wherever it stands in the grid."""
    model = tiny_model()
    length = model.config.mem_len + 1
    document = ids_for(model, 1, length)
    alone = model(document).logits
    for before in range(1, 12):
        ids = torch.cat([ids_for(model, 1, before, seed=before), document], 1)
        names = torch.tensor([[1] * before + [2] * length])
        assert biggest(model(ids, document_ids=names).logits[:, before:], alone) < 1e-9


@pytest.mark.parametrize("position", POSITION_SCHEMES)
@pytest.mark.parametrize("memory", MEMORY_MECHANISMS)
def test_positions_that_skip(memory, position):
    """position_ids that jump ahead inside a document are what enters the scheme; an offset alone changes nothing."""
    model = tiny_model(position_type=position, memory_type=memory)
    generator = torch.Generator().manual_seed(13)
    ids = ids_for(model, 2, 33)
    steps = torch.ones(2, 33, dtype=torch.long)
    steps[0, 9], steps[1, 4], steps[1, 25] = 6, 3, 1000
    positions = steps.cumsum(1) + torch.tensor([[-1], [40]])
    for form in (True, False):
        with torch.set_grad_enabled(form):
            for parts in ([33], random_splits(33, 7, generator)):
                logits, _ = feed(model, ids, parts, position_ids=positions)
                for row in range(2):
                    reference, _ = dense_pass(model, ids[row], positions=positions[row])
                    assert biggest(logits[row], reference) < 1e-9
            shifted, _ = feed(model, ids, [10, 23], position_ids=torch.arange(33)[None] + 500)
            assert biggest(shifted, model(ids).logits) < 1e-9


def test_attentions_of_slots_stand_at_their_newest_token():
    """A call over several segments has a column for each token; a slot made meanwhile counts at the newest it stands for."""
    model = tiny_model(memory_type="compressive", attn_implementation="eager")  # L 5, M 7, c 2, 4 slots
    ids = ids_for(model, 2, 30)
    cache = None
    with torch.no_grad():
        whole = model(ids, output_attentions=True).attentions
        for column in range(30):
            output = model(ids[:, column : column + 1], cache=cache, output_attentions=True)
            cache = output.cache
            gone = max(0, column // 5 * 5 - 7) // 2 * 2
            slots = range(max(0, gone // 2 - 4), gone // 2)
            places = [*(2 * slot + 1 for slot in slots), *range(gone, column + 1)]
            for weights, step in zip(whole, output.attentions, strict=True):
                row = weights[:, :, column]
                assert biggest(row[..., places], step[:, :, 0]) < 1e-9
                rest = [place for place in range(30) if place not in places]
                assert not row[..., rest].any()


@pytest.mark.parametrize("memory", MEMORY_MECHANISMS)
def test_hidden_states_and_attentions(memory):
    """hidden_states are the layer inputs; attentions cover the rows attended at the call's start and the call."""
    sinks = 2 if accepts(memory, num_sink_tokens=2) else 0
    model = tiny_model(memory_type=memory, attn_implementation="eager", num_sink_tokens=sinks)
    ids = ids_for(model, 2, 30)
    mask = torch.ones(2, 30, dtype=torch.long)
    mask[1, 12:19] = 0
    with torch.no_grad():
        first = model(ids[:, :11], attention_mask=mask[:, :11])
        output = model(
            ids[:, 11:],
            attention_mask=mask,
            cache=first.cache,
            output_hidden_states=True,
            output_attentions=True,
        )
    assert len(output.hidden_states) == model.config.num_hidden_layers + 1
    for row in range(2):
        real = mask[row].bool()
        _, inputs = dense_pass(model, ids[row, real])
        for layer, expected in enumerate(inputs):
            assert biggest(output.hidden_states[layer][row, real[11:]], expected[11:]) < 1e-9
    if memory == "linear":  # it has no weights
        assert output.attentions == (None,) * model.config.num_hidden_layers
        return
    before = {"none": 11, "recurrence": 8, "compressive": 10}[memory]  # 2 of 11 tokens in a slot
    for weights in output.attentions:
        assert weights.shape == (2, 4, 19, sinks + before + 19)
        sums = weights.sum(-1)
        assert biggest(sums, mask[:, None, 11:].expand_as(sums).to(sums.dtype)) < 1e-12
        future = torch.triu(torch.ones(19, 19, dtype=torch.bool), 1)
        assert not weights[..., sinks + before :][..., future].any()
        assert not weights[1, :, :, sinks + before :][..., mask[1, 11:] == 0].any()
