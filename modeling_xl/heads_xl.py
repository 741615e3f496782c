"""Tensor parallelism: which heads of a layer a process computes, and what the processes tell each other about heads.

Transformers spreads the weights, as `XLConfig.base_model_tp_plan` says. Queries, keys and values have one weight, of which each
process holds rows that do not end where heads do; so its outputs are gathered, and each process takes those of its heads.
"""

import torch

if torch.distributed.is_available():
    from torch.distributed.tensor import DTensor, Partial, Replicate


class HeadShare:
    """The heads of a layer that this process of a group computes.

    mesh: of one dimension, the group's. query_heads, key_value_heads: their numbers; several processes have the same key and
    value heads where there are fewer of these than processes. Raises ValueError where heads cannot be dealt out evenly.
    """

    def __init__(self, mesh, num_heads: int, num_key_value_heads: int, head_dim: int):
        size, rank = mesh.size(), mesh.get_local_rank()
        for name, number, fits in (
            ("num_attention_heads", num_heads, num_heads % size == 0),
            ("num_key_value_heads", num_key_value_heads, num_key_value_heads % size == 0 or size % num_key_value_heads == 0),
        ):
            if not fits:
                rule = "a multiple of tp_size" + (" or a divisor of it" if name == "num_key_value_heads" else "")
                raise ValueError(
                    f"{name}={number} cannot be dealt out to tp_size={size} processes: it must be {rule}. Choose another "
                    "tp_size in DistributedConfig."
                )
        self.mesh = mesh
        count, group = num_heads // size, num_heads // num_key_value_heads
        self.query_heads = range(rank * count, (rank + 1) * count)
        self.key_value_heads = range(self.query_heads[0] // group, self.query_heads[-1] // group + 1)
        keys, values = num_heads, num_heads + num_key_value_heads  # where they begin
        kinds = ((0, self.query_heads), (keys, self.key_value_heads), (values, self.key_value_heads))
        self._features = [slice((first + h[0]) * head_dim, (first + h[-1] + 1) * head_dim) for first, h in kinds]

    def take(self, module, args, output):
        """Forward hook of the fused projection: of all heads' (..., features) those of this process's heads."""
        if output.requires_grad:  # the others' gradients are of other features: what is handed back is their sum
            gathered = DTensor.from_local(output, self.mesh, [Replicate()], run_check=False)
            output = gathered.to_local(grad_placements=[Partial()])
        return torch.cat([output[..., features] for features in self._features], -1)

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Mean of the processes' values; the gradient of each is that of its own."""
        return DTensor.from_local(values, self.mesh, [Partial()], run_check=False).full_tensor() / self.mesh.size()
