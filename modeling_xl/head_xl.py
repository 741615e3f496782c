"""From ids to vectors and from vectors to scores over the vocabulary: dense, projected, and adaptive.

Adaptive input: Baevski and Auli, ICLR 2019. Adaptive softmax: Grave et al., ICML 2017, with the cluster order of the former
Transformers port (cluster i at column cutoffs[0] + i - 1 of the first softmax).
"""

from itertools import pairwise
from typing import cast

import torch
from torch import nn
from torch.nn import functional
from transformers import initialization as init

from .few_rows_xl import linear


def cluster_edges(config) -> list[int]:
    """First id of each cluster, and the vocabulary's size."""
    return [0, *config.cutoffs, config.vocab_size]


def cluster_width(config, cluster: int) -> int:
    return config.embedding_size // config.div_val**cluster


class Projection(nn.Module):
    """P (E, width): maps vectors of a narrower table to the hidden size, or, `backwards`, hidden states to its width.

    One parameter serves both ways, so that a head's can be tied to the embedding's. No Linear: adapters that are put on
    every Linear would be merged into the tied weight of the other way.
    """

    def __init__(self, width: int, hidden_size: int, backwards: bool = False):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(hidden_size, width))
        self.backwards = backwards

    def init_parameters(self, std: float) -> None:
        init.normal_(self.weight, mean=0.0, std=std)

    def forward(self, states):
        return states @ (self.weight if self.backwards else self.weight.transpose(0, 1))


class AdaptiveEmbedding(nn.Module):
    """Cluster i of the ids has a table of width embedding_size // div_val**i and a projection to the hidden size."""

    def __init__(self, config):
        super().__init__()
        self.hidden_size = config.hidden_size
        edges = cluster_edges(config)
        widths = [cluster_width(config, cluster) for cluster in range(len(edges) - 1)]
        sizes = [high - low for low, high in pairwise(edges)]
        self.clusters = nn.ModuleList(nn.Embedding(n, width) for n, width in zip(sizes, widths, strict=True))
        self.projections = nn.ModuleList(Projection(width, config.hidden_size) for width in widths)

    def forward(self, input_ids):
        """(B, T) ids -> (B, T, E)."""
        if input_ids.device.type == "cpu" and not torch.compiler.is_compiling() and input_ids.numel():
            size = sum(cast(nn.Embedding, table).num_embeddings for table in self.clusters)
            if int(input_ids.min()) < 0 or int(input_ids.max()) >= size:
                raise IndexError(f"ids must lie in 0 ... {size - 1}; these reach from {input_ids.min()} to {input_ids.max()}.")
        embedded, first = None, 0
        for table, projection in zip(self.clusters, self.projections, strict=True):
            count = cast(nn.Embedding, table).num_embeddings
            inside = (input_ids >= first) & (input_ids < first + count)
            # Run for no id too: every parameter then takes part in every step, as distributed training expects.
            projected = projection(table(input_ids[inside] - first))
            if embedded is None:
                embedded = projected.new_zeros(*input_ids.shape, self.hidden_size)
            embedded = embedded.masked_scatter(inside[..., None], projected)
            first += count
        return embedded


class OutputTable(nn.Module):
    """Vectors and biases of ids; scores of those from `first` to `last`. No Linear, for the reason `Projection` has."""

    def __init__(self, width: int, size: int, bias: bool):
        super().__init__()
        self.weight = nn.Parameter(torch.empty(size, width))
        self.bias = nn.Parameter(torch.empty(size)) if bias else None

    def init_parameters(self, std: float) -> None:
        init.normal_(self.weight, mean=0.0, std=std)
        if self.bias is not None:
            init.zeros_(self.bias)

    def forward(self, states, first: int, last: int):
        bias = None if self.bias is None else self.bias[first:last]
        return linear(states, self.weight[first:last], bias)


