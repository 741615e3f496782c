"""Public bug reports about files: saving, loading, configuration, pipelines. Ids are the reports'."""

import ast
import re
from pathlib import Path

import accelerate
import pytest
import torch
import transformers
from report_helpers import CLOSE, EXACT, HEADS, MEMORIES, SCHEMES, every_head, greedy, ids_for, make, make_other, off
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, ByT5Tokenizer, pipeline

import modeling_xl
from modeling_xl import XLCache, XLConfig, XLForCausalLM
from modeling_xl.modeling_xl import AUTO_CLASSES

PACKAGE = Path(modeling_xl.__file__).parent
SOURCES = sorted(PACKAGE.rglob("*.py"))
AUTO = {model_class.__name__: auto for auto, model_class in reversed(AUTO_CLASSES.items())}
every_class = pytest.mark.parametrize("class_name", AUTO)


class TestWeights:
    @pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
    @every_class
    def test_every_class_saves_and_loads(self, class_name, tied, tmp_path):
        """report G01: construct, save, reload gives the same class and numbers, tied and untied."""
        model = make_other(getattr(modeling_xl, class_name), tie_word_embeddings=tied)
        model.save_pretrained(tmp_path)
        again = getattr(transformers, AUTO[class_name]).from_pretrained(tmp_path).eval()
        assert type(again) is type(model)
        ids = ids_for(make(), 2, 13)
        assert off(again(ids)[0], model(ids)[0]) == 0
        assert not hasattr(type(model), "_tied_weights_keys") or isinstance(type(model)._tied_weights_keys, dict | None)

    @every_head
    def test_every_head_saves_and_loads(self, head, tmp_path):
        """report G01, G11: each head reloads equal; what is tied is saved once and tied again, what is not, twice."""
        model = make(**HEADS[head])
        model.save_pretrained(tmp_path)
        saved = load_file(tmp_path / "model.safetensors")
        own = dict(model.named_parameters())
        assert saved.keys() == own.keys()
        assert all(torch.equal(saved[name], own[name]) for name in saved)
        again = XLForCausalLM.from_pretrained(tmp_path).eval()
        assert {name for name, _ in again.named_parameters()} == own.keys()
        ids = ids_for(model, 2, 13)
        assert off(again(ids).logits, model(ids).logits) == 0
        for loaded in (model, again):
            sources = [part.weight for part in loaded.model.embed_tokens.modules() if isinstance(part, torch.nn.Embedding)]
            head = loaded.lm_head
            targets = [head.weight] if isinstance(head, torch.nn.Linear) else [table.weight for table in head.tables]
            for source, target in zip(sources, targets, strict=True):
                assert (source is target) == loaded.config.tie_word_embeddings
                assert torch.equal(source, target) == loaded.config.tie_word_embeddings

    def test_base_and_heads_share_files(self, tmp_path):
        """report G01: weights of one class load into another, only the head's are new."""
        model = make()
        model.save_pretrained(tmp_path)
        ids = ids_for(model, 2, 13)
        base = modeling_xl.XLModel.from_pretrained(tmp_path).eval()
        assert off(base(ids)[0], model.model(ids)[0]) == 0
        base.save_pretrained(tmp_path / "base")
        assert off(XLForCausalLM.from_pretrained(tmp_path / "base").eval()(ids).logits, model(ids).logits) == 0
        scored, info = modeling_xl.XLForSequenceClassification.from_pretrained(tmp_path, output_loading_info=True)
        assert set(info["missing_keys"]) == {"score.weight"}
        assert off(scored.eval().model(ids)[0], model.model(ids)[0]) == 0

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_nothing_unsaved_is_left_to_chance(self, scheme, tmp_path):
        """report G03: loaded 5 times into a used allocator, buffers and numbers are those of the saved model."""
        model = make(scheme, dtype=torch.float32)
        model.save_pretrained(tmp_path)
        ids = ids_for(model, 2, 13)
        expected = model(ids).logits
        buffers = dict(model.named_buffers())
        for _ in range(5):
            junk = [torch.full((size,), float("nan")) for size in (16, 24, 96, 24 * 24, 97 * 24, 20000)]
            del junk
            again = XLForCausalLM.from_pretrained(tmp_path).eval()
            assert off(again(ids).logits, expected) == 0
            assert all(torch.equal(buffers[name], value) for name, value in again.named_buffers())

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_missing_weights_are_initialised(self, scheme, tmp_path):
        """report G03: a class loaded from nothing but a config has finite, initialised parameters everywhere."""
        make_other(modeling_xl.XLModel, position_type=scheme).save_pretrained(tmp_path)
        weights = tmp_path / "model.safetensors"
        kept = {name: t for name, t in load_file(weights).items() if "layers.1" not in name and "shared" not in name}
        save_file(kept, weights, metadata={"format": "pt"})
        model = modeling_xl.XLModel.from_pretrained(tmp_path)
        for name, parameter in model.named_parameters():
            assert parameter.isfinite().all(), name
            if name not in kept:
                assert parameter.abs().max() < 1.5, name

    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_built_on_meta_and_in_half_precision(self, scheme, tmp_path):
        """report G05: a model built on the meta device, then bfloat16, has the positions of one built directly."""
        model = make(scheme, dtype=torch.bfloat16)
        ids = ids_for(model, 1, 90)
        expected = model(ids).logits
        model.save_pretrained(tmp_path)
        loaded = XLForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
        assert off(loaded(ids).logits, expected) == 0
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(model.config)
        empty = empty.to(torch.bfloat16)
        empty.load_state_dict(model.state_dict(), assign=True)
        assert off(empty.eval()(ids).logits, expected) == 0
        # Were anything of the positions rounded to bfloat16, float32 arithmetic on the same weights would show it.
        assert off(loaded.float()(ids).logits, make(scheme, dtype=torch.bfloat16).float()(ids).logits) == 0

    @pytest.mark.parametrize("head", ["dense", "adaptive"])
    @pytest.mark.parametrize("scheme", SCHEMES)
    def test_offloaded_weights(self, scheme, head):
        """beside the reports: weights that Accelerate holds elsewhere between calls of their module are all found."""
        model = make(scheme, dtype=torch.float32, **HEADS[head])
        ids = ids_for(model, 2, 17)
        expected = model(ids).logits
        accelerate.cpu_offload(model, execution_device=torch.device("cpu"))
        with torch.no_grad():
            assert off(model(ids).logits, expected) < CLOSE
            cache = model(ids[:, :9], cache=XLCache(model.config, form="hidden")).cache
            assert off(model(ids[:, 9:], cache=cache).logits, expected[:, 9:]) < CLOSE

    @every_class
    def test_attention_backends_are_not_promised(self, class_name):
        """report G15: the flag that lets a server bring its own attention is false, for none would know the memory."""
        assert getattr(modeling_xl, class_name)._supports_attention_backend is False


