"""The command `modeling-xl`: `train`, `evaluate`, `inspect`, `memory`, `generate`, `convert` and `push`.

Bad input ends with exit code 2 and one line on stderr, a failure with 1.
"""

import argparse
import contextlib
import json
import os
import shutil
import sys
import traceback
import warnings
from collections.abc import Callable, Iterator
from io import BufferedReader
from pathlib import Path
from typing import Any, NoReturn, cast

from .cli_texts import add_text_options, check_text_options, read_corpus, read_training_corpora

PENDING_FILE = "pending.json"  # beside a saved cache: the ids that the model produced after it and has not read yet
PROMPT_CHUNK = 4096  # tokens of a prompt read in one call
DTYPES = ("float32", "bfloat16", "float16", "float64")


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message} (see {self.prog} --help)\n")


def _number(kind: Callable[[str], Any], low: float, high: float = float("inf"), *, above: bool = False) -> Any:
    """An argparse type: a number of `kind` in [low, high], or (low, high] with `above`."""

    def parse(text: str) -> Any:
        word = "an integer" if kind is int else "a number"
        rule = f"{word} {'above' if above else 'of at least'} {low}" + (f" and at most {high}" if high < 1e300 else "")
        try:
            value = kind(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not {word}") from None
        if not low <= value <= high or (above and value == low):
            raise argparse.ArgumentTypeError(f"{text} is not {rule}")
        return value

    return parse


def _setting(text: str) -> tuple[str, Any]:
    """An argparse type: NAME=VALUE, the value as JSON, or else as it stands."""
    name, sign, value = text.partition("=")
    if not (name and sign):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=VALUE")
    try:
        return name, json.loads(value)
    except ValueError:
        return name, value


def _named_file(text: str) -> tuple[str, str]:
    """An argparse type: NAME=FILE."""
    name, _, path = text.partition("=")
    if not (name and path):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=FILE")
    return name, path


def build_parser() -> argparse.ArgumentParser:
    count, count_or_0 = _number(int, 1), _number(int, 0)
    positive, at_least_0 = _number(float, 0, above=True), _number(float, 0)
    parser = _Parser(
        prog="modeling-xl", description="Train, evaluate and run language models with segment memory (modeling_xl)."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    train = commands.add_parser(
        "train",
        help="train a model on text, from scratch or from the weights of another",
        description="Trains a model with fresh weights, or those of --weights, on text files or a dataset, carrying its memory "
        "along contiguous streams, and saves model, tokenizer and generation config. Settings not given come from the "
        "training.json beside the config.",
    )
    train.set_defaults(run=_train)
    train.add_argument("config", metavar="CONFIG", help="folder with a config.json, JSON file, or published name")
    train.add_argument("--train-file", dest="files", nargs="+", metavar="FILE", help="UTF-8 text, read in this order")
    add_text_options(train)
    train.add_argument("--output-dir", required=True, metavar="DIR", help="where the model goes; must be new or empty")
    train.add_argument("--overwrite", action="store_true", help="replace the files of a model in the folder")
    held_out = train.add_mutually_exclusive_group()
    held_out.add_argument("--eval-file", nargs="+", metavar="FILE", help="UTF-8 text to evaluate on at the end")
    held_out.add_argument("--eval-dataset-split", metavar="SPLIT", help="evaluate on this split of the dataset")
    held_out.add_argument(
        "--eval-fraction",
        type=_number(float, 0, 0.5),
        default=0.05,
        metavar="X",
        help="else: hold out the last part of the training text (default 0.05; 0: no evaluation)",
    )
    train.add_argument("--weights", metavar="DIR", help="begin with the weights of this model, such as a converted one")
    train.add_argument("--tokenizer", metavar="DIR", help="folder of a tokenizer (default: that of --weights, or bytes)")
    train.add_argument("--max-steps", type=count, metavar="N", help="steps (default: one pass over the text)")
    train.add_argument("--max-bytes", type=count, metavar="N", help="stop after this much text")
    train.add_argument("--batch-size", type=count, metavar="B", help="parallel streams a process")
    train.add_argument("--stream-len", type=count, metavar="N", help="start from an empty memory after so many tokens")
    train.add_argument("--segment-len", type=count, metavar="L", help="tokens a segment, instead of the config's")
    train.add_argument("--mem-len", type=count_or_0, metavar="M", help="tokens of memory, instead of the config's")
    train.add_argument("--learning-rate", type=positive, metavar="X", help="peak of the cosine schedule")
    train.add_argument("--warmup-steps", type=count_or_0, metavar="N", help="steps of linear warm-up")
    train.add_argument("--weight-decay", type=at_least_0, metavar="X", help="AdamW's, on matrices only")
    train.add_argument("--max-grad-norm", type=positive, metavar="X", help="clip the gradient's norm")
    train.add_argument("--mixed-precision", choices=("no", "bf16", "fp16"), help="number format of the forward pass")
    train.add_argument("--seed", type=count_or_0, metavar="N", help="of the weights and dropout")
    train.add_argument(
        "--set",
        type=_setting,
        nargs="+",
        default=[],
        metavar="NAME=VALUE",
        help="further fields of Transformers' TrainingArguments, such as lr_scheduler_type=inverse_sqrt adam_beta2=0.999",
    )
    train.add_argument(
        "--save-steps",
        type=count,
        metavar="N",
        help="every N steps make a checkpoint in OUTPUT_DIR.checkpoints, from which the same command goes on if it was ended "
        "before; they are taken away when the model is saved",
    )

    evaluate = commands.add_parser(
        "evaluate",
        help="bits per byte and perplexity of a text under a model, and how far back it looks",
        description="Scores every token but the first of the files, joined in the given order, or of each row of a dataset, "
        "with memory carried along. Settings not given are the model's own.",
    )
    evaluate.set_defaults(run=_evaluate)
    evaluate.add_argument("model", metavar="MODEL", help="folder of a model")
    files = evaluate.add_argument("files", nargs="+", metavar="FILE", help="UTF-8 text; - is standard input, read as it comes")
    files.required = False  # --dataset takes its place; with nargs="*" no option could stand before the files
    add_text_options(evaluate)
    evaluate.add_argument("--compare", nargs="+", default=[], metavar="MODEL", help="further models, on the same text")
    evaluate.add_argument("--segment-len", type=count, metavar="L", help="tokens a segment")
    evaluate.add_argument(
        "--mem-len",
        type=count_or_0,
        nargs="+",
        metavar="M",
        help="tokens of memory; several compare. A window as long as memory, or one longer, moves with it",
    )
    evaluate.add_argument("--clamp-len", type=count, metavar="N", help="largest distance told apart (xl)")
    evaluate.add_argument("--window", type=count, metavar="W", help="keys a query sees at most, its own included")
    evaluate.add_argument(
        "--streams",
        type=count,
        default=1,
        metavar="S",
        help="cut the text into S parts, each from an empty memory: faster, slightly worse (default 1)",
    )
    evaluate.add_argument("--batch-size", type=count, metavar="B", help="streams run at once; no effect on the result")
    evaluate.add_argument(
        "--by-position", action="store_true", help="print the loss by how many tokens of stream or document are before"
    )
    evaluate.add_argument(
        "--recl",
        action="store_true",
        help="instead of the loss, the relative effective context length; models of other types may take part",
    )
    evaluate.add_argument(
        "--recl-step",
        type=count,
        metavar="N",
        help="contexts are multiples of N, itself one of the segment (default: it, or 64)",
    )
    evaluate.add_argument("--recl-max", type=count, metavar="N", help="longest context (default: 16 steps)")
    evaluate.add_argument("--recl-positions", type=count, default=500, metavar="N", help="tokens predicted (default 500)")
    evaluate.add_argument("--json", action="store_true", help="print a JSON list, one object a model and memory length")
    evaluate.add_argument(
        "--plot", metavar="PNG", help="draw what is asked for: loss by memory length, by position, or the RECL"
    )

    inspect = commands.add_parser(
        "inspect",
        help="where a model looks: how much attention falls on memory, and how far back",
        description="Reads a text as one stream with memory and shows, for each layer, the share of its attention that falls "
        "on sinks, compressed slots, memory and the query's own segment, and at what distance. Settings not given are the "
        "model's own.",
    )
    inspect.set_defaults(run=_inspect)
    inspect.add_argument("model", metavar="MODEL", help="folder of a model")
    inspect.add_argument("files", nargs="+", metavar="FILE", help="UTF-8 text; - is standard input, read as it comes")
    inspect.add_argument("--segment-len", type=count, metavar="L", help="tokens a segment")
    inspect.add_argument("--mem-len", type=count_or_0, metavar="M", help="tokens of memory")
    inspect.add_argument("--window", type=count, metavar="W", help="keys a query sees at most, its own included")
    inspect.add_argument("--json", action="store_true", help="print a JSON object, with the shares of each head")
    inspect.add_argument("--plot", metavar="PNG", help="draw the shares by layer, by head and by distance")

    memory = commands.add_parser(
        "memory",
        help="what a config costs: bytes of cache, reach, parameters, multiply-accumulates a token",
        description="Counts, without computing a number of the model, what it holds after so many tokens and what the next "
        "ones cost. Settings not given are the config's own.",
    )
    memory.set_defaults(run=_memory)
    memory.add_argument("config", metavar="CONFIG", help="folder with a config.json, JSON file, or published name")
    memory.add_argument("--segment-len", type=count, metavar="L", help="tokens a segment")
    memory.add_argument("--mem-len", type=count_or_0, nargs="+", metavar="M", help="tokens of memory; several compare")
    memory.add_argument(
        "--tokens", type=count, nargs="+", default=[1024, 16384], metavar="N", help="text read before (default 1024 16384)"
    )
    memory.add_argument("--dtype", choices=DTYPES, default="float32", help="of weights and memory (default float32)")
    memory.add_argument("--json", action="store_true", help="print a JSON list, one object a memory length and text length")

    generate = commands.add_parser(
        "generate",
        help="continue a text",
        description="Prints the continuation of a text as it comes: greedy, or sampled when --temperature, --top-k or "
        "--top-p is given. A cache written with --cache-out holds all that was read and printed; a greedy run that "
        "goes on from it gives the same text as one long run.",
    )
    generate.set_defaults(run=_generate)
    generate.add_argument("model", metavar="MODEL", help="folder of a model")
    prompt = generate.add_mutually_exclusive_group()
    prompt.add_argument("--prompt", metavar="TEXT", help="the text to continue; with --cache-in, what comes next in it")
    prompt.add_argument("--prompt-file", metavar="FILE", help="the same, from a UTF-8 file")
    generate.add_argument("--max-new-tokens", type=count, default=200, metavar="N", help="default 200")
    generate.add_argument("--cache-in", metavar="DIR", help="go on from this cache")
    generate.add_argument("--cache-out", metavar="DIR", help="save the cache here at the end")
    generate.add_argument("--temperature", type=at_least_0, metavar="X", help="0: greedy")
    generate.add_argument("--top-k", type=count, metavar="K", help="sample from the K likeliest tokens")
    generate.add_argument("--top-p", type=_number(float, 0, 1, above=True), metavar="P", help="sample from the likeliest P")
    generate.add_argument("--seed", type=count_or_0, default=0, metavar="N", help="of the sampling (default 0)")

    convert = commands.add_parser(
        "convert",
        help="make a model of this package of a foreign checkpoint, or the other way round",
        description="Recognises the family of a checkpoint, converts it tensor by tensor, loads the result and, where "
        "Transformers has the source's own class, compares logits. Nothing in the source is run. What fails leaves no target.",
    )
    convert.set_defaults(run=_convert)
    convert.add_argument("source", metavar="SOURCE", help="folder, file or prefix of a checkpoint, or a repository of the Hub")
    convert.add_argument("target", metavar="TARGET", help="folder for the result; must be new or empty")
    convert.add_argument("--to", metavar="FAMILY", help="SOURCE is a model of this package; make a checkpoint of this family")
    convert.add_argument(
        "--memory",
        metavar="M",
        help="memory_type of the result (default: the source's own, none for models trained with full attention); with --to, "
        "none gives the weights alone",
    )
    convert.add_argument("--mem-len", type=count_or_0, metavar="M", help="tokens of memory")
    convert.add_argument("--segment-len", type=count, metavar="L", help="tokens a segment")
    convert.add_argument(
        "--sink-tokens",
        type=count_or_0,
        metavar="S",
        help="first tokens that stay attended for ever (default: 4 where a memory is given to a model trained with full "
        "attention)",
    )
    convert.add_argument("--dtype", choices=DTYPES, help="of the result (default: kept)")
    convert.add_argument("--settings", metavar="JSON", help="file with config fields that the source's files do not show")
    convert.add_argument(
        "--max-shard-size",
        type=_number(int, 1),
        default=2048,
        metavar="MIB",
        help="largest file, and about the memory that writing needs, in MiB (default 2048)",
    )
    convert.add_argument("--no-check", action="store_true", help="do not load the result and compare it")

    push = commands.add_parser(
        "push",
        help="upload a model with its code, tokenizer and a model card to the Hub",
        description="Saves a model, the code that runs it, its tokenizer, its generation config and a model card in a "
        "temporary folder, and uploads them in one commit: an upload that breaks leaves the last revision as it was.",
    )
    push.set_defaults(run=_push)
    push.add_argument("model", metavar="MODEL", help="folder of a model")
    push.add_argument("repo_id", metavar="REPO_ID", help="OWNER/NAME of the repository, which is made if it is not there")
    push.add_argument("--private", action="store_true", help="make the repository private; refused where it is public already")
    push.add_argument("--revision", metavar="BRANCH", help="upload to this branch, which is made if it is not there")
    push.add_argument("--create-pr", action="store_true", help="open a pull request instead")
    push.add_argument("--message", metavar="TEXT", help="of the commit")
    push.add_argument(
        "--token-env",
        metavar="NAME",
        help="environment variable with the token (default: HF_TOKEN, or else what `hf auth login` stored)",
    )
    push.add_argument(
        "--output-dir", metavar="DIR", help="write here what would be uploaded, and upload nothing; must be new or empty"
    )
    push.add_argument("--card", metavar="FILE", help="model card to upload (default: README.md of MODEL, or a new one)")
    push.add_argument("--overwrite-card", action="store_true", help="replace the card in the repository, which else stays")
    push.add_argument("--license", metavar="ID", help="on a new card: licence of the weights, such as apache-2.0")
    push.add_argument("--language", nargs="+", metavar="CODE", help="on a new card: languages of the text, such as en")
    push.add_argument("--training-data", metavar="TEXT", help="on a new card: what the model was trained on")
    push.add_argument("--trained-on", nargs="+", metavar="ID", help="on a new card: the same, as datasets of the Hub")
    push.add_argument("--base-model", metavar="ID", help="on a new card: model of the Hub that this one was made from")
    push.add_argument(
        "--evaluation",
        type=_named_file,
        nargs="+",
        metavar="NAME=JSON",
        help="on a new card: name of a text, and a file with what `modeling-xl evaluate --json` printed of it",
    )
    return parser


def main(argv: list[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    from transformers.utils import logging

    from .text import InputError

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            # One line that says what to look at, without the place in the code that gave it.
            warnings.showwarning = lambda message, *_: print(f"modeling-xl: warning: {message}", file=sys.stderr)
            args.run(args)
        sys.stdout.flush()
        return 0
    except InputError as error:
        print(f"modeling-xl {args.command}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    except BrokenPipeError:  # whoever read the output has gone; what is left of it must not raise again at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except KeyboardInterrupt:
        print(f"modeling-xl {args.command}: interrupted", file=sys.stderr)
        return 130
    except Exception as error:
        traceback.print_exc()
        print(f"modeling-xl {args.command}: failed: {type(error).__name__}: {error}", file=sys.stderr)
        return 1


@contextlib.contextmanager
def _blaming(what: str) -> Iterator[None]:
    """Errors of a library about what the user named become input errors that name it."""
    from safetensors import SafetensorError

    from .text import InputError

    try:
        yield
    except InputError:
        raise
    except (ValueError, OSError, TypeError, KeyError, SafetensorError) as error:
        raise InputError.about(what, error) from error


def _load_tokenizer(source: str) -> Any:
    from transformers import AutoTokenizer

    with _blaming(f"{source}: no tokenizer could be loaded (`ByT5Tokenizer(extra_ids=0).save_pretrained` makes one)"):
        return AutoTokenizer.from_pretrained(source)


def _tokenizer_of_model(source: str) -> Any:
    """The tokenizer beside a model of this package, of which nothing but its config is read."""
    from transformers import PreTrainedConfig

    from .configuration_xl import XLConfig
    from .text import InputError

    if not Path(source).is_dir() and source.count("/") != 1:
        raise InputError(f"{source}: no model could be loaded: there is no such folder, and models on the Hub are OWNER/NAME")
    with _blaming(f"{source}: no model could be loaded"):
        values, _ = PreTrainedConfig.get_config_dict(source)
        model_type = values.get("model_type")
        if model_type != XLConfig.model_type:
            raise InputError(
                f"{source}: is a model of type {model_type!r} and not 'xl'; make one of it with modeling-xl convert"
            )
    return _load_tokenizer(source)


def _load_model(source: str, tokenizer: Any) -> Any:
    """The model, in eval mode on the best device there is."""
    from accelerate import PartialState

    from .modeling_xl import XLForCausalLM
    from .text import InputError

    with _blaming(f"{source}: no model could be loaded"):
        model = XLForCausalLM.from_pretrained(source).to(PartialState().device).eval()
    if len(tokenizer) > model.config.vocab_size:
        raise InputError(
            f"{source}: the tokenizer has {len(tokenizer)} ids and the model {model.config.vocab_size}; "
            "save the tokenizer that the model was trained with beside it"
        )
    return model


def _train(args: argparse.Namespace) -> None:
    from dataclasses import fields

    from accelerate import PartialState

    from .evaluate import evaluate
    from .text import byte_tokenizer
    from .train import (
        TrainingSettings,
        check_output_dir,
        load_config,
        new_model,
        pretrained_model,
        save,
        train,
        training_settings,
    )

    check_text_options(args, "--train-file")
    check_output_dir(args.output_dir, args.overwrite)
    config, stored = load_config(args.config, segment_len=args.segment_len, mem_len=args.mem_len)
    given = {item.name: getattr(args, item.name) for item in fields(TrainingSettings) if item.name != "others"}
    settings = training_settings(stored | dict(args.set), **given)
    # Refuses, before text is read, what it cannot take; and sets up the processes, if there are several, as it says.
    settings.arguments(args.output_dir)
    named = args.tokenizer or args.weights
    tokenizer = _load_tokenizer(named) if named else byte_tokenizer()
    corpus, held_out = read_training_corpora(args, tokenizer)
    model = pretrained_model(args.weights, config, tokenizer) if args.weights else new_model(config, tokenizer, settings.seed)
    checkpoints = Path(f"{Path(args.output_dir)}.checkpoints") if settings.save_steps else None
    result = train(model, corpus, settings, tokenizer, progress=True, checkpoints=checkpoints)
    if PartialState().is_main_process:
        save(model, tokenizer, args.output_dir, args.overwrite)
        if checkpoints is not None:
            shutil.rmtree(checkpoints)
    PartialState().wait_for_everyone()  # a launcher that sees one of them fail as it ends would end the others
    if not PartialState().is_main_process:
        return
    number = PartialState().num_processes
    processes = f" by {number} processes" if number > 1 else ""
    print(
        f"trained {result.steps} steps on {result.num_bytes} bytes in {result.seconds:.1f} s{processes}: "
        f"{result.bits_per_byte:.4f} bits per byte at the end; saved in {args.output_dir}"
    )
    if held_out.num_targets:
        streams = min(settings.batch_size, len(held_out) - 1)
        print("held out:", evaluate(model, held_out, tokenizer, streams=streams, progress=True))


def _evaluate(args: argparse.Namespace) -> None:
    from .evaluation_report import memory_table, plot, plot_positions, position_table

    _check_evaluate_options(args)
    if args.recl:
        _evaluate_recl(args)
        return
    results = {source: _losses(args, source) for source in [args.model, *args.compare]}
    named = {
        f"{source}, memory {result.mem_len}" if len(found) > 1 else source: result
        for source, found in results.items()
        for result in found
    }
    if args.json:
        _print_json([{"model": source, **result.to_dict()} for source, found in results.items() for result in found])
    else:
        for source, found in results.items():
            print(*(f"{source}: {result}" if args.compare else result for result in found), sep="\n")
        if len(named) > 1:
            print(f"\n{memory_table(results)}")
        if args.by_position:
            print(f"\n{position_table(named)}")
    if args.plot and args.by_position:
        plot_positions(named, args.plot)
    elif args.plot:
        plot(results, args.plot)


def _check_evaluate_options(args: argparse.Namespace) -> None:
    from .text import InputError

    check_text_options(args, "FILE")
    sources = [args.model, *args.compare]
    if repeated := [source for index, source in enumerate(sources) if source in sources[:index]]:
        raise InputError(f"{repeated[0]}: is named twice; name every model once")
    several = len(set(args.mem_len or ())) > 1
    one_only = {"several --mem-len": several, "--separator": args.separator is not None, "--streams": args.streams > 1}
    one_only |= {"--cache-dir": args.cache_dir is not None}
    others = one_only | {"--batch-size": args.batch_size is not None, "--by-position": args.by_position}
    others |= {"--dataset": args.dataset is not None}
    is_piped = _is_piped(args.files or [])
    for given, rule, refused in (
        (args.recl, "--recl measures something else, on text files held in memory", others),
        (is_piped, "standard input is read once, as one stream", one_only | {"--recl": args.recl, "--compare": args.compare}),
    ):
        if given and (found := [name for name, is_given in refused.items() if is_given]):
            raise InputError(f"{', '.join(found)}: {rule}; leave it out")
    if args.plot and not (several or args.by_position or args.recl):
        raise InputError(
            "--plot draws bits per byte against memory length, or what --by-position or --recl ask for; give several values "
            "to --mem-len, or one of those"
        )
    _check_plot(args.plot)


def _is_piped(files: list[str]) -> bool:
    """Whether the text is that of standard input."""
    from .text import InputError

    if "-" in files and len(files) > 1:
        raise InputError("-: standard input is read alone; leave the other files out")
    return "-" in files


def _check_plot(path: str | None) -> None:
    from .evaluation_report import require_matplotlib
    from .text import InputError

    if not path:
        return
    if not Path(path).absolute().parent.is_dir():
        raise InputError(f"{path}: its folder does not exist; make it first")
    require_matplotlib()


def _losses(args: argparse.Namespace, source: str) -> list[Any]:
    """The results of one model, one for each memory length."""
    from .evaluate import evaluate, evaluate_pieces
    from .text_pieces import read_pieces

    options = {"segment_len": args.segment_len, "clamp_len": args.clamp_len, "attention_window": args.window, "progress": True}
    mem_lens = args.mem_len or [None]
    tokenizer = _tokenizer_of_model(source)
    if args.files == ["-"]:
        pieces = read_pieces(cast(BufferedReader, sys.stdin.buffer))
        return [evaluate_pieces(_load_model(source, tokenizer), pieces, tokenizer, mem_len=mem_lens[0], **options)]
    corpus = read_corpus(args, tokenizer)  # before the model is loaded
    model = _load_model(source, tokenizer)
    options |= {"streams": args.streams, "batch_size": args.batch_size}
    return [evaluate(model, corpus, tokenizer, mem_len=mem_len, **options) for mem_len in mem_lens]


def _evaluate_recl(args: argparse.Namespace) -> None:
    from .effective_context import check_same_vocabulary, measure_recl
    from .evaluation_report import plot_recl, recl_table
    from .text import encode, read_text

    text = read_text(args.files)
    loaded = {source: _load_any_model(source) for source in [args.model, *args.compare]}
    check_same_vocabulary({source: tokenizer for source, (_, tokenizer) in loaded.items()})
    results = measure_recl(
        {source: model for source, (model, _) in loaded.items()},
        encode(text, loaded[args.model][1]),
        step=args.recl_step,
        longest=args.recl_max,
        num_positions=args.recl_positions,
        segment_len=args.segment_len,
        mem_len=args.mem_len[0] if args.mem_len else None,
        clamp_len=args.clamp_len,
        attention_window=args.window,
        progress=True,
    )
    if args.json:
        _print_json([{"model": source, **result.to_dict()} for source, result in results.items()])
    else:
        print(recl_table(results))
        print(*(f"{source}: {result.settings}" for source, result in results.items()), sep="\n")
    if args.plot:
        plot_recl(results, args.plot)


def _load_any_model(source: str) -> tuple[Any, Any]:
    """A causal language model of any type, in eval mode on the best device there is, and its tokenizer."""
    from accelerate import PartialState
    from transformers import AutoModelForCausalLM, PreTrainedConfig

    from .configuration_xl import XLConfig

    with _blaming(f"{source}: no model could be loaded"):
        if PreTrainedConfig.get_config_dict(source)[0].get("model_type") == XLConfig.model_type:
            tokenizer = _tokenizer_of_model(source)
            return _load_model(source, tokenizer), tokenizer
        model = AutoModelForCausalLM.from_pretrained(source).to(PartialState().device).eval()
    return model, _load_tokenizer(source)


def _print_json(results: Any) -> None:
    print(json.dumps(results, indent=2))


def _inspect(args: argparse.Namespace) -> None:
    from .corpus import Corpus
    from .evaluation_report import attention_table, distance_table, plot_attention
    from .inspection import inspect_attention
    from .text_pieces import encode_pieces, read_pieces

    is_piped = _is_piped(args.files)
    _check_plot(args.plot)
    tokenizer = _tokenizer_of_model(args.model)
    if is_piped:
        pieces = encode_pieces(read_pieces(cast(BufferedReader, sys.stdin.buffer)), tokenizer)
    else:
        pieces = Corpus.from_files(args.files, tokenizer).pieces()
    result = inspect_attention(
        _load_model(args.model, tokenizer),
        pieces,
        segment_len=args.segment_len,
        mem_len=args.mem_len,
        attention_window=args.window,
        progress=True,
    )
    if args.json:
        _print_json({"model": args.model, **result.to_dict()})
    else:
        print(f"{attention_table(result)}\n\n{distance_table(result)}\n\n{result.settings}")
        if result.without_weights:
            print(f"layers without weights (linear attention): {', '.join(map(str, result.without_weights))}")
    if args.plot:
        plot_attention(result, args.plot)


def _memory(args: argparse.Namespace) -> None:
    from dataclasses import asdict

    import torch

    from .costs import count_costs
    from .evaluate import following_window
    from .evaluation_report import costs_table
    from .train import load_config

    found = []
    for mem_len in args.mem_len or [None]:
        config, _ = load_config(args.config, segment_len=args.segment_len)
        if mem_len is not None:
            window = following_window(config, mem_len)
            config, _ = load_config(args.config, segment_len=args.segment_len, mem_len=mem_len, attention_window=window)
        found += [count_costs(config, tokens, getattr(torch, args.dtype)) for tokens in args.tokens]
    if args.json:
        _print_json([{"config": args.config, **asdict(costs)} for costs in found])
    else:
        print(costs_table(found))


def _generate(args: argparse.Namespace) -> None:
    from transformers import set_seed

    from .cache_xl import XLCache
    from .text import InputError, encode, read_text, write_json

    if args.cache_out:
        _check_cache_dir(Path(args.cache_out))
    text = read_text([args.prompt_file]) if args.prompt_file else args.prompt or ""
    if not text and not args.cache_in:
        raise InputError("nothing to continue; give --prompt, --prompt-file or --cache-in")
    tokenizer = _tokenizer_of_model(args.model)
    model = _load_model(args.model, tokenizer)
    ids = encode(text, tokenizer).tolist()
    if args.cache_in:
        with _blaming(f"{args.cache_in}: no cache of this model could be loaded"):
            cache = XLCache.from_pretrained(args.cache_in, model.config).to(model.device)
            pending = Path(args.cache_in) / PENDING_FILE
            if pending.is_file():
                left = json.loads(pending.read_bytes())
                if left["after"] != cache.get_seq_length():
                    raise InputError(
                        f"{args.cache_in}: {PENDING_FILE} belongs to another state of the cache, as after a run that was "
                        "killed while saving; delete that file to go on, which loses the last printed character or word"
                    )
                ids = left["ids"] + ids
        if not ids:
            raise InputError(f"{args.cache_in}: holds no token still to be read; give --prompt or --prompt-file")
    else:
        cache = XLCache(model.config)

    sampling: dict[str, Any] = {"do_sample": False}
    if args.temperature != 0 and (args.temperature or args.top_k or args.top_p):
        sampling = {"do_sample": True, "temperature": args.temperature or 1.0}
        sampling |= {"top_k": args.top_k or 0, "top_p": args.top_p or 1.0}  # 0 and 1: no limit
        set_seed(args.seed)
    produced = model.generate(
        _read_prompt(model, cache, ids),
        cache=cache,
        new_tokens_only=True,
        max_new_tokens=args.max_new_tokens,
        streamer=_streamer(tokenizer),
        **sampling,
    )
    if args.cache_out:
        cache.save_pretrained(args.cache_out)
        # The last token was produced and not read: whoever goes on from the cache feeds it first.
        left = {"after": cache.get_seq_length(), "ids": produced[0, -1:].tolist()}
        write_json(Path(args.cache_out) / PENDING_FILE, left)


def _convert(args: argparse.Namespace) -> None:
    from .conversion.checkpoint_files import read_json
    from .conversion.convert import Memory, convert, convert_back
    from .text import InputError

    options = {"dtype": args.dtype, "max_shard_bytes": args.max_shard_size * 2**20}
    options |= {"check": not args.no_check, "progress": True}
    memory = Memory(args.memory, args.mem_len, args.segment_len, args.sink_tokens)
    if args.to is None:
        settings = read_json(Path(args.settings)) if args.settings else None
        report = convert(args.source, args.target, memory=memory, settings=settings, **options)
    else:
        if args.memory not in (None, "none") or memory != Memory(args.memory) or args.settings:
            raise InputError("--to takes no option of memory but --memory none, and no --settings")
        report = convert_back(args.source, args.target, args.to, drop_memory=args.memory == "none", **options)
    for note in report.notes:
        print(f"note: {note}")
    compared = "" if report.difference is None else f"; largest difference of logits {report.difference:.2g}"
    print(f"converted {report.family}, {report.num_parameters:,} parameters{compared}; saved in {args.target}")


def _push(args: argparse.Namespace) -> None:
    from .conversion.convert import new_folder
    from .hub import CARD_FILE, CardFacts, check_repo_id, load_bundle, make_card, push, read_evaluations, write_bundle
    from .text import InputError

    check_repo_id(args.repo_id)
    on_card = ("license", "language", "training_data", "trained_on", "base_model", "evaluation")
    given = [f"--{name.replace('_', '-')}" for name in on_card if getattr(args, name)]
    beside = Path(args.model) / CARD_FILE
    card = args.card or (beside if beside.is_file() else None)
    if card and given:
        raise InputError(f"{', '.join(given)}: belong on a new card, and {card} is the card; write them there, or move it away")
    uploads = ("private", "revision", "create_pr", "message", "token_env", "overwrite_card")
    if args.output_dir and (given := [f"--{name.replace('_', '-')}" for name in uploads if getattr(args, name)]):
        raise InputError(f"{', '.join(given)}: mean nothing with --output-dir, which uploads nothing; leave them out")
    token = None
    if args.token_env and not (token := os.environ.get(args.token_env)):
        raise InputError(f"--token-env {args.token_env}: this environment variable is not set; put the token there")
    model, tokenizer = load_bundle(args.model)
    if card is None:
        facts = CardFacts(
            license=args.license,
            languages=args.language or (),
            datasets=args.trained_on or (),
            base_model=args.base_model,
            training_data=args.training_data,
            evaluations=[
                (name, result)
                for name, path in args.evaluation or ()
                for result in read_evaluations(path, args.model, model.config)
            ],
        )
        card = make_card(model, args.repo_id, facts, has_tokenizer=tokenizer is not None)
    if args.output_dir:
        with new_folder(args.output_dir) as folder:
            write_bundle(model, folder, card, tokenizer)
        print(f"wrote what would be pushed to {args.repo_id} to {args.output_dir}")
        return
    commit = push(
        model,
        args.repo_id,
        tokenizer,
        card=card,
        overwrite_card=args.overwrite_card,
        private=args.private or None,
        revision=args.revision,
        create_pr=args.create_pr,
        message=args.message,
        token=token,
    )
    where = f"pull request {commit.pr_url}" if args.create_pr else commit.repo_url
    print(f"pushed {args.model} to {where}, commit {commit.oid}")


def _check_cache_dir(path: Path) -> None:
    from .text import InputError

    if path.exists() and not path.is_dir():
        raise InputError(f"{path}: is a file; give a folder for the cache")
    if path.is_dir() and any(path.iterdir()) and not (path / "cache.json").is_file():
        raise InputError(f"{path}: is not empty and holds no cache; give another folder")


def _read_prompt(model: Any, cache: Any, ids: list[int]) -> Any:
    """Feeds a long prompt in pieces, with a progress bar; returns what is left for generate to read [1, T], T >= 1."""
    import torch
    from tqdm import tqdm

    prompt = torch.tensor([ids], device=model.device)
    if model.config.segment_len is None:  # every call is one segment, so pieces would be another model
        return prompt
    whole = (len(ids) - 1) // PROMPT_CHUNK * PROMPT_CHUNK
    with torch.no_grad(), tqdm(total=len(ids), desc="prompt", unit="tok", disable=None if whole else True) as bar:
        for piece in prompt[:, :whole].split(PROMPT_CHUNK, dim=1) if whole else ():
            model(piece, cache=cache, use_cache=True, logits_to_keep=1)
            bar.update(piece.shape[1])
    return prompt[:, whole:]


def _streamer(tokenizer: Any) -> Any:
    from transformers import TextStreamer

    class Stdout(TextStreamer):
        """Ends with a newline on a terminal only, so that the outputs of chained runs join to the text of one.

        What is printed first is decoded behind the prompt's last token: by itself it would lose its space where a tokenizer
        begins words with one.
        """

        def put(self, value: Any) -> None:
            is_prompt = self.next_tokens_are_prompt
            super().put(value)
            if is_prompt:
                self.token_cache = value[0, -1:].tolist()
                self.print_len = len(self.tokenizer.decode(self.token_cache, **self.decode_kwargs))

        def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
            print(text, end="\n" if stream_end and sys.stdout.isatty() else "", flush=True)

    return Stdout(tokenizer, skip_prompt=True, skip_special_tokens=True)


if __name__ == "__main__":
    sys.exit(main())
