"""A model on the Hub: a bundle that stands alone, its model card, and the upload of both in one commit.

A bundle is what `save_pretrained` writes, the code among it (`XLConfig.save_pretrained`), with tokenizer and card beside it.
"""

import contextlib
import json
import math
import shutil
import tempfile
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import (
    CommitInfo,
    CommitOperationAdd,
    CommitOperationDelete,
    EvalResult,
    HfApi,
    ModelCard,
    ModelCardData,
)
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, OfflineModeIsEnabled
from huggingface_hub.utils import validate_repo_id
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from .configuration_xl import XLConfig
from .conversion.convert import FIELDS_OF_SCHEMES
from .evaluate import EvaluationResult, ModelSettings
from .memories import MEMORY_MECHANISMS
from .modeling_xl import AUTO_CLASSES, XLForCausalLM, XLPreTrainedModel
from .text import InputError
from .train import load_config

CARD_FILE = "README.md"  # as the Hub names it
# Inside the package once installed from a wheel, beside it in a checkout.
TEMPLATES = (Path(__file__).parent / "model_card.md", Path(__file__).parent.parent / "model_card.md")
# By Auto class: the task as the Hub names it, and in words.
TASKS = {
    "AutoModel": ("feature-extraction", "A decoder without a head"),
    "AutoModelForCausalLM": ("text-generation", "A decoder language model"),
    "AutoModelForSequenceClassification": ("text-classification", "A classifier of texts"),
    "AutoModelForTokenClassification": ("token-classification", "A classifier of tokens"),
    "AutoModelForQuestionAnswering": ("question-answering", "A model that marks answers in a text"),
}
METRICS = {
    "bits_per_byte": "bits per byte",
    "bits_per_character": "bits per character",
    "perplexity": "perplexity of a token",
}
# As `save_pretrained` names them. Those of an earlier push, cut into another number of files, would be loaded instead.
WEIGHT_FILES = ("model.safetensors", "model-?????-of-?????.safetensors", "model.safetensors.index.json")
TEMPLATE_FILE = "chat_template.jinja"  # of an earlier tokenizer, which another would take for its own


@dataclass(frozen=True)
class CardFacts:
    """What a card says that the model does not know. `license`, `datasets` and `base_model` are ids of the Hub, `languages`
    codes; `evaluations` are the name of a text each, and what was measured on it."""

    license: str | None = None
    languages: Sequence[str] = ()
    datasets: Sequence[str] = ()
    base_model: str | None = None
    training_data: str | None = None
    evaluations: Sequence[tuple[str, EvaluationResult]] = ()


def load_bundle(source: str | Path) -> tuple[XLPreTrainedModel, PreTrainedTokenizerBase | None]:
    """The model of a folder, as the class that it was saved as, and its tokenizer where it has one.

    Raises InputError where it is no model of this package, or where its weights are not all there.
    """
    folder = Path(source)
    if not (folder / "config.json").is_file():
        raise InputError(f"{source}: has no config.json; give the folder of a saved model")
    config, _ = load_config(folder)
    names = config.architectures or [XLForCausalLM.__name__]
    model_class = next((found for found in AUTO_CLASSES.values() if found.__name__ == names[0]), None)
    if model_class is None:
        known = ", ".join(found.__name__ for found in AUTO_CLASSES.values())
        raise InputError(f"{source}: architectures={names!r} is none of {known}; save it as one of them")
    try:
        model, info = model_class.from_pretrained(folder, output_loading_info=True)
    except Exception as error:  # several classes of error, according to which file is wrong and how
        raise InputError.about(source, error) from error
    if others := sorted({*info["missing_keys"], *info["unexpected_keys"]}):
        raise InputError(f"{source}: its weights are of another model than its config says ({', '.join(others[:4])}, ...)")
    if not (folder / "tokenizer_config.json").is_file():
        return model, None
    try:
        return model, AutoTokenizer.from_pretrained(folder)
    except Exception as error:
        raise InputError.about(f"{source}: its tokenizer could not be loaded", error) from error


def read_evaluations(path: str | Path, source: str | Path, config: XLConfig) -> list[EvaluationResult]:
    """The results in a file that holds what `modeling-xl evaluate --json` printed; of several models, those of `source`.

    Raises InputError where it holds something else, or results of a model that is another than `config` says.
    """
    try:
        entries = json.loads(Path(path).read_text(encoding="utf-8"))
        found = [
            (entry["model"], EvaluationResult(**{name: value for name, value in entry.items() if name != "model"}))
            for entry in entries
        ]
    except OSError as error:
        raise InputError(f"{path}: cannot be read ({error.strerror}); name a file of results") from None
    except (ValueError, TypeError, KeyError):
        raise InputError(f"{path}: is not what `modeling-xl evaluate --json` prints without --recl; save that") from None
    if len({name for name, _ in found}) > 1:
        found = [(name, result) for name, result in found if Path(name).resolve() == Path(source).resolve()]
    if not found:
        raise InputError(f"{path}: holds no result of {source}; name a file that does")
    for _, result in found:
        for name in ("model_type", "position_type", "memory_type"):
            if getattr(result, name) != getattr(config, name):
                raise InputError(
                    f"{path}: was measured with {name}={getattr(result, name)!r}, and {source} has {getattr(config, name)!r}; "
                    "name results of this model"
                )
        for name in METRICS:
            value = getattr(result, name)
            if not isinstance(value, int | float) or not math.isfinite(value):
                raise InputError(f"{path}: {name}={value!r} is not a finite number; measure again")
    return [result for _, result in found]


