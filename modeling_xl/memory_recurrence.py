"""Segment recurrence: the last M layer inputs of closed segments are attended to beside the open segment.

Dai et al., "Transformer-XL", ACL 2019, section 3.2. Kept as layer inputs, not normalised, where gradient is enabled, so
that W_K and W_V learn through memory; as keys and values, the same numbers for frozen weights, where it is not.
"""

from .memory_base import RowMemory


class Recurrence(RowMemory):
    """Query i of a segment that begins at s = L * floor(i / L) sees the tokens s - M ... i, and its sinks.

    Without a segment_len every call is one segment. M = 0 is the plain decoder on each segment alone.
    """

    name = "recurrence"
    may_start_with_zeros = True
    has_two_forms = True

    @classmethod
    def oldest_of_memory(cls, config, mem_len, positions, call_start):
        if config.segment_len is None:
            # Where a call may have begun anywhere before, nothing but a window bounds what it sees.
            return None if call_start is None else (call_start - mem_len).expand_as(positions)
        return positions - positions % config.segment_len - mem_len

    @classmethod
    def kept_rows(cls, config, mem_len):
        kept = mem_len + (config.segment_len or 1) - 1
        return kept if config.attention_window is None else min(kept, config.attention_window - 1)

    @classmethod
    def remembered_tokens(cls, config):
        return config.mem_len

    @classmethod
    def why_no_roll_back(cls, config):
        if config.segment_len is not None:
            return None
        if config.attention_window is not None and config.attention_window - 1 <= config.mem_len:
            return None
        return (
            "memory_type='recurrence' with segment_len=None closes a segment at the end of each call. Set segment_len, or an "
            "attention_window of at most mem_len + 1."
        )
