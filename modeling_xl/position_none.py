"""No position scheme: order reaches the model through the causal mask and the memory only. The control of comparisons."""

from .position_base import PositionScheme


class NoPosition(PositionScheme):
    """score = q . k / sqrt(D); nothing is encoded and nothing is added."""

    name = "none"

    @classmethod
    def tp_plan(cls, config) -> dict[str, str]:
        return {}