def make_card(
    model: XLPreTrainedModel, repo_id: str, facts: CardFacts | None = None, *, has_tokenizer: bool = True
) -> ModelCard:
    """The card of a model that will lie at `repo_id`: its settings, its reach, how to load it, what it does not do."""
    facts = facts or CardFacts()
    config = model.config
    auto_class = next(name for name, model_class in AUTO_CLASSES.items() if isinstance(model, model_class))
    task, kind = TASKS[auto_class]
    name = repo_id.rpartition("/")[2]
    memory_types = list(dict.fromkeys(config.layer_memory_types))
    results = [result for text, measured in facts.evaluations for result in _eval_results(task, text, measured)]
    data = ModelCardData(
        library_name="transformers",
        pipeline_tag=task,
        license=facts.license,
        language=list(facts.languages) or None,
        datasets=list(facts.datasets) or None,
        base_model=facts.base_model,
        tags=["modeling_xl", "custom_code", f"position-{config.position_type}", *(f"memory-{kind}" for kind in memory_types)],
        model_name=name if results else None,
        eval_results=results or None,
    )
    return ModelCard.from_template(
        data,
        template_path=str(next(path for path in TEMPLATES if path.is_file())),
        name=name,
        repo_id=repo_id,
        kind=kind,
        auto_class=auto_class,
        position_type=config.position_type,
        memory_type=", ".join(memory_types),
        sizes=_sizes(model),
        has_tokenizer=has_tokenizer,
        generates=model.can_generate(),
        any_feeding=config.segment_len is not None or not config.uses_grid,
        no_roll_back=config.why_no_roll_back,
        training_data=facts.training_data or "Not stated.",
        evaluations=[(text.replace("|", "\\|"), measured) for text, measured in facts.evaluations],
        license_text=f"Weights: {facts.license}." if facts.license else "No licence of the weights was stated: ask the author.",
    )


def fill_card(model: XLPreTrainedModel, folder: str | Path, repo_id: str, *, token=None, revision: str | None = None) -> None:
    """Puts the model's card in place of the empty one in `folder`, unless the repository has a card already, which stays."""
    if HfApi(token=token).file_exists(repo_id, CARD_FILE, revision=revision):
        return
    path = Path(folder) / CARD_FILE
    card = make_card(model, repo_id, has_tokenizer=(path.parent / "tokenizer_config.json").is_file())
    given = ModelCard.load(path).data.get("tags") or () if path.is_file() else ()
    card.data["tags"] = list(dict.fromkeys([*card.data["tags"], *given]))
    card.save(path)


def _eval_results(task: str, text: str, measured: EvaluationResult) -> list[EvalResult]:
    settings = {item.name: getattr(measured, item.name) for item in fields(ModelSettings)} | {"streams": measured.streams}
    return [
        EvalResult(
            task_type=task,
            dataset_type=text,
            dataset_name=text,
            metric_type=metric,
            metric_name=words if measured.mem_len is None else f"{words}, memory {measured.mem_len}",
            metric_value=getattr(measured, metric),
            metric_args={name: value for name, value in settings.items() if value is not None},
        )
        for metric, words in METRICS.items()
    ]


def _sizes(model: XLPreTrainedModel) -> dict[str, Any]:
    """The rows of the card's first table."""
    config = model.config
    mechanisms = [MEMORY_MECHANISMS[name] for name in dict.fromkeys(config.layer_memory_types)]
    of_scheme = FIELDS_OF_SCHEMES.get(config.position_type, ("rope_parameters",) if config.rope_parameters else ())
    of_schemes = {name for names in FIELDS_OF_SCHEMES.values() for name in names}
    of_memory = dict.fromkeys(name for mechanism in mechanisms for name in mechanism.config_fields if name not in of_schemes)
    rows = {
        "parameters": f"{model.num_parameters():,}",
        "layers, hidden size, heads": f"{config.num_hidden_layers}, {config.hidden_size}, {config.num_attention_heads}",
        "vocabulary": f"{config.vocab_size:,}",
        "dtype": str(model.dtype).removeprefix("torch."),
    }
    rows |= {f"`{name}`": value for name in of_scheme if (value := getattr(config, name)) is not None}
    if config.uses_grid:
        rows["segment, memory (tokens)"] = f"{config.segment_len or 'a call'}, {config.mem_len}"
    rows |= {f"`{name}`": getattr(config, name) for name in of_memory}
    for what, name, attribute in (
        ("attention window (keys, its own included)", "attention_window", "uses_window"),
        ("sink tokens", "num_sink_tokens", "uses_sinks"),
        ("memory before the text", "initial_memory", "may_start_with_zeros"),
    ):
        if any(getattr(mechanism, attribute) for mechanism in mechanisms):
            rows[what] = "none" if getattr(config, name) is None else getattr(config, name)
    reach, figure = config.max_context, config.layers_times_memory
    rows["reach: largest distance at which a token can change a logit"] = f"{reach:,}" if reach < math.inf else "no limit"
    if figure is not None:
        rows["layers times memory, the figure papers give"] = f"{figure:,}"
    return rows