class XLHead(nn.Module):
    """Scores over the vocabulary where a plain Linear is not enough: a projection before it, or clusters.

    tables: one for each cluster, or one for all with div_val 1. projections: one for each cluster, or none where widths
    agree. With cutoffs `forward` gives log-probabilities, without it gives logits.
    """

    def __init__(self, config):
        super().__init__()
        self.edges = cluster_edges(config)
        num_clusters = len(self.edges) - 1
        widths = [cluster_width(config, cluster) for cluster in range(num_clusters)]
        sizes = [high - low for low, high in pairwise(self.edges)] if config.div_val > 1 else [config.vocab_size]
        self.tables = nn.ModuleList(OutputTable(width, n, config.lm_head_bias) for width, n in zip(widths, sizes, strict=False))
        self.projections = nn.ModuleList()
        if config.div_val > 1 or config.embedding_size != config.hidden_size:
            self.projections.extend(Projection(width, config.hidden_size, backwards=True) for width in widths)
        self.cluster_weight = self.cluster_bias = None
        if num_clusters > 1:
            self.cluster_weight = nn.Parameter(torch.empty(num_clusters - 1, config.embedding_size))
            self.cluster_bias = nn.Parameter(torch.empty(num_clusters - 1))

    def init_parameters(self, std: float) -> None:
        if self.cluster_weight is not None:
            init.normal_(self.cluster_weight, mean=0.0, std=std)
            init.zeros_(self.cluster_bias)

    @property
    def is_adaptive(self) -> bool:
        return self.cluster_weight is not None

    def _scores(self, hidden_states, cluster: int):
        """Logits over the ids of a cluster; the first one's end with those of the other clusters."""
        if len(self.projections):
            hidden_states = self.projections[cluster](hidden_states)
        first, last = self.edges[cluster], self.edges[cluster + 1]
        if len(self.tables) == 1:
            scores = self.tables[0](hidden_states, first, last)
        else:
            scores = self.tables[cluster](hidden_states, 0, last - first)
        if self.cluster_weight is None:
            return scores
        if cluster == 0:
            scores = torch.cat([scores, functional.linear(hidden_states, self.cluster_weight, self.cluster_bias)], -1)
        return scores.to(torch.promote_types(scores.dtype, torch.float32))

    def forward(self, hidden_states, targets=None):
        """(..., E) -> (..., V): log-probabilities in float32 at least where there are clusters, else logits.

        With targets (n,), of clusters only: hidden states (n, E) -> (n,) negative log-likelihoods in nats; of the clusters
        beyond the first only those of the targets are computed.
        """
        first = self._scores(hidden_states, 0)
        if not self.is_adaptive:
            return first
        first = first.log_softmax(-1)
        shortlist, clusters = self.edges[1], range(1, len(self.edges) - 1)
        if targets is None:
            tails = [self._scores(hidden_states, cluster).log_softmax(-1) for cluster in clusters]
            chosen = [first[..., shortlist + cluster - 1, None] for cluster in clusters]
            return torch.cat([first[..., :shortlist], *(a + b for a, b in zip(chosen, tails, strict=True))], -1)
        cluster_of = torch.bucketize(targets, torch.tensor(self.edges[1:-1], device=targets.device), right=True)
        column = torch.where(cluster_of == 0, targets, shortlist + cluster_of - 1)
        log_probs = first.gather(-1, column[:, None])[:, 0]
        for cluster in clusters:
            inside = cluster_of == cluster
            tail = self._scores(hidden_states[inside], cluster).log_softmax(-1)
            within = tail.gather(-1, (targets[inside] - self.edges[cluster])[:, None])[:, 0]
            log_probs = log_probs.masked_scatter(inside, log_probs[inside] + within)
        return -log_probs

    def resize(self, num_tokens: int) -> None:
        """Gives the last cluster (the only one without cutoffs) as many ids as make `num_tokens` in all."""
        first = 0 if len(self.tables) == 1 else self.edges[-2]
        table = cast(OutputTable, self.tables[-1])
        table.weight = _resized(table.weight, num_tokens - first)
        if table.bias is not None:
            table.bias = _resized(table.bias, num_tokens - first, std=0.0)
        self.edges[-1] = num_tokens


def _resized(old: torch.Tensor, size: int, std: float | None = None) -> nn.Parameter:
    """The first rows of `old`, and further ones drawn with `std`, or with that of the old ones."""
    new = torch.empty(size, *old.shape[1:], device=old.device, dtype=old.dtype)
    new.normal_(std=float(old.detach().float().std()) if std is None else std)
    kept = min(size, len(old))
    new[:kept] = old.detach()[:kept]
    return nn.Parameter(new, requires_grad=old.requires_grad)


def resized_embedding(old: nn.Embedding, size: int) -> nn.Embedding:
    """A table whose first rows are those of `old`."""
    new = nn.Embedding(size, old.embedding_dim, device="meta")
    new.weight = _resized(old.weight, size)
    return new


def make_embedding(config) -> nn.Module:
    return AdaptiveEmbedding(config) if config.div_val > 1 else nn.Embedding(config.vocab_size, config.embedding_size)


def make_head(config) -> nn.Module:
    if config.cutoffs or config.embedding_size != config.hidden_size:
        return XLHead(config)
    return nn.Linear(config.hidden_size, config.vocab_size, bias=config.lm_head_bias)


def tied_weights(config) -> dict[str, str]:
    """Parameter of `XLForCausalLM` -> the one it is the same as, where `tie_word_embeddings`."""
    if not config.cutoffs and config.embedding_size == config.hidden_size:
        return {"lm_head.weight": "model.embed_tokens.weight"}
    num_clusters = len(config.cutoffs) + 1
    ties = config.tie_projs or [True] * num_clusters
    if config.div_val == 1:
        tied = {"lm_head.tables.0.weight": "model.embed_tokens.weight"}
        if config.embedding_size != config.hidden_size:
            tied |= {f"lm_head.projections.{i}.weight": "model.embed_proj.weight" for i in range(num_clusters) if ties[i]}
        return tied
    tied = {}
    for i in range(num_clusters):
        tied[f"lm_head.tables.{i}.weight"] = f"model.embed_tokens.clusters.{i}.weight"
        if ties[i]:
            tied[f"lm_head.projections.{i}.weight"] = f"model.embed_tokens.projections.{i}.weight"
    return tied
