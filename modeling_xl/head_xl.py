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


def cluster_edges(config) -> list[int]:
    """First id of each cluster, and the vocabulary's size."""
    return [0, *config.cutoffs, config.vocab_size]


def cluster_width(config, cluster: int) -> int:
    return config.embedding_size // config.div_val**cluster


class AdaptiveEmbedding(nn.Module):
    """Cluster i of the ids has a table of width embedding_size // div_val**i and a projection to the hidden size."""

    def __init__(self, config):
        super().__init__()
        edges = cluster_edges(config)
        sizes = [high - low for low, high in pairwise(edges)]
        widths = [cluster_width(config, cluster) for cluster in range(len(sizes))]
        self.clusters = nn.ModuleList(nn.Embedding(n, width) for n, width in zip(sizes, widths, strict=True))
        self.projections = nn.ModuleList(nn.Linear(width, config.hidden_size, bias=False) for width in widths)

    def forward(self, input_ids):
        """(B, T) ids -> (B, T, E)."""
        weight = cast(nn.Linear, self.projections[0]).weight
        embedded = weight.new_zeros(*input_ids.shape, weight.shape[0])
        first = 0
        for table, projection in zip(self.clusters, self.projections, strict=True):
            table = cast(nn.Embedding, table)
            inside = (input_ids >= first) & (input_ids < first + table.num_embeddings)
            projected = projection(table(input_ids[inside] - first))
            embedded = embedded.masked_scatter(inside[..., None], projected.to(embedded.dtype))
            first += table.num_embeddings
        return embedded


