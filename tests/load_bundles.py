"""Loads bundles by the code that lies in them, in a process where the package is hidden, and saves what it loaded elsewhere.

    python load_bundles.py REQUESTS TARGET

REQUESTS is JSON, by name: `source`, a folder or a repository; `auto`, the Auto class; `options` of from_pretrained;
`tokenizer`, whether there is one; `tune`, to train the model two steps before. TARGET/NAME/bundle becomes what is saved again,
TARGET/NAME/said.safetensors what the model says, and TARGET/report.json which class it was, or why it could not be loaded.
"""

import json
import sys
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from transformers import Trainer, TrainingArguments

# Transformers imports code by the last part of a folder's name and what the files hold: that of bundles by the same code is
# then imported once, not for each.
BUNDLE = "bundle"


def results(model) -> dict[str, torch.Tensor]:
    """What a model says of a fixed text: two calls, with memory between them, and what it writes."""
    ids = torch.arange(26).view(2, 13) * 7 % model.config.vocab_size
    found = {}
    with torch.no_grad():
        first = model.eval()(ids, use_cache=True)
        for number, output in enumerate((first, model(ids, cache=first["cache"], use_cache=True))):
            tensors = [value for value in output.to_tuple() if isinstance(value, torch.Tensor)]
            found |= {f"call {number}, output {place}": value.contiguous() for place, value in enumerate(tensors)}
        if model.can_generate():
            found["written"] = model.generate(ids, max_new_tokens=3, do_sample=False)
    return found


class Hidden:
    """As if the package were not installed."""

    def find_spec(self, name: str, path=None, target=None):
        if name.split(".")[0] == "modeling_xl":
            raise ModuleNotFoundError(name)


def load(request: dict[str, Any], target: Path) -> dict[str, str]:
    options = {"trust_remote_code": True, **request.get("options", {})}
    source = request["source"]
    loaded = getattr(transformers, request["auto"]).from_pretrained(source, **options)
    bundle = target / BUNDLE
    loaded.save_pretrained(bundle)
    found = {"class": type(loaded).__name__, "module": type(loaded).__module__}
    if request["auto"] == "AutoConfig":
        return found
    if request.get("tokenizer"):
        tokenizer = transformers.AutoTokenizer.from_pretrained(source, **options)
        tokenizer.save_pretrained(bundle)
        if request.get("tune"):
            tune(loaded, tokenizer, bundle)
    save_file(results(loaded), target / "said.safetensors")
    return found


def tune(model, tokenizer, folder: Path) -> None:
    ids = tokenizer("some words to learn", return_tensors="pt").input_ids[0]
    arguments = TrainingArguments(
        str(folder), max_steps=2, save_strategy="no", use_cpu=True, report_to="none", disable_tqdm=True
    )
    trainer = Trainer(model, arguments, train_dataset=[{"input_ids": ids, "labels": ids}] * 2, processing_class=tokenizer)
    trainer.train()
    trainer.save_model()


def main(requests: dict[str, dict[str, Any]], target: Path) -> None:
    sys.meta_path.insert(0, Hidden())
    report = {}
    for name, request in requests.items():
        try:
            report[name] = load(request, target / name)
        except Exception as error:
            report[name] = {"error": f"{type(error).__name__}: {error}"}
    (target / "report.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main(json.loads(Path(sys.argv[1]).read_text()), Path(sys.argv[2]))