class TestSources:
    @pytest.mark.parametrize("path", SOURCES, ids=[path.name for path in SOURCES])
    def test_no_pickle(self, path):
        """report A15: no file of the package unpickles; torch.load only with weights_only=True."""
        tree = ast.parse(path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, (ast.Import, ast.ImportFrom)):
                names = [alias.name for alias in node.names] + [getattr(node, "module", None) or ""]
                assert not {"pickle", "cloudpickle", "dill", "joblib", "shelve", "marshal"} & set(names)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("torch.load", "np.load", "numpy.load"):
                options = {keyword.arg: ast.unparse(keyword.value) for keyword in node.keywords}
                assert options.get("weights_only") == "True"

    @pytest.mark.parametrize("path", SOURCES, ids=[path.name for path in SOURCES])
    def test_no_private_fields_of_caches(self, path):
        """report D01: nothing reads fields of Transformers' caches that were removed without notice."""
        gone = "key_cache value_cache _seen_tokens from_legacy_cache to_legacy_cache get_usable_length cache_position"
        assert not set(gone.split()) & set(re.findall(r"\w+", path.read_text()))

    def test_what_transformers_asks_of_a_cache_is_there(self):
        """report D01: what generation asks of a cache works on ours, not by way of fields that ours does not have."""
        model = make()
        ids = ids_for(model, 2, 12)
        with torch.no_grad():
            cache = model(ids).cache
        assert cache.get_seq_length() == 12
        assert cache.get_mask_sizes(3) == (15, 0)
        assert cache.get_max_length() == -1
        assert cache.is_initialized
        assert len(cache) == 2
        assert [cache.is_sliding, cache.is_linear, cache.is_dummy] == [[False, False]] * 3
        cache.reorder_cache(torch.tensor([1, 0]))
        cache.batch_repeat_interleave(2)
        cache.batch_select_indices(torch.tensor([0, 2]))
        turned = ids[[1, 0]]
        with torch.no_grad():
            assert off(model(ids, cache=cache).logits, model(ids, cache=model(turned).cache).logits) < EXACT
        cache.reset()
        assert cache.get_seq_length() == 0


