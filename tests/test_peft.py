"""PEFT: what LoRA adapts where nothing is named, and what of PEFT works on these models."""

import copy
import subprocess
import sys

import pytest
import torch
from helpers import ids_for
from peft import LoraConfig, PeftModel, PrefixTuningConfig, get_peft_model
from report_helpers import every_memory, greedy, make, off

pytestmark = pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")  # a name that PEFT still calls


def adapted(model):
    """LoRA as PEFT configures it by itself, with weights that show."""
    found = get_peft_model(model, LoraConfig(task_type="CAUSAL_LM", lora_alpha=16)).to(torch.float64).eval()
    with torch.no_grad():
        for name, parameter in found.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.2, generator=torch.Generator().manual_seed(2))
    return found


def test_default_targets_without_importing_peft():
    """In a process of its own: the package leaves PEFT alone, and is known to one that is imported after the model was made."""
    script = """
import sys
from modeling_xl import XLConfig, XLForCausalLM

assert "peft" not in sys.modules
model = XLForCausalLM(XLConfig(vocab_size=9, hidden_size=8, num_hidden_layers=2, num_attention_heads=2, intermediate_size=8))
from peft import LoraConfig, get_peft_model

names = [name for name, _ in get_peft_model(model, LoraConfig()).named_parameters() if "lora_A" in name]
print(*sorted(name.split(".")[-4] for name in names))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert done.stdout.split() == ["o_proj", "o_proj", "qkv_proj", "qkv_proj"]


@every_memory
def test_lora_as_it_comes(memory, tmp_path):
    """Trained, the base is as before; merged, unmerged, and saved and loaded it says the same. float64."""
    model = make(memory=memory)
    before = copy.deepcopy(model.state_dict())
    found = adapted(model)
    ids = ids_for(model, 2, 23)
    optimizer = torch.optim.SGD([p for p in found.parameters() if p.requires_grad], 0.01)
    found.train()(input_ids=ids, labels=ids).loss.backward()
    optimizer.step()
    found.eval()
    after = {name.replace(".base_layer", ""): value for name, value in found.get_base_model().state_dict().items()}
    assert all(torch.equal(after[name], value) for name, value in before.items())

    with torch.no_grad():
        logits, said = found(input_ids=ids).logits, greedy(found, ids, 9)
        assert off(logits, make(memory=memory)(ids).logits) > 0.1
        found.save_pretrained(tmp_path)
        loaded = PeftModel.from_pretrained(make(memory=memory), tmp_path).to(torch.float64).eval()
        assert off(loaded(input_ids=ids).logits, logits) < 1e-10 and torch.equal(greedy(loaded, ids, 9), said)
        merged = found.merge_and_unload()
        assert off(merged(ids).logits, logits) < 1e-10 and torch.equal(greedy(merged, ids, 9), said)


def test_prefix_tuning_is_refused():
    """Its prefix is keys and values in a cache of Transformers."""
    settings = PrefixTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3)
    found = get_peft_model(make(), settings).to(torch.float64)
    with pytest.raises(TypeError, match="cannot hold this model's memory"):
        found(input_ids=ids_for(make(), 2, 9))