class XLHead(nn.Module):
    """Scores over the vocabulary where a plain Linear is not enough: a projection before it, or clusters.

    tables: Linear for each cluster (one for all with div_val 1); projections[i] (E, width) maps a hidden state h to h P,
    the input projection the other way round, so that they can be tied. With cutoffs `forward` gives log-probabilities,
    without it gives logits.
    """

    def __init__(self, config):
        super().__init__()
        self.edges = cluster_edges(config)
        bias, num_clusters = config.lm_head_bias, len(self.edges) - 1
        if config.div_val == 1:
            self.tables = nn.ModuleList([nn.Linear(config.embedding_size, config.vocab_size, bias=bias)])
        else:
            self.tables = nn.ModuleList(
                nn.Linear(cluster_width(config, i), self.edges[i + 1] - self.edges[i], bias=bias) for i in range(num_clusters)
            )
        self.projections = nn.ParameterList()
        if config.div_val > 1 or config.embedding_size != config.hidden_size:
            for cluster in range(num_clusters):
                self.projections.append(nn.Parameter(torch.empty(config.hidden_size, cluster_width(config, cluster))))
        self.cluster_weight = self.cluster_bias = None
        if num_clusters > 1:
            self.cluster_weight = nn.Parameter(torch.empty(num_clusters - 1, config.embedding_size))
            self.cluster_bias = nn.Parameter(torch.empty(num_clusters - 1))

    def init_parameters(self, std: float) -> None:
        for projection in self.projections:
            init.normal_(projection, mean=0.0, std=std)
        if self.cluster_weight is not None:
            init.normal_(self.cluster_weight, mean=0.0, std=std)
            init.zeros_(self.cluster_bias)

    @property
    def is_adaptive(self) -> bool:
        return self.cluster_weight is not None

    def _scores(self, hidden_states, cluster: int):
        """Logits over the ids of a cluster; the first one's end with those of the other clusters."""
        table = cast(nn.Linear, self.tables[0 if len(self.tables) == 1 else cluster])
        weight: torch.Tensor = table.weight
        bias: torch.Tensor | None = table.bias
        if len(self.tables) == 1:
            rows = slice(self.edges[cluster], self.edges[cluster + 1])
            weight, bias = weight[rows], None if bias is None else bias[rows]
        if cluster == 0 and self.cluster_weight is not None and self.cluster_bias is not None:
            weight = torch.cat([weight, self.cluster_weight])
            zeros = self.cluster_bias.new_zeros(self.edges[1]) if bias is None else bias
            bias = torch.cat([zeros, self.cluster_bias])
        if len(self.projections):
            hidden_states = hidden_states @ self.projections[cluster]
        scores = functional.linear(hidden_states, weight, bias)
        return scores.to(torch.promote_types(scores.dtype, torch.float32)) if self.is_adaptive else scores

    def forward(self, hidden_states):
        """(..., E) -> (..., V): log-probabilities in float32 at least where there are clusters, else logits."""
        first = self._scores(hidden_states, 0)
        if not self.is_adaptive:
            return first
        first = first.log_softmax(-1)
        shortlist = self.edges[1]
        parts = [first[..., :shortlist]]
        for cluster in range(1, len(self.edges) - 1):
            chosen = first[..., shortlist + cluster - 1, None]
            parts.append(chosen + self._scores(hidden_states, cluster).log_softmax(-1))
        return torch.cat(parts, -1)

    def negative_log_likelihood(self, hidden_states, targets):
        """(n, E) and (n,) ids -> (n,) nats; of the clusters beyond the first only those of the targets are computed."""
        first = self._scores(hidden_states, 0).log_softmax(-1)
        shortlist = self.edges[1]
        cluster_of = torch.bucketize(targets, torch.tensor(self.edges[1:-1], device=targets.device), right=True)
        column = torch.where(cluster_of == 0, targets, shortlist + cluster_of - 1)
        log_probs = first.gather(-1, column[:, None])[:, 0]
        for cluster in range(1, len(self.edges) - 1):
            inside = cluster_of == cluster
            # Run for no target too: every parameter then takes part in every step, as distributed training expects.
            tail = self._scores(hidden_states[inside], cluster).log_softmax(-1)
            within = tail.gather(-1, (targets[inside] - self.edges[cluster])[:, None])[:, 0]
            log_probs = log_probs.masked_scatter(inside, log_probs[inside] + within)
        return -log_probs

    def resize(self, num_tokens: int) -> None:
        """Gives the last cluster (the only one without cutoffs) as many ids as make `num_tokens` in all."""
        last = cast(nn.Linear, self.tables[-1])
        first = 0 if len(self.tables) == 1 else self.edges[-2]
        self.tables[-1] = _resized_linear(last, num_tokens - first)
        self.edges[-1] = num_tokens


def _resized_linear(old: nn.Linear, size: int) -> nn.Linear:
    new = nn.Linear(old.in_features, size, bias=old.bias is not None, device=old.weight.device, dtype=old.weight.dtype)
    kept = min(size, old.out_features)
    with torch.no_grad():
        new.weight.normal_(std=float(old.weight.float().std()))
        new.weight[:kept] = old.weight[:kept]
        if old.bias is not None:
            new.bias.zero_()
            new.bias[:kept] = old.bias[:kept]
    new.requires_grad_(old.weight.requires_grad)
    return new


def resized_embedding(old: nn.Embedding, size: int) -> nn.Embedding:
    """The first rows of `old`, further rows drawn with its standard deviation."""
    new = nn.Embedding(size, old.embedding_dim, device=old.weight.device, dtype=old.weight.dtype)
    kept = min(size, old.num_embeddings)
    with torch.no_grad():
        new.weight.normal_(std=float(old.weight.float().std()))
        new.weight[:kept] = old.weight[:kept]
    new.requires_grad_(old.weight.requires_grad)
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
            tied |= {f"lm_head.projections.{i}": "model.embed_proj.weight" for i in range(num_clusters) if ties[i]}
        return tied
    tied = {}
    for i in range(num_clusters):
        tied[f"lm_head.tables.{i}.weight"] = f"model.embed_tokens.clusters.{i}.weight"
        if ties[i]:
            tied[f"lm_head.projections.{i}"] = f"model.embed_tokens.projections.{i}.weight"
    return tied
