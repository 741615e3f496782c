"""Programs around Transformers: serving, lm-evaluation-harness, TRL, quantisation; skipped where one is not installed."""

import importlib
import json
import math
import os
import socket
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest
import torch
from helpers import feed, ids_for
from peft import LoraConfig
from report_helpers import CLOSE, every_memory, greedy, make, off
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from torch import nn
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast, QuantoConfig, TorchAoConfig

from modeling_xl import XLForCausalLM
from modeling_xl.evaluate import evaluate
from modeling_xl.text import InputError, byte_tokenizer

# What outside programs warn of is theirs.
pytestmark = [pytest.mark.clients, pytest.mark.filterwarnings("ignore")]
BIN = Path(sys.executable).parent


def needed(*names: str):
    """The last of the modules; the test is skipped where one is missing."""
    for name in names:
        pytest.importorskip(name, reason=f"{name} is not installed; `make test-clients` does")
    return importlib.import_module(names[-1])


def environment(home: Path, **changes) -> dict[str, str]:
    """A process without this checkout's path and without the settings of this one's Hub."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("HF_", "PYTHON"))}
    return kept | {"HF_HOME": str(home), "OMP_NUM_THREADS": "1"} | changes


def run(*command, home: Path, timeout=300, text=None, **changes) -> str:
    done = subprocess.run(
        [str(word) for word in command], cwd=home, env=environment(home, **changes), input=text, capture_output=True,
        text=True, timeout=timeout, check=False,
    )  # fmt: skip
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout


LETTERS = "abcdefghijklmnopqrstuvwxyz"
CHAT_TEMPLATE = "{% for turn in messages %}<{{ turn.role }}>{{ turn.content }}{% endfor %}<assistant>"


def letters_tokenizer() -> PreTrainedTokenizerFast:
    """A letter, or the name of a role, is a token: whatever a model says with it can be printed and searched for."""
    words = ["<pad>", "<end>", "<unk>", "<system>", "<user>", "<assistant>", *LETTERS]
    tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"pad_token": "<pad>", "eos_token": "<end>", "unk_token": "<unk>"}
    special["additional_special_tokens"] = ["<system>", "<user>", "<assistant>"]
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, chat_template=CHAT_TEMPLATE, **special)


class TestServing:
    """`transformers serve` and `transformers chat`, on a folder that holds the code, in processes that have no other."""

    @pytest.fixture(scope="class")
    def folder(self, tmp_path_factory) -> Path:
        needed("fastapi", "uvicorn", "openai", "rich")
        path = tmp_path_factory.mktemp("served")
        tokenizer = letters_tokenizer()
        model = make(dtype=torch.float32, vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1)
        model.save_pretrained(path / "model")
        tokenizer.save_pretrained(path / "model")
        return path

    @pytest.fixture(scope="class")
    def address(self, folder) -> str:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        command = ["serve", folder / "model", "--host", "127.0.0.1", "--port", port, "--device", "cpu", "--trust-remote-code"]
        with (folder / "log").open("w") as log:
            server = subprocess.Popen(
                [str(word) for word in (BIN / "transformers", *command)], cwd=folder, stdout=log, stderr=log,
                env=environment(folder, HF_HUB_OFFLINE="1"),
            )  # fmt: skip
        try:
            address = f"http://127.0.0.1:{port}"
            for _ in range(240):
                assert server.poll() is None, (folder / "log").read_text()[-4000:]
                try:
                    urllib.request.urlopen(f"{address}/health", timeout=5).close()
                    break
                except OSError:
                    time.sleep(0.5)
            yield address
        finally:
            server.terminate()
            server.wait(30)

    def said(self, folder: Path, ids: torch.Tensor, count: int) -> str:
        model = XLForCausalLM.from_pretrained(folder / "model").eval()
        return letters_tokenizer().decode(greedy(model, ids, count)[0], skip_special_tokens=True)

    def ask(self, address: str, path: str, **body) -> list[dict]:
        """The answer, or all that is sent of a stream."""
        request = urllib.request.Request(f"{address}{path}", json.dumps(body).encode(), {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as response:
            answer = response.read().decode()
        if not body.get("stream"):
            return [json.loads(answer)]
        lines = [line.removeprefix("data: ") for line in answer.splitlines() if line.startswith("data: ")]
        return [json.loads(line) for line in lines if line != "[DONE]"]

    def test_chat_completions(self, folder, address):
        """Of more tokens than a segment and memory hold, at once and as a stream."""
        chat = [{"role": "system", "content": "sing"}, {"role": "user", "content": "of the man of many ways".replace(" ", "")}]
        ids = letters_tokenizer()("<system>sing<user>ofthemanofmanyways<assistant>", return_tensors="pt").input_ids
        expected = self.said(folder, ids, 30)
        settings = {"model": str(folder / "model"), "messages": chat, "max_tokens": 30, "temperature": 0}
        (answer,) = self.ask(address, "/v1/chat/completions", **settings)
        assert answer["choices"][0]["message"]["content"] == expected
        parts = self.ask(address, "/v1/chat/completions", **settings, stream=True)
        assert "".join(part["choices"][0]["delta"].get("content") or "" for part in parts) == expected

    def test_completions(self, folder, address):
        ids = letters_tokenizer()("themusesang", return_tensors="pt").input_ids
        settings = {"model": str(folder / "model"), "prompt": "themusesang", "max_tokens": 30, "temperature": 0}
        (answer,) = self.ask(address, "/v1/completions", **settings)
        assert answer["choices"][0]["text"] == self.said(folder, ids, 30)

    def test_chat(self, folder, address):
        ids = letters_tokenizer()("<user>hello<assistant>", return_tensors="pt").input_ids
        command = ["chat", folder / "model", f"{address}/v1", "max_new_tokens=20", "do_sample=False"]
        shown = run(BIN / "transformers", *command, home=folder, text="hello\nn\n!exit\n", NO_COLOR="1", COLUMNS="200")
        assert self.said(folder, ids, 20) in shown


DOCUMENTS = [
    "Tell me, O Muse, of that ingenious hero who travelled far and wide after he had sacked the famous town of Troy. " * 3,
    "Many cities did he visit, and many were the nations with whose manners and customs he was acquainted.",
    "So now all who escaped death in battle or by shipwreck had got safely home except Ulysses.",
]
CHOICES = [
    {"question": DOCUMENTS[0] + "He travelled", "choices": [" far and wide", " home", " not"], "answer": 0},
    {"question": DOCUMENTS[1] + "He visited", "choices": [" nobody", " many cities"], "answer": 1},
    {"question": "Ulysses", "choices": [" was home", " was not yet at home"], "answer": 1},
]
ROLLING = """
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{text}}"
metric_list: [{metric: byte_perplexity}, {metric: bits_per_byte}]
"""
CHOICE = """
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
target_delimiter: ""
doc_to_target: "{{answer}}"
metric_list: [{metric: acc}]
"""
GENERATE = """
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[0]}}"
generation_kwargs: {until: ["\\n\\n"], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""


def model_for_text(memory="recurrence", **changes) -> XLForCausalLM:
    return make(memory=memory, dtype=torch.float32, vocab_size=259, pad_token_id=0, eos_token_id=1, **changes)


def byte_ids(text: str) -> list[int]:
    return [byte + 3 for byte in text.encode()]


@torch.no_grad()
def nats_of(model: XLForCausalLM, context: list[int], text: str) -> float:
    """log P(text | context), by one call over both."""
    ids = torch.tensor([context + byte_ids(text)])
    scored = model(ids[:, :-1]).logits.double().log_softmax(-1).gather(-1, ids[:, 1:, None])[0, :, 0]
    return float(scored[len(context) - 1 :].sum())


class TestHarness:
    @pytest.fixture
    def folder(self, tmp_path) -> Path:
        needed("lm_eval")
        tasks = tmp_path / "tasks"
        tasks.mkdir()
        for name, rows, task in (
            ("rolling", [{"text": text} for text in DOCUMENTS], ROLLING),
            ("choice", CHOICES, CHOICE),
            ("generate", CHOICES, GENERATE),
        ):
            data = tasks / f"{name}.jsonl"
            data.write_text("".join(json.dumps(row) + "\n" for row in rows))
            source = f"task: xl_{name}\ndataset_path: json\ndataset_kwargs: {{data_files: {{test: {data}}}}}\ntest_split: test"
            (tasks / f"{name}.yaml").write_text(source + task)
        byte_tokenizer().save_pretrained(tmp_path / "model")
        return tmp_path

    def results(self, folder: Path, *command) -> dict:
        """What the harness measures, task by task."""
        shared = ["--tasks", "xl_rolling,xl_choice,xl_generate", "--include_path", folder / "tasks", "--device", "cpu"]
        shared += ["--batch_size", "2", "--output_path", folder / "results", "--log_samples"]
        run(*command, *shared, home=folder, HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1")
        (found,) = (folder / "results").rglob("results_*.json")
        samples = {path.name.split("_")[2]: path.read_text() for path in (folder / "results").rglob("samples_*.jsonl")}
        measured = json.loads(found.read_text())["results"]
        lines = {name: [json.loads(line) for line in sample.splitlines()] for name, sample in samples.items()}
        return {name: (measured[f"xl_{name}"], lines[name]) for name in ("rolling", "choice", "generate")}

    @torch.no_grad()
    def check_all(self, model: XLForCausalLM, found: dict) -> None:
        """Against calls of the model over whole texts. float32, sums in another order."""
        num_bytes = sum(len(text.encode()) for text in DOCUMENTS)
        expected = -sum(nats_of(model, [1], text) for text in DOCUMENTS) / math.log(2) / num_bytes
        assert found["rolling"][0]["bits_per_byte,none"] == pytest.approx(expected, rel=1e-4)
        right = 0
        for sample in found["choice"][1]:
            asked = CHOICES[sample["doc_id"]]
            scores = [nats_of(model, byte_ids(asked["question"]), choice) for choice in asked["choices"]]
            assert [float(answer[0][0]) for answer in sample["resps"]] == pytest.approx(scores, rel=1e-4)
            right += scores.index(max(scores)) == asked["answer"]
        assert found["choice"][0]["acc,none"] == pytest.approx(right / len(CHOICES))
        for sample in found["generate"][1]:
            ids = torch.tensor([byte_ids(CHOICES[sample["doc_id"]]["question"])])
            said = byte_tokenizer().decode(greedy(model, ids, 12)[0], skip_special_tokens=True)
            assert sample["resps"] == [[said.split("\n\n")[0]]]

    def test_hf(self, folder):
        """As any model, from a folder with its code; right where a window holds a document."""
        model = model_for_text("none")
        model.save_pretrained(folder / "model")
        arguments = f"pretrained={folder / 'model'},dtype=float32,max_length=1000,add_bos_token=False,trust_remote_code=True"
        self.check_all(model, self.results(folder, BIN / "lm_eval", "--model", "hf", "--model_args", arguments))

    def test_own_model(self, folder):
        """The memory length may be another than the config's."""
        model_for_text().save_pretrained(folder / "model")
        model = XLForCausalLM.from_pretrained(folder / "model", mem_len=13).eval()
        arguments = f"pretrained={folder / 'model'},dtype=float32,mem_len=13"
        command = [sys.executable, "-m", "modeling_xl.harness", "--model", "modeling-xl", "--model_args", arguments]
        self.check_all(model, self.results(folder, *command))

    def instances(self, kind: str, *arguments: tuple) -> list:
        instance = needed("lm_eval", "lm_eval.api.instance").Instance
        return [instance(kind, {}, given, index) for index, given in enumerate(arguments)]

    @every_memory
    def test_documents_are_streams(self, memory):
        """What `evaluate` measures, and `hf` in one window; `hf` in windows measures something else. float32."""
        harness, hf = needed("lm_eval", "modeling_xl.harness"), needed("lm_eval", "lm_eval.models.huggingface")
        model = model_for_text(memory)
        settings = {"pretrained": model, "tokenizer": byte_tokenizer(), "batch_size": 2}
        asked = self.instances("loglikelihood_rolling", *((text,) for text in [*DOCUMENTS, ""]))
        found = harness.StreamingLM(**settings).loglikelihood_rolling(asked)
        assert found[-1] == 0
        for nats, text in zip(found[:-1], DOCUMENTS, strict=True):
            ids = torch.tensor([1, *byte_ids(text)])
            (streamed,) = model.stream([ids])
            assert nats == pytest.approx(float(streamed[1:].double().sum()), rel=1e-4)
            if memory != "none":  # there `evaluate` reads block by block
                measured = evaluate(model, ids)
                assert nats == pytest.approx(-measured.loss * measured.num_tokens, rel=1e-4)
        settings["add_bos_token"] = False  # with ByT5's tokenizer that is: nothing appended
        assert hf.HFLM(**settings, max_length=1000).loglikelihood_rolling(asked)[:-1] == pytest.approx(found[:-1], rel=1e-4)
        cut = hf.HFLM(**settings, max_length=40).loglikelihood_rolling(asked)
        assert abs(cut[0] - found[0]) > 1e-3 * abs(found[0])

    def test_a_shared_context_is_read_once(self):
        """Of any batch size: contexts of several lengths, one of a token only, several continuations or one."""
        harness = needed("lm_eval", "modeling_xl.harness")
        model, fed = model_for_text(), []
        pairs = [(asked["question"], choice) for asked in CHOICES for choice in asked["choices"]]
        pairs += [("", "Tell me"), ("", "Tell me, O Muse"), ("T", "ell me")]
        expected = [nats_of(model, byte_ids(context) or [1], continuation) for context, continuation in pairs]
        read = sum(len(byte_ids(context) or [1]) - 1 for context in {context for context, _ in pairs})
        hook = model.register_forward_pre_hook(
            lambda _, __, named: fed.append(int(named["attention_mask"].sum())), with_kwargs=True
        )
        for size in (1, 2, 3, 64):
            fed.clear()
            lm = harness.StreamingLM(pretrained=model, tokenizer=byte_tokenizer(), batch_size=size)
            found = lm.loglikelihood(self.instances("loglikelihood", *pairs), disable_tqdm=True)
            assert [nats for nats, _ in found] == pytest.approx(expected, rel=1e-4)
            assert sum(fed) == read + sum(len(byte_ids(continuation)) for _, continuation in pairs)
        hook.remove()
        # Spaces at the end of a context count to what follows, which leaves this one empty.
        [(nats, _)] = lm.loglikelihood(self.instances("loglikelihood", ("  ", "x")), disable_tqdm=True)
        assert nats == pytest.approx(nats_of(model, [1], "  x"), rel=1e-4)
        context = byte_ids(CHOICES[0]["question"])
        said = greedy(model, torch.tensor([context]), 6)[0].tolist()
        other = [*said[:-1], said[-1] ^ 1]
        answers = lm._loglikelihood_tokens([(None, context, said), (None, context, other)], disable_tqdm=True)
        assert [is_greedy for _, is_greedy in answers] == [True, False]

    @pytest.mark.parametrize(
        ("model", "settings", "refusal"),
        [
            ({}, {"max_length": 64}, "max_length=64.*use --model hf"),
            ({"segment_len": None}, {}, "segment_len=None.*give a segment_len"),
            ({}, {"batch_size": "auto"}, "batch_size=auto.*give a number"),
            ({}, {"add_bos_token": True}, "add_bos_token=True.*leave it out"),
        ],
        ids=["max_length", "segment_len", "batch_size", "add_bos_token"],
    )
    def test_refusals(self, model, settings, refusal):
        harness = needed("lm_eval", "modeling_xl.harness")
        with pytest.raises(InputError, match=refusal):
            harness.StreamingLM(pretrained=model_for_text(**model), tokenizer=byte_tokenizer(), **settings)


class TestFineTuning:
    """TRL's SFTTrainer, on texts of a few documents of unequal length."""

    TEXTS = ("the muse sang of the man of many ways", "tell me", "and of the hero who travelled far", "he came home") * 2

    def trainer(self, path, model, texts=TEXTS, **settings):
        trl, datasets = needed("trl"), needed("datasets")
        common = {"bf16": False, "use_cpu": True, "report_to": "none", "save_strategy": "no", "logging_steps": 1, "seed": 3}
        common |= {"per_device_train_batch_size": 4, "max_steps": 1, "learning_rate": 1e-2, "disable_tqdm": True}
        peft_config = settings.pop("peft_config", None)
        return trl.SFTTrainer(
            model,
            args=trl.SFTConfig(output_dir=str(path), **common | settings),
            train_dataset=datasets.Dataset.from_dict({"text": list(texts)}),
            processing_class=byte_tokenizer(),
            peft_config=peft_config,
        )

    def losses(self, trainer) -> list[float]:
        trainer.train()
        return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]

    @pytest.mark.parametrize("adapted", [False, True], ids=["whole", "lora"])
    def test_loss_falls(self, adapted, tmp_path):
        peft_config = LoraConfig(task_type="CAUSAL_LM") if adapted else None
        found = self.losses(self.trainer(tmp_path, model_for_text(), max_length=64, max_steps=30, peft_config=peft_config))
        assert all(map(math.isfinite, found)) and found[-1] < found[0] - 0.5

    def test_packed_documents_see_themselves(self, tmp_path):
        """Packed, flattened without padding, and padded, the loss is the same: TRL warns, but position ids that begin again
        begin a document here, and one that memory holds is the same at any place. float32; the log has seven digits."""
        found = []
        for settings in ({}, {"padding_free": True}, {"packing": True, "packing_strategy": "bfd", "max_length": 128}):
            model = model_for_text(segment_len=16, mem_len=64)
            trainer = self.trainer(tmp_path, model, self.TEXTS[:4], **{"max_length": None} | settings)
            shape = next(iter(trainer.get_train_dataloader()))["input_ids"].shape
            assert shape[0] == (1 if settings else 4)
            found.append(self.losses(trainer)[0])
        assert found[1:] == pytest.approx([found[0]] * 2, rel=1e-5)

    def test_heads_without_one_weight_are_not_trained(self, tmp_path):
        """TRL's own loss stops there, and does not train on something else."""
        with pytest.raises(AttributeError, match="no attribute 'weight'"):
            self.losses(self.trainer(tmp_path, model_for_text(cutoffs=[60, 100]), max_length=64))


def is_quantised(module: nn.Module) -> bool:
    """Whether a linear layer's weight is a tensor that has to be dequantised, however the library calls it."""
    return isinstance(module, nn.Linear) and type(module.weight) is not nn.Parameter


class TestQuantisation:
    """Weights in int8, loaded so by `from_pretrained`."""

    PAIRS = (("xl", "recurrence"), ("rope", "compressive"), ("t5", "linear"), ("alibi", "none"))

    def configs(self):
        return {
            "quanto": lambda: QuantoConfig(weights="int8"),
            "torchao": lambda: TorchAoConfig(needed("torchao", "torchao.quantization").Int8WeightOnlyConfig()),
        }

    def loaded(self, library: str, folder: Path) -> XLForCausalLM:
        needed("optimum.quanto" if library == "quanto" else "torchao")
        config = self.configs()[library]()
        return AutoModelForCausalLM.from_pretrained(folder, quantization_config=config, dtype=torch.float32).eval()

    @pytest.mark.parametrize(("scheme", "memory"), PAIRS, ids=["-".join(pair) for pair in PAIRS])
    @pytest.mark.parametrize("library", ["quanto", "torchao"])
    @torch.no_grad()
    def test_numbers(self, library, scheme, memory, tmp_path):
        """Whole, in pieces and in `generate` those of a plain model with the rounded weights, in float32; and near those of
        the weights before: int8 of each row rounds by up to 1/254 of its largest, so logits move by some hundredths of their
        spread."""
        plain = make(scheme, memory, dtype=torch.float32, hidden_size=32)
        plain.save_pretrained(tmp_path)
        ids = ids_for(plain, 2, 23)
        before = plain(ids).logits
        model = self.loaded(library, tmp_path)
        rounded = [name for name, module in model.named_modules() if is_quantised(module)]
        assert {name.split(".")[-1] for name in rounded} >= {"qkv_proj", "o_proj", "up_proj", "gate_proj", "down_proj"}
        for name in rounded:
            plain.get_submodule(name).weight.data = model.get_submodule(name).weight.dequantize()
        expected = plain(ids).logits
        assert off(model(ids).logits, expected) < CLOSE
        assert off(feed(model, ids, [9, 1, 1, 5, 1, 6])[0], expected) < CLOSE
        assert torch.equal(greedy(model, ids, 12), greedy(plain, ids, 12))
        assert 0 < float((expected - before).std() / before.std()) < 0.1

    @torch.no_grad()
    def test_torchao_saves_and_loads(self, tmp_path):
        plain = make(dtype=torch.float32, hidden_size=32)
        plain.save_pretrained(tmp_path / "plain")
        model = self.loaded("torchao", tmp_path / "plain")
        model.save_pretrained(tmp_path / "rounded")
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "rounded").eval()
        ids = ids_for(plain, 2, 23)
        assert sum(map(is_quantised, again.modules())) == sum(map(is_quantised, model.modules())) > 0
        assert off(again(ids).logits, model(ids).logits) == 0
        assert torch.equal(greedy(again, ids, 12), greedy(model, ids, 12))

    def test_quanto_is_not_saved(self, tmp_path):
        """Transformers says so; the plain weights are what is kept."""
        make(dtype=torch.float32, hidden_size=32).save_pretrained(tmp_path)
        with pytest.raises(ValueError, match="not serializable"):
            self.loaded("quanto", tmp_path).save_pretrained(tmp_path / "rounded")
