"""What a family of foreign checkpoints is: the contract every `from_*.py` fulfils. It holds no family itself."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, ClassVar

from modeling_xl.configuration_xl import XLConfig
from modeling_xl.text import InputError
from modeling_xl.transfo_xl_loader import TransfoXLConfig

from .weight_map import Rule, listed

# Fields of any config that say nothing about the numbers a model gives.
SAYS_NOTHING = {
    *("architectures", "model_type", "auto_map", "transformers_version", "dtype", "torch_dtype", "_name_or_path", "use_cache"),
    *("id2label", "label2id", "num_labels", "problem_type", "tokenizer_class", "task_specific_params", "finetuning_task"),
    *("output_attentions", "output_hidden_states", "return_dict", "torchscript", "gradient_checkpointing"),
    *("sep_token_id", "unk_token_id", "cls_token_id", "mask_token_id", "decoder_start_token_id"),
    *("prefix", "chunk_size_feed_forward", "attn_implementation", "pruned_heads", "tokenizer_name"),
}
TOKEN_IDS = ("bos_token_id", "eos_token_id", "pad_token_id")
_ABSENT = object()


class SourceFields:
    """The fields of a foreign config. It remembers which were asked for, so that one nobody understands is refused by name
    where it is not at its default, and no variant of an architecture is converted as if it were the plain one.

    where: the file, for messages. defaults: of fields that `values` may lack, and what a field may be without being asked
    for. notes: what the person who converts should know. not_compared: why logits of the source's class would be other ones.
    """

    def __init__(self, where: str, values: dict[str, Any], defaults: dict[str, Any] | None = None):
        self.where = where
        self.values = values
        self.defaults = defaults or {}
        self.asked: set[str] = set()
        self.notes: list[str] = []
        self.not_compared: str | None = None

    def __call__(self, name: str, default: Any = _ABSENT) -> Any:
        """A field's value; without a default it has to be there."""
        self.asked.add(name)
        if name in self.values:
            return self.values[name]
        if name in self.defaults:
            return self.defaults[name]
        if default is _ABSENT:
            raise InputError(f"{self.where}: has no {name}, without which the model cannot be built; add it")
        return default

    def expect(self, name: str, *allowed: Any, why: str) -> None:
        """Refuses a field that is none of `allowed`; a field that is absent is at its default."""
        value = self(name, allowed[0])
        if value not in allowed:
            raise InputError(f"{self.where}: {name}={value!r} cannot be converted: {why}")

    def ignore(self, *names: str) -> None:
        """These change no number that the model gives."""
        self.asked.update(names)

    def check_all_understood(self) -> None:
        unknown = [
            f"{name}={value!r}"
            for name, value in self.values.items()
            if name not in self.asked and not self._says_nothing(name, value)
        ]
        if unknown:
            raise InputError(
                f"{self.where}: {listed(unknown)} is not understood here, and not the default: what it changes in the model is "
                "unknown, so nothing was converted; if it changes nothing, remove it from the file"
            )

    def _says_nothing(self, name: str, value: Any) -> bool:
        return name in SAYS_NOTHING or name.startswith("_") or self.defaults.get(name) == value  # None is as good as absent

    def token_ids(self, vocab_size: int) -> dict[str, Any]:
        """bos, eos and pad ids, those out of the vocabulary left out."""
        found = {}
        for name in TOKEN_IDS:
            value = self(name, None)
            ids = value if isinstance(value, list) else [] if value is None else [value]
            if any(not 0 <= token < vocab_size for token in ids):
                self.notes.append(f"{name}={value} is no id of a vocabulary of {vocab_size}: left out")
                value = None
            found[name] = value
        return found

    def rope_parameters(self, max_position: int) -> dict[str, Any]:
        """Rotary settings as `XLConfig` has them."""
        rope = dict(self("rope_parameters") or {})
        if "truncate" in rope:
            rope["truncate"] = bool(rope["truncate"])  # a null there is as good as false
        rope = {name: value for name, value in rope.items() if value is not None}
        rope.pop("type", None)  # what older files call rope_type; Transformers' config class has copied it
        rope.pop("finetuned", None)  # says how a model was made
        if self.values.get("partial_rotary_factor") == rope.get("partial_rotary_factor", 1.0):
            self.ignore("partial_rotary_factor")  # its older place
        known = {
            *("rope_type", "rope_theta", "factor", "partial_rotary_factor", "attention_factor", "beta_fast", "beta_slow"),
            *("mscale", "mscale_all_dim", "truncate", "low_freq_factor", "high_freq_factor"),
            "original_max_position_embeddings",
        }
        if unknown := set(rope) - known:
            raise InputError(f"{self.where}: rope_parameters hold {listed(unknown)}, which is not understood here")
        if rope.get("rope_type") == "yarn":
            rope.setdefault("original_max_position_embeddings", max_position)
        return rope


