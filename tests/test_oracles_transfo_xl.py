"""`XLForCausalLM` against Transformers' former Transformer-XL: nine checkpoints, converted, with golden values in exact
arithmetic.

Each is run as the old code runs it, a call a segment (`segment_len=None`), from both starts: `zeros`, mem_len rows of
zeros that are attended to (the old default), and `empty`.
"""

import functools
from dataclasses import dataclass

import pytest
import torch
from oracles import FORMER, LOG_PROBS, STATES, golden, load_converted, log_probs_of, oracle
from torch.testing import assert_close

from modeling_xl import XLCache

# Which attention runs: eager the plain form; sdpa without gradient the blocked, with gradient the trained form.
# Which memory: hidden states in a call with gradient or without, keys and values in one without.
FORMS = {"trained": (True, None), "hidden": (False, "hidden"), "key_value": (False, None)}

per_case = pytest.mark.parametrize("case", FORMER)
per_start = pytest.mark.parametrize("start", ["zeros", "empty"])
per_dtype = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])
per_form = pytest.mark.parametrize("form", FORMS)
per_implementation = pytest.mark.parametrize("implementation", ["eager", "sdpa"])


@dataclass
class Segment:
    """What a call gave, and the golden values of its segment, named without their prefix."""

    expected: dict
    labels: torch.Tensor
    log_probs: torch.Tensor
    hidden_states: list
    weights: torch.Tensor | None
    rows: list | None  # kept by each layer after the call, (B, 1, length, E), in hidden form
    loss: torch.Tensor


def run_segments(model, form, values):
    """Yields labels, output and cache of each segment, fed in one call after the other."""
    has_gradient, cache_form = FORMS[form]
    cache = XLCache(model.config, form=cache_form)
    wants_weights = model.config._attn_implementation == "eager"
    lengths = values["seg_lens"].tolist()
    for ids, labels in zip(values["input_ids"].split(lengths, 1), values["labels"].split(lengths, 1), strict=True):
        with torch.set_grad_enabled(has_gradient):
            output = model(ids, labels=labels, cache=cache, output_hidden_states=True, output_attentions=wants_weights)
        assert output.logits.requires_grad == has_gradient
        yield labels, output, cache


@functools.cache
def load(case, start, dtype, implementation):
    # Files say `zeros`, which is what the old code does.
    changes = {} if start == "zeros" else {"initial_memory": start}
    model = load_converted(oracle(case), dtype, implementation, **changes)
    assert model.config.initial_memory == start and model.dtype == dtype
    assert model.config._attn_implementation == implementation
    return model


@functools.cache
def run(case, start, dtype, form, implementation):
    """The model and its `Segment`s."""
    model, values = load(case, start, dtype, implementation), golden(case)
    segments = []
    for number, (labels, output, cache) in enumerate(run_segments(model, form, values)):
        prefix = f"{'empty.' if start == 'empty' else ''}seg{number}."
        expected = {name.removeprefix(prefix): v.to(dtype) for name, v in values.items() if name.startswith(prefix)}
        rows = None
        if cache.form == "hidden" and cache.mem_len:
            rows = [state.last("hidden", min(state.size, cache.mem_len)) for state in cache.states]
        segments.append(
            Segment(
                expected=expected,
                labels=labels,
                log_probs=log_probs_of(model, output.logits).detach(),
                hidden_states=[states.detach() for states in output.hidden_states],
                weights=output.attentions[0].detach() if output.attentions else None,
                rows=rows,
                loss=output.loss.detach(),
            )
        )
    return model, segments


