"""Rotary positions: queries and keys are rotated by their positions, so their product knows the difference.

Su et al., "RoFormer", 2021, section 3.2; pairs are (k, k + D/2) as in Llama, not interleaved. The scaled types are those
of Transformers (`rope_parameters`).
"""

import math
from typing import Any

import torch

from .position_base import PositionContext, PositionScheme

ROPE_TYPES = ("default", "linear", "yarn", "llama3", "proportional")


def _default(parameters: dict, head_dim: int, device) -> torch.Tensor:
    """theta^(-2k/r) for the r rotated dimensions, float64."""
    size = int(head_dim * parameters.get("partial_rotary_factor", 1.0))
    return parameters["rope_theta"] ** (-torch.arange(0, size, 2, dtype=torch.float64, device=device) / size)


def _linear(parameters: dict, head_dim: int, device) -> torch.Tensor:
    """Position interpolation (Chen et al. 2023): positions divided by `factor`."""
    return _default(parameters, head_dim, device) / parameters["factor"]


def _llama3(parameters: dict, head_dim: int, device) -> torch.Tensor:
    """Llama 3.1: long wavelengths divided by `factor`, short ones kept, those between blended."""
    frequencies = _default(parameters, head_dim, device)
    low, high = parameters["low_freq_factor"], parameters["high_freq_factor"]
    turns = parameters["original_max_position_embeddings"] * frequencies / (2 * math.pi)
    kept = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (kept + (1 - kept) / parameters["factor"])


def _yarn(parameters: dict, head_dim: int, device) -> torch.Tensor:
    """YaRN (Peng et al. 2023, section 3.2): interpolation by parts, ramp over dimensions."""
    frequencies = _default(parameters, head_dim, device)
    size, theta = 2 * frequencies.shape[0], parameters["rope_theta"]
    trained = parameters["original_max_position_embeddings"]

    def dimension(turns: float) -> float:
        return size * math.log(trained / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = dimension(parameters.get("beta_fast") or 32), dimension(parameters.get("beta_slow") or 1)
    if parameters.get("truncate", True):
        first, last = math.floor(first), math.ceil(last)
    first, last = max(first, 0), min(last, size - 1)
    ramp = (torch.arange(size // 2, dtype=torch.float64, device=device) - first) / ((last - first) or 0.001)
    interpolated = ramp.clamp(0, 1)
    return frequencies * ((1 - interpolated) + interpolated / parameters["factor"])


def _proportional(parameters: dict, head_dim: int, device) -> torch.Tensor:
    """Frequencies of the whole head size, all but the first part of them zero, divided by `factor`."""
    rotated = int(parameters.get("partial_rotary_factor", 1.0) * head_dim // 2)
    pairs = torch.arange(head_dim // 2, dtype=torch.float64, device=device)
    frequencies = parameters["rope_theta"] ** (-2 * pairs / head_dim) / parameters.get("factor", 1.0)
    return torch.where(pairs < rotated, frequencies, 0.0)


_FREQUENCIES = dict(zip(ROPE_TYPES, (_default, _linear, _yarn, _llama3, _proportional), strict=True))


def rope_frequencies(parameters: dict, head_dim: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """Angle a position step of each pair, float64, (rotated dimensions / 2,)."""
    return _FREQUENCIES[parameters["rope_type"]](parameters, head_dim, device)


def attention_factor(parameters: dict) -> float:
    """The factor on cosines and sines; other than 1 for YaRN only (its section 3.4)."""
    if parameters["rope_type"] != "yarn":
        return 1.0
    if parameters.get("attention_factor") is not None:
        return parameters["attention_factor"]

    def scale(weight: float) -> float:
        return 0.1 * weight * math.log(parameters["factor"]) + 1.0 if parameters["factor"] > 1 else 1.0

    if parameters.get("mscale") and parameters.get("mscale_all_dim"):
        return scale(parameters["mscale"]) / scale(parameters["mscale_all_dim"])
    return scale(1.0)


class RopePosition(PositionScheme):
    """q, k -> R(position) q, R(position) k. Angles from integer positions in float64, rounded once at the end."""

    name = "rope"
    rotates = True

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.parameters_of_rope = dict(config.rope_parameters)

    @classmethod
    def validate(cls, config) -> None:
        parameters = config.rope_parameters or {}
        kind = parameters.get("rope_type", "default")
        if kind not in ROPE_TYPES:
            raise ValueError(
                f"rope_parameters['rope_type']={kind!r} is not one of {', '.join(ROPE_TYPES)}. Types that change with the "
                "running length (dynamic, longrope) contradict keys that were rotated before; use 'yarn' to go past the "
                "trained length."
            )
        required = {
            "linear": ["factor"],
            "yarn": ["factor", "original_max_position_embeddings"],
            "llama3": ["factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"],
        }.get(kind, [])
        optional = ["factor", "partial_rotary_factor", "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim"]
        for name in dict.fromkeys(["rope_theta", *required, *optional]):
            value: Any = parameters.get(name)
            if value is None and name not in ("rope_theta", *required):
                continue
            is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
            if not is_number or value <= (1 if name == "rope_theta" else 0):
                least = "above 1" if name == "rope_theta" else "above 0"
                raise ValueError(f"rope_parameters[{name!r}]={value!r} must be a finite number {least} for rope_type {kind!r}.")
        low, high = (float(parameters.get(f"{name}_freq_factor") or 0) for name in ("low", "high"))
        if kind == "llama3" and low >= high:
            raise ValueError(f"rope_parameters['low_freq_factor']={low} must be below 'high_freq_factor'={high}.")
        factor = parameters.get("partial_rotary_factor", 1.0)
        rotated = config.head_dim if kind == "proportional" else int(config.head_dim * factor)
        if not 0 < factor <= 1 or rotated % 2 or rotated < 2:
            raise ValueError(
                f"rope_parameters['partial_rotary_factor']={factor} with head_dim={config.head_dim} must rotate an even "
                "number >= 2 of dimensions, at most the head size; choose a factor that does."
            )

    @classmethod
    def tp_plan(cls, config) -> dict[str, str]:
        return {}  # the same for all heads

    def prepare(self, hidden_states, distances, positions, context: PositionContext) -> None:
        for asked in positions:
            self._rotation(asked, hidden_states, context)

    def encode(self, query, key, query_positions, key_positions, context: PositionContext):
        return self._rotate(query, query_positions, context), self._rotate(key, key_positions, context)

    def _rotate(self, states, positions, context: PositionContext):
        cosine, sine = self._rotation(positions, states, context)
        half = cosine.shape[-1]
        first, second, kept = states.to(cosine.dtype).split([half, half, states.shape[-1] - 2 * half], -1)
        rotated = torch.cat([first * cosine - second * sine, second * cosine + first * sine, kept], -1)
        return rotated.to(states.dtype)

    def _rotation(self, positions, like, context: PositionContext):
        """Cosines and sines of the angles, (B or 1, 1, K, r / 2), in float32 at least."""
        dtype = torch.promote_types(like.dtype, torch.float32)

        def make(positions):
            frequencies = rope_frequencies(self.parameters_of_rope, self.head_dim, positions.device)
            angles = positions[:, None, :, None].double() * frequencies
            factor = attention_factor(self.parameters_of_rope)
            return [(f * factor).to(like.device, dtype) for f in (angles.cos(), angles.sin())]

        return context.once(f"rope {dtype}", positions, make)
