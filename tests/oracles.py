"""Golden values of independent implementations, small trained models, and converted checkpoints.

The folders `oracles` and `models` are looked for in `$MODELING_XL_SHARED`, else in `shared` beside the checkout; without
them the tests that need them are skipped.
"""

import atexit
import functools
import os
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from modeling_xl import XLForCausalLM
from modeling_xl.conversion.convert import convert
from modeling_xl.head_xl import XLHead

CHECKOUT = Path(__file__).resolve().parents[1]
# Checkpoints of the former Transformers' Transformer-XL.
FORMER = [
    "a01_hf_mem_gt_seg_untie",
    "a02_hf_mem_lt_seg_shared_r",
    "a03_hf_clamp",
    "a04_hf_same_length",
    "a05_hf_adaptive_wt103",
    "a06_hf_pre_lnorm",
    "a07_hf_d_embed_ne_d_model_cutoffs_div1",
    "a08_hf_no_mem",
    "a09_hf_adaptive_untied_projs",
]
# float32: the worst reference itself, rounded to float32, is off by up to 2.2e-4 in log-probabilities, which reach -66 (hence
# rtol), and by 2.7e-5 in hidden states and attention weights. float64: two independent references agree to 2e-13.
LOG_PROBS = {torch.float32: {"rtol": 1e-4, "atol": 1e-4}, torch.float64: {"rtol": 0, "atol": 1e-9}}
STATES = {torch.float32: {"rtol": 1e-5, "atol": 5e-5}, torch.float64: {"rtol": 0, "atol": 1e-9}}


def shared() -> Path:
    return Path(os.environ.get("MODELING_XL_SHARED") or CHECKOUT.parent / "shared")


def oracle(case: str) -> Path:
    """The folder of a case; skips the test where it is absent."""
    folder = shared() / "oracles" / case
    if not (folder / "golden.safetensors").is_file():
        pytest.skip(f"no golden values of {case}: set MODELING_XL_SHARED to the folder that holds oracles/{case}")
    return folder


def trained_model(name: str) -> Path:
    """The folder of a small trained model; skips the test where it is absent."""
    folder = shared() / "models" / name
    if not (folder / "config.json").is_file():
        pytest.skip(f"no model {name}: set MODELING_XL_SHARED to the folder that holds models/{name}")
    return folder


@functools.cache
def golden(case: str) -> dict[str, torch.Tensor]:
    """The golden values of a case; floats are float64."""
    return load_file(oracle(case) / "golden.safetensors")


@functools.cache
def _made() -> Path:
    """A folder for all that is converted in this process, which ends with it."""
    folder = tempfile.mkdtemp(prefix="modeling-xl-converted-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return Path(folder)


@functools.cache
def converted(source: Path, dtype: torch.dtype) -> Path:
    """The folder of a checkpoint converted to `dtype`, made once."""
    name = str(dtype).removeprefix("torch.")
    target = _made() / f"{source.parent.name}-{source.name}-{name}"
    convert(source, target, dtype=name)
    return target


def load_converted(source: Path, dtype: torch.dtype, attn_implementation: str = "sdpa", **changes) -> XLForCausalLM:
    """A checkpoint, converted, in eval mode; its texts end at no token. changes: fields of the config."""
    folder = converted(source, dtype)
    model = XLForCausalLM.from_pretrained(folder, dtype=dtype, attn_implementation=attn_implementation, **changes)
    model.generation_config.eos_token_id = None  # golden texts run past it
    return model.eval()


def log_probs_of(model, logits):
    """Adaptive heads give log-probabilities, dense ones logits."""
    is_adaptive = isinstance(model.lm_head, XLHead) and model.lm_head.is_adaptive
    return logits if is_adaptive else logits.log_softmax(-1)
