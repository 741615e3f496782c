"""No memory mechanism: a plain decoder that keeps the keys and values of all tokens, or of its attention window.

segment_len and mem_len have no effect. The state grows with the text unless `attention_window` bounds it.
"""

import math

from .memory_base import RowMemory


class NoMemory(RowMemory):
    """A query sees every token before it, or the last `attention_window` tokens, itself included."""

    name = "none"
    uses_grid = False

    @classmethod
    def oldest_of_memory(cls, config, mem_len, positions, call_start):
        return None

    @classmethod
    def kept_rows(cls, config, mem_len):
        return math.inf if config.attention_window is None else config.attention_window - 1

    @classmethod
    def why_no_roll_back(cls, config):
        return None
