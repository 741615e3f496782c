"""Which text `modeling-xl train` and `modeling-xl evaluate` read: the options that name it, and the reading of it."""

import argparse
import contextlib
import sys
from pathlib import Path
from typing import Any

# Options that mean something to files, or to a dataset, only.
OF_FILES = {"--separator": "separator"}
OF_DATASET = {
    "--dataset-config": "dataset_config",
    "--dataset-split": "dataset_split",
    "--eval-dataset-split": "eval_dataset_split",
    "--text-column": "text_column",
}


def add_text_options(parser: argparse.ArgumentParser) -> None:
    """What stands beside the argument `files` of a command."""
    parser.add_argument(
        "--separator", metavar="LINE", help="a line that equals LINE ends a document; the next one sees nothing before it"
    )
    parser.add_argument(
        "--dataset",
        metavar="NAME",
        help="instead of files: name, folder or file of a dataset of the library datasets; each row is a document",
    )
    parser.add_argument("--dataset-config", metavar="NAME", help="which of the dataset's configurations")
    parser.add_argument("--dataset-split", metavar="SPLIT", help="which of its splits (default train)")
    parser.add_argument("--text-column", metavar="NAME", help="the column with the text (default text)")
    parser.add_argument(
        "--cache-dir",
        metavar="DIR",
        help="keep the tokens here, so that the text may be larger than memory, and find them again (default: in memory)",
    )


def check_text_options(args: argparse.Namespace, option: str) -> None:
    """Raises InputError unless either files, by `option`, or a dataset is given, with options of its own only."""
    from .text import InputError

    if args.dataset is not None and args.files:
        raise InputError(f"--dataset: the text is that of {option} already; leave out one of them")
    if args.dataset is None and not args.files:
        raise InputError(f"no text is named; give {option} or --dataset")
    refused, rule = (OF_DATASET, "belongs to --dataset") if args.dataset is None else (OF_FILES, "divides text files")
    if given := [name for name, field in refused.items() if getattr(args, field, None) is not None]:
        raise InputError(f"{', '.join(given)}: {rule}; leave it out")


def read_corpus(args: argparse.Namespace, tokenizer: Any) -> Any:
    """The text that the options name, as a `Corpus`."""
    if args.dataset is not None:
        return _corpus_of_dataset(args, args.dataset_split, tokenizer)
    return _corpus_of_files(args, args.files, tokenizer)


def read_training_corpora(args: argparse.Namespace, tokenizer: Any) -> tuple[Any, Any]:
    """The text to train on, and the one held out: that of an option of its own, or the end of the former."""
    from .text import InputError

    corpus = read_corpus(args, tokenizer)
    if args.eval_file:
        named, held_out = ", ".join(args.eval_file), _corpus_of_files(args, args.eval_file, tokenizer)
    elif args.eval_dataset_split is not None:
        named, held_out = args.eval_dataset_split, _corpus_of_dataset(args, args.eval_dataset_split, tokenizer)
    else:
        try:
            return corpus.split(args.eval_fraction)
        except InputError as error:
            raise InputError(f"--eval-fraction {args.eval_fraction}: {error}; 0 holds out nothing") from None
    if not held_out.num_targets:
        raise InputError(f"{named}: too short to evaluate on; give 2 tokens at least")
    return corpus, held_out


def _corpus_of_files(args: argparse.Namespace, files: list[str], tokenizer: Any) -> Any:
    from accelerate import PartialState

    from .corpus import Corpus

    with _main_process_first() if args.cache_dir else contextlib.nullcontext():
        return Corpus.from_files(
            files, tokenizer, args.cache_dir, args.separator, progress=PartialState().is_local_main_process
        )


def _corpus_of_dataset(args: argparse.Namespace, split: str | None, tokenizer: Any) -> Any:
    import datasets

    from .corpus import Corpus
    from .text import InputError

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # what it logs as an error it raises as well
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
    column = args.text_column or "text"
    with _main_process_first():  # the library keeps what it has loaded and tokenised, too
        dataset = _load_dataset(args.dataset, args.dataset_config, split)
        try:
            return Corpus.from_dataset(dataset, tokenizer, column, args.cache_dir)
        except InputError as error:
            raise InputError(f"--dataset {args.dataset}, --text-column {column}: {error}") from None


def _main_process_first() -> contextlib.AbstractContextManager[None]:
    """Of several processes the others wait, and find what the first has made."""
    from accelerate import PartialState

    return PartialState().local_main_process_first()


def _load_dataset(source: str, config: str | None, split: str | None) -> Any:
    """One split of a dataset of the Hub, of a folder or file that `load_dataset` reads, or of one that `save_to_disk` wrote."""
    import datasets

    from .text import InputError

    path, wanted = Path(source), split or "train"
    try:
        if (path / "state.json").is_file() or (path / "dataset_dict.json").is_file():
            found = datasets.load_from_disk(source)
        elif path.is_file():
            return datasets.load_dataset(str(path.parent), config, data_files=path.name, split=wanted)
        else:
            return datasets.load_dataset(source, config, split=wanted)
    except Exception as error:  # several classes of error, according to what is wrong with which file
        raise InputError.about(f"--dataset {source}: could not be loaded", error) from error
    if isinstance(found, datasets.DatasetDict):
        if wanted not in found:
            raise InputError(f"--dataset {source}: has no split {wanted!r}, but {', '.join(found)}; name one of them")
        return found[wanted]
    if split is not None:
        raise InputError(f"--dataset {source}: was saved without splits, so that {split!r} means nothing; leave it out")
    return found