class TestConfiguration:
    CHANGES = (
        {"memory_type": "recurrence", "segment_len": 6, "mem_len": 11, "bptt_segments": 3, "initial_memory": "zeros"},
        {"memory_type": "recurrence", "segment_len": None, "mem_len": 9, "attention_window": 4, "num_sink_tokens": 2},
        {"memory_type": ["recurrence", "none"], "mem_len": 0, "position_type": "xl", "clamp_len": 5, "untie_r": False},
        {"memory_type": "none", "attention_window": 3, "position_type": "alibi", "alibi_slopes": (1.0, 0.5, 0.25, 0.0)},
        {"position_type": "rope", "rope_parameters": {"rope_type": "linear", "rope_theta": 500.0, "factor": 2.0}},
        {"cutoffs": (20, 51), "div_val": 2, "tie_projs": (True, False, True)},
    )

    @pytest.mark.parametrize("changes", CHANGES, ids=str)
    def test_memory_settings_survive(self, changes, tmp_path):
        """report B07: through save and AutoConfig, alone and with a model, every field is what it was."""
        model = make_other(XLForCausalLM, **{"num_hidden_layers": 2, **changes})
        model.config.save_pretrained(tmp_path / "config")
        model.save_pretrained(tmp_path / "model")
        ids = ids_for(make(), 2, 13)
        for folder in ("config", "model"):
            config = AutoConfig.from_pretrained(tmp_path / folder)
            assert isinstance(config, XLConfig)
            for name, value in changes.items():
                assert getattr(config, name) == (list(value) if isinstance(value, tuple) else value)
            assert config.memory_fingerprint() == model.config.memory_fingerprint()
            assert config.max_context == model.config.max_context
        again = AutoModelForCausalLM.from_pretrained(tmp_path / "model").eval()
        assert off(again(ids, cache=again(ids).cache).logits, model(ids, cache=model(ids).cache).logits) == 0

    def test_memory_settings_can_be_changed_at_load(self, tmp_path):
        """report B07: another memory length given to from_pretrained is the one that works."""
        make().save_pretrained(tmp_path)
        ids = ids_for(make(), 2, 23)
        loaded = XLForCausalLM.from_pretrained(tmp_path, mem_len=2).eval()
        assert off(loaded(ids).logits, make(mem_len=2)(ids).logits) == 0
        own = XLCache(loaded.config, mem_len=7)
        assert off(loaded(ids, cache=own).logits, make()(ids).logits) == 0


class TestPipeline:
    @pytest.mark.parametrize("memory", MEMORIES)
    def test_text_generation(self, memory, tmp_path):
        """report A11, A12: the text-generation pipeline on a saved folder says what generate says, also in a batch."""
        tokenizer = ByT5Tokenizer(extra_ids=0)
        tokenizer.padding_side = "left"
        model = make(memory=memory, dtype=torch.float32, vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1)
        model.save_pretrained(tmp_path)
        tokenizer.save_pretrained(tmp_path)
        generator = pipeline("text-generation", model=str(tmp_path), device="cpu")
        prompts = ["Tell me, O Muse, of", "the"]
        expected = []
        for prompt in prompts:
            ids = torch.tensor([[byte + 3 for byte in prompt.encode()]])
            expected.append(prompt + tokenizer.decode(greedy(model, ids, 20)[0], skip_special_tokens=True))
        settings = {"max_new_tokens": 20, "do_sample": False, "add_special_tokens": False}
        assert [generator(prompt, **settings)[0]["generated_text"] for prompt in prompts] == expected
        batch = generator(prompts, batch_size=2, **settings)
        assert [found[0]["generated_text"] for found in batch] == expected

    def test_chat_template(self):
        """beside the reports: a conversation goes in by the tokenizer's template, and what generate says comes back."""
        tokenizer = ByT5Tokenizer(extra_ids=0)
        tokenizer.chat_template = "{% for turn in messages %}{{ turn.role }}: {{ turn.content }}\n{% endfor %}assistant:"
        model = make(dtype=torch.float32, vocab_size=len(tokenizer), pad_token_id=0, eos_token_id=1)
        chat = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Sing, O Muse"}]
        prompt = "system: Be brief.\nuser: Sing, O Muse\nassistant:"
        ids = torch.tensor([[byte + 3 for byte in prompt.encode()]])
        said = tokenizer.decode(greedy(model, ids, 20)[0], skip_special_tokens=True)
        generator = pipeline("text-generation", model=model, tokenizer=tokenizer, device="cpu")
        settings = {"max_new_tokens": 20, "do_sample": False, "tokenizer_encode_kwargs": {"add_special_tokens": False}}
        assert generator(chat, **settings)[0]["generated_text"] == [*chat, {"role": "assistant", "content": said}]