class Family:
    """One family of foreign checkpoints: how its config and its tensors become this package's, and back.

    name: what `--to` calls it. model_types: what the `model_type` of its config.json may be. base_prefix: how names of
    tensors begin in a model with a head, and do not in a file of the model without. head, embedding: names of the head and of
    the table of words. drops: patterns of whole names of tensors that follow from the config. has_full_attention: whether it
    was trained to see everything before a token, so that nothing of it is lost only with memory_type none.
    has_word_vocabulary: whether its tokenizer is a Transformer-XL vocabulary, to be converted too. runs_back: whether `--to`
    can make it.
    """

    name: ClassVar[str]
    model_types: ClassVar[tuple[str, ...]] = ()
    base_prefix: ClassVar[str] = ""
    head: ClassVar[str] = "lm_head"
    embedding: ClassVar[str] = "model.embed_tokens.weight"
    drops: ClassVar[tuple[str, ...]] = ()
    has_full_attention: ClassVar[bool] = True
    has_word_vocabulary: ClassVar[bool] = False
    runs_back: ClassVar[bool] = True

    def config(self, fields: SourceFields) -> dict[str, Any]:
        """Fields of `XLConfig`, for a model that gives the source's numbers."""
        raise NotImplementedError

    def rules(self, config: XLConfig, fields: SourceFields, names: Iterable[str]) -> list[Rule]:
        """A rule for each tensor of the model. names: the tensors that there are in the file; none on the way back."""
        raise NotImplementedError

    def dropped(self, config: XLConfig) -> list[str]:
        """Patterns of the tensors that are not converted, on purpose."""
        return [*self.drops, *map(re.escape, self.ties(config))]

    def ties(self, config: XLConfig) -> dict[str, str]:
        """Tensors that a file may hold a second time, for they are tied: name -> that of its equal, which is converted."""
        return {f"{self.head}.weight": self.embedding} if config.tie_word_embeddings else {}

    def tolerance(self, config: XLConfig) -> float:
        """How far logits of the foreign class may be from ours, in float32, as a part of the largest: rounding by other
        kernels, and what the class itself rounds."""
        return 3e-4

    def fields(self, config: XLConfig) -> dict[str, Any]:
        """The source's config of a model of this package; what it cannot express is found by converting it again."""
        raise NotImplementedError


class ForeignFiles(Family):
    """A family that is recognised by its files and not by a config.json of Transformers.

    settings: fields that the files do not show. aliases: other names that a person may give fields by. of_a_run: what such a
    person may give too, and that is no property of a model.
    """

    has_full_attention = False
    has_word_vocabulary = True
    runs_back = False
    settings: ClassVar[tuple[str, ...]] = ()
    aliases: ClassVar[dict[str, str]] = {"n_token": "vocab_size", "ntokens": "vocab_size", "tie_weight": "tie_word_embeddings"}
    of_a_run: ClassVar[tuple[str, ...]] = ("tgt_len", "eval_tgt_len", "ext_len", "model_class", "batch_size", "proj_same_dim")

    def find(self, source: Path) -> Path | None:
        """The file (or prefix of files) of this family that `source` names or holds."""
        raise NotImplementedError

    def open(self, path: Path) -> Any:
        """Its tensors."""
        raise NotImplementedError

    def shown(self, files: Any) -> dict[str, Any]:
        """The fields that the files show."""
        raise NotImplementedError

    def joined(self, files: Any, given: dict[str, Any]) -> SourceFields:
        """What the files show and what is given beside them; the two must not contradict each other."""
        shown = self.shown(files)
        given = {self.aliases.get(name, name): value for name, value in given.items()}
        for name in shown.keys() & given.keys():
            if shown[name] != given[name]:
                raise InputError(
                    f"{files.where}: shows {name}={shown[name]!r}, but the settings beside it say {given[name]!r}; correct them"
                )
        if missing := [name for name in self.settings if name not in shown and name not in given]:
            example = {"mem_len": 1600, "clamp_len": 1000, "same_length": True, "pre_lnorm": False, "attn_type": 0}
            text = ", ".join(f'"{name}": {str(example[name]).lower()}' for name in missing)
            raise InputError(
                f"{files.where}: does not show {', '.join(missing)}; write the values of its run into a JSON "
                f"file, such as {{{text}}}, and give it with --settings, or put it beside the checkpoint as config.json"
            )
        values = given | shown
        try:  # the former config has these fields, and knows their types
            TransfoXLConfig(**{name: value for name, value in values.items() if name in TransfoXLConfig.__annotations__})
        except Exception as error:  # several classes of error, according to which check failed
            raise InputError.about(f"{files.where} (settings)", error) from error
        fields = SourceFields(files.where, values)
        fields.ignore(*self.of_a_run)
        return fields
