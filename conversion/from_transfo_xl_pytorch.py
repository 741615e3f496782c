"""What the original PyTorch code saves: `model.pt`, a pickled module, and `state_dict.pt`. No code of the file is run.

Names are those of `transfo-xl` without its prefix; clusters of the adaptive softmax stand in reverse order.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, ClassVar

import torch

from modeling_xl.configuration_xl import XLConfig
from modeling_xl.text import InputError

from .family import ForeignFiles, SourceFields
from .from_transfo_xl import check_attn_type, decoder_rules, div_val_of, tied_names, vocabulary_rules, xl_config
from .restricted_pickle import LazyTensor, RestrictedFile, Stub, is_stub
from .weight_map import Rule

FILES = ("model.pt", "state_dict.pt")
WRAPPERS = ("DataParallel", "BalancedDataParallel", "DistributedDataParallel", "FP16_Module")


def _walk(module: Stub, prefix: str = "") -> Iterator[tuple[str, LazyTensor]]:
    """Parameters and buffers of a pickled module, named as in a state dict."""
    for kind in ("_parameters", "_buffers"):
        for name, tensor in getattr(module, kind, {}).items():
            if isinstance(tensor, LazyTensor):
                yield f"{prefix}{name}", tensor
    for name, child in getattr(module, "_modules", {}).items():
        if isinstance(child, Stub):
            yield from _walk(child, f"{prefix}{name}.")


class OriginalFile:
    """Tensors of such a file, and the pickled module if there is one."""

    def __init__(self, path: Path):
        self.where = str(path)
        self._file = RestrictedFile(path)
        root = self._file.root
        while any(is_stub(root, name) for name in WRAPPERS):
            root = root._modules.get("module")
        self.module: Any = root if is_stub(root, "MemTransformerLM") else None
        found = _walk(root) if self.module is not None else root.items() if isinstance(root, dict) else ()
        self.tensors = {str(name).removeprefix("module."): tensor for name, tensor in found if isinstance(tensor, LazyTensor)}
        if "word_emb.emb_layers.0.weight" not in self.tensors:
            self.close()
            raise InputError(
                f"{path}: holds neither a MemTransformerLM nor its state dict; give a model.pt or state_dict.pt "
                "that the original Transformer-XL code saved"
            )

    def names(self) -> list[str]:
        return sorted(self.tensors)

    def read(self, name: str) -> torch.Tensor:
        return self.tensors[name].load()

    def is_same(self, one: str, other: str) -> bool:
        """Whether both are one tensor: on the same bytes of the file, or equal."""
        a, b = self.tensors[one], self.tensors[other]
        return a == b or (a.shape == b.shape and torch.equal(a.load(), b.load()))

    def close(self) -> None:
        self._file.close()


class TransfoXLPyTorch(ForeignFiles):
    name = "transfo-xl-pytorch"
    drops: ClassVar[tuple[str, ...]] = (r"pos_emb\.inv_freq",)
    settings: ClassVar[tuple[str, ...]] = ("mem_len", "clamp_len", "same_length", "pre_lnorm")

    def find(self, source: Path) -> Path | None:
        if source.is_file() and source.suffix in (".pt", ".pth"):
            return source
        return next((source / name for name in FILES if (source / name).is_file()), None)

    def open(self, path: Path) -> OriginalFile:
        return OriginalFile(path)

    def shown(self, files: OriginalFile) -> dict[str, Any]:
        """All of the fields where there is a module; else what names and shapes of the tensors show."""
        shapes = {name: tensor.shape for name, tensor in files.tensors.items()}
        attention = "layers.0.dec_attn"
        if f"{attention}.r_net.weight" not in shapes:
            check_attn_type(files.where, 1 if "r_bias" in shapes else 3 if "r_emb" in shapes else 2)
        tables = sorted(name for name in shapes if name.startswith("word_emb.emb_layers."))
        sizes = [shapes[f"word_emb.emb_layers.{i}.weight"] for i in range(len(tables))]
        num_clusters = 1 + shapes.get("crit.cluster_weight", (0,))[0]
        found: dict[str, Any] = {
            "attn_type": 0,
            "vocab_size": sum(rows for rows, _ in sizes),
            "d_embed": sizes[0][1],
            "div_val": div_val_of(files.where, [width for _, width in sizes]),
            "n_layer": 1 + max(int(name.split(".")[1]) for name in shapes if name.startswith("layers.")),
            "n_head": shapes["r_w_bias"][0],
            "d_head": shapes["r_w_bias"][1],
            "d_model": shapes[f"{attention}.layer_norm.weight"][0],
            "d_inner": shapes["layers.0.pos_ff.CoreNet.0.weight"][0],
            "untie_r": False,
            **self._ties(files, num_clusters),
        }
        if num_clusters == 1:
            found["cutoffs"] = []
        elif len(sizes) > 1:
            found["cutoffs"] = [sum(rows for rows, _ in sizes[: i + 1]) for i in range(num_clusters - 1)]
        elif files.module is None and num_clusters > 1:
            found["num_clusters"] = num_clusters
        if files.module is not None:
            found |= self._of_module(files.module)
        return found

    @staticmethod
    def _ties(files: OriginalFile, num_clusters: int) -> dict[str, Any]:
        """Which tensors of the head are those of the embedding."""
        names = set(files.tensors)

        def is_tied(head: str, embedding: str) -> bool:
            return head not in names or (embedding in names and files.is_same(head, embedding))

        tables = sum(name.startswith("word_emb.emb_layers.") for name in names)
        words = {is_tied(f"crit.out_layers.{i}.weight", f"word_emb.emb_layers.{i}.weight") for i in range(tables)}
        if len(words) > 1:
            raise InputError(f"{files.where}: ties the words of some clusters and not of others, which no model here can")
        projections = [f"word_emb.emb_projs.{i if tables > 1 else 0}" for i in range(num_clusters)]
        has_projections = projections[0] in names
        ties = [has_projections and is_tied(f"crit.out_projs.{i}", name) for i, name in enumerate(projections)]
        return {"tie_word_embeddings": words.pop(), "tie_projs": ties}

    @staticmethod
    def _of_module(module: Any) -> dict[str, Any]:
        head, layer = module._modules["crit"], module._modules["layers"]._modules["0"]._modules["dec_attn"]
        return {
            **{
                name: getattr(module, name)
                for name in ("mem_len", "ext_len", "tgt_len", "same_length", "clamp_len", "attn_type")
            },
            "cutoffs": list(head.cutoffs)[:-1],  # the last is the vocabulary's size
            "div_val": head.div_val,
            "pre_lnorm": layer.pre_lnorm,
            "layer_norm_epsilon": layer._modules["layer_norm"].eps,
            "dropout": module._modules["drop"].p,
            "dropatt": layer._modules["dropatt"].p,
        }

    def config(self, fields: SourceFields) -> dict[str, Any]:
        num_clusters = fields("num_clusters", None)
        if num_clusters is not None and len(fields("cutoffs")) + 1 != num_clusters:
            raise InputError(f"{fields.where}: has {num_clusters} clusters, and cutoffs={fields('cutoffs')} in the settings")
        if fields("ext_len", 0):
            fields.notes.append(f"ext_len={fields('ext_len')}: a run may feed tokens twice; the model here never does")
        return xl_config(fields, window_beyond_memory=0, initial_memory="empty")

    def rules(self, config: XLConfig, fields: SourceFields, names: Iterable[str]) -> list[Rule]:
        reverse = torch.arange(len(config.cutoffs) - 1, -1, -1)
        return [*decoder_rules(config, ""), *vocabulary_rules(config, "", fields, names, cluster_rows=reverse)]

    def ties(self, config: XLConfig) -> dict[str, str]:
        return tied_names(config, "")