def write_bundle(
    model: XLPreTrainedModel,
    folder: str | Path,
    card: ModelCard | str | Path,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> None:
    """Writes into `folder` all that `push` would upload. card: made, or the path of one, which is copied byte for byte."""
    model.save_pretrained(folder)
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    if isinstance(card, ModelCard):
        card.save(Path(folder) / CARD_FILE)
        return
    try:
        shutil.copyfile(card, Path(folder) / CARD_FILE)
    except OSError as error:
        raise InputError(f"{card}: cannot be read ({error.strerror}); name a model card") from None


def push(
    model: XLPreTrainedModel,
    repo_id: str,
    tokenizer: PreTrainedTokenizerBase | None = None,
    *,
    card: ModelCard | str | Path | None = None,
    overwrite_card: bool = False,
    private: bool | None = None,
    revision: str | None = None,
    create_pr: bool = False,
    message: str | None = None,
    token: str | None = None,
) -> CommitInfo:
    """Uploads a bundle to the repository `repo_id` (OWNER/NAME), which is made if it is not there, in one commit: one that
    breaks leaves the last revision whole.

    card: made, or the path of one (None: `make_card`'s). A card that lies in the repository stays, with a warning, unless
    overwrite_card. private: of a new repository; True is refused where there is a public one. revision: a branch, made if it
    is not there. create_pr: open a pull request instead. token: None for that of HF_TOKEN or `hf auth login`.
    Raises InputError for what the Hub refuses; errors of the network are huggingface_hub's.
    """
    check_repo_id(repo_id)
    if create_pr and revision is not None:
        raise InputError(f"revision={revision!r}: a pull request goes to the main branch; leave one of them out")
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        write_bundle(model, folder, card or make_card(model, repo_id, has_tokenizer=tokenizer is not None), tokenizer)
        with _explained(repo_id):
            api = HfApi(token=token)
            api.create_repo(repo_id, private=private, exist_ok=True)
            if private and not api.repo_info(repo_id).private:
                raise InputError(f"{repo_id}: exists and is public; make it private in its settings, or leave private out")
            if revision is not None and not revision.startswith("refs/"):
                api.create_branch(repo_id, branch=revision, exist_ok=True)
            there = api.list_repo_files(repo_id, revision=revision)
            if CARD_FILE in there and not overwrite_card:
                (folder / CARD_FILE).unlink()
                mend = "overwrite_card, or --overwrite-card, replaces it"
                warnings.warn(f"{repo_id}: its {CARD_FILE} stays as it is; {mend}", stacklevel=2)
            new = {file.name: file for file in sorted(folder.iterdir())}
            replaced = (*WEIGHT_FILES, TEMPLATE_FILE) if tokenizer is not None else WEIGHT_FILES
            stale = [name for name in there if name not in new and any(fnmatchcase(name, one) for one in replaced)]
            # Not upload_folder, which cuts large uploads into several commits.
            return api.create_commit(
                repo_id,
                [
                    *(CommitOperationAdd(name, file) for name, file in new.items()),
                    *(CommitOperationDelete(name) for name in stale),
                ],
                commit_message=message or f"Upload {type(model).__name__}",
                revision=revision,
                create_pr=create_pr,
            )


def check_repo_id(repo_id: str) -> None:
    """Raises InputError unless it is OWNER/NAME, as the Hub takes names."""
    try:
        validate_repo_id(repo_id)
    except HFValidationError as error:
        raise InputError.about(repo_id, error) from None
    if "/" not in repo_id:
        raise InputError(f"{repo_id}: must be OWNER/NAME; put your name, or an organisation's, before it")


@contextlib.contextmanager
def _explained(repo_id: str) -> Iterator[None]:
    """What the user can mend of what the Hub answers becomes an InputError."""
    try:
        yield
    except OfflineModeIsEnabled:
        raise InputError("HF_HUB_OFFLINE is set, so that nothing can be uploaded; unset it") from None
    except InputError:
        raise
    except ValueError as error:  # as about the metadata of a card
        raise InputError(f"{repo_id}: {error}") from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status not in (401, 403, 404):
            raise
        raise InputError(
            f"{repo_id}: refused by the Hub (HTTP {status}); give a token that may write there, in HF_TOKEN or with "
            "`hf auth login`"
        ) from error