@per_dtype
@per_start
@per_case
class TestSegments:
    @per_implementation
    @per_form
    def test_log_probs(self, case, start, dtype, form, implementation):
        for segment in run(case, start, dtype, form, implementation)[1]:
            assert_close(segment.log_probs, segment.expected["log_probs"], **LOG_PROBS[dtype])

    @per_implementation
    @per_form
    def test_hidden_states_of_every_layer(self, case, start, dtype, form, implementation):
        model, segments = run(case, start, dtype, form, implementation)
        for segment in segments:
            names = [*(f"hidden.{i}" for i in range(model.config.num_hidden_layers)), "last_hidden"]
            for states, name in zip(segment.hidden_states, names, strict=True):
                assert_close(states, segment.expected[name], **STATES[dtype])

    @per_implementation
    @pytest.mark.parametrize("form", ["trained", "hidden"])
    def test_memory_after_every_segment(self, case, start, dtype, form, implementation):
        model, segments = run(case, start, dtype, form, implementation)
        for segment in segments:
            assert (segment.rows is None) == ("mems.0" not in segment.expected) == (model.config.mem_len == 0)
            for i, rows in enumerate(segment.rows or []):
                mems = segment.expected[f"mems.{i}"].transpose(0, 1)  # the reference has the length first
                assert_close(rows[:, 0], mems, **STATES[dtype])

    @per_form
    def test_attention_weights_of_the_first_layer(self, case, start, dtype, form):
        model, segments = run(case, start, dtype, form, "eager")
        config = model.config
        for segment in segments:
            reference = segment.expected["attn.0"]
            # The reference has a column for all of its memory, this model for what the first query sees: a window of
            # mem_len keys, itself included, leaves out the oldest row of a full memory.
            is_full = reference.shape[-1] - reference.shape[-2] == config.mem_len
            extra = int(is_full and config.attention_window is not None)
            assert not reference[..., :extra].any()
            assert_close(segment.weights, reference[..., extra:], **STATES[dtype])

    @per_implementation
    @per_form
    def test_losses(self, case, start, dtype, form, implementation):
        """The reference scores no segment's last token; it leaves 0 for the label -100 and takes the mean over losses
        that are not 0. With clusters its losses come in the order of clusters, zeros last, though shaped (B, n - 1)."""
        model, segments = run(case, start, dtype, form, implementation)
        for segment in segments:
            targets = segment.labels[:, 1:].flatten()
            chosen = targets != -100
            targets = targets[chosen]
            found = [-segment.log_probs[:, :-1].flatten(0, 1)[chosen].gather(1, targets[:, None])[:, 0]]
            order = torch.arange(len(targets))
            if model.config.cutoffs:
                hidden_states = segment.hidden_states[-1][:, :-1].flatten(0, 1)[chosen]
                found.append(model.lm_head(hidden_states, targets).detach())
                order = torch.bucketize(targets, torch.tensor(model.config.cutoffs), right=True).argsort(stable=True)
            reference = segment.expected["losses"].flatten()
            for losses in found:
                assert_close(losses[order], reference[reference != 0], **LOG_PROBS[dtype])
            assert_close(segment.loss, segment.expected["loss"][0], **LOG_PROBS[dtype])


# `generate` without more makes a cache of keys and values; one of hidden states has to be given.
@pytest.mark.parametrize(
    ("dtype", "form"), [(torch.float32, None), (torch.float64, "hidden")], ids=["float32-key_value", "float64-hidden"]
)
@per_implementation
@per_start
@per_case
def test_greedy_text(case, start, implementation, dtype, form):
    """The prompt in one call, then a call a token: each is a segment (segment_len=None), as in the reference's loop.

    The two best tokens are 6e-3 apart at least, float32 is off by 2e-4 at most. Without memory (a08) the reference's
    `generate` feeds the whole text again each time; this model has the numbers of the loop.
    """
    model, values = load(case, start, dtype, implementation), golden(case)
    prompt, text = values["prompt"], values["greedy_empty" if start == "empty" else "greedy"]
    options = {} if form is None else {"cache": XLCache(model.config, form=form)}
    found = model.generate(
        prompt,
        max_new_tokens=text.shape[1],
        do_sample=False,
        return_dict_in_generate=True,
        output_logits=True,
        **options,
    )
    assert found.sequences[:, prompt.shape[1] :].tolist() == text.tolist()
    if start == "zeros":
        log_probs = log_probs_of(model, torch.stack(found.logits, 1)).double()
        # `generate` rounds logits to float32, whatever the model computes in.
        assert_close(log_probs, values["greedy_log_probs"], **LOG_PROBS[torch.float32])


@per_case
def test_every_parameter_counts(case):
    """Moved by a hundredth, each parameter moves the golden log-probabilities by far more than the tolerance."""
    model, values = load(case, "zeros", torch.float64, "sdpa"), golden(case)
    generator = torch.Generator().manual_seed(0)
    reference = values[f"seg{len(values['seg_lens']) - 1}.log_probs"]
    for name, parameter in model.named_parameters():
        kept = parameter.detach().clone()
        noise = torch.randn(parameter.shape, generator=generator, dtype=parameter.dtype)
        parameter.data += 0.01 * noise
        _, output, _ = list(run_segments(model, "key_value", values))[-1]
        assert (log_probs_of(model, output.logits) - reference).abs().max() > 1e-3, name
        parameter.data.copy_(kept)
