"""The Compressive Transformer: rows that leave the memory are compressed, c to one, into slots of a second memory.

Rae et al., "Compressive Transformers for Long-Range Sequence Modelling", ICLR 2020, section 3. Attention runs over [slots ;
memory ; segment], distances by slot. The compression learns from a loss of its own only: nothing of it reaches the rest of
the model, and nothing of the rest reaches it.

When a segment of L tokens closes, the rows beyond the newest M leave, rounded down to a multiple of c. So after k segments
c * floor((kL - M) / c) rows have left; everything about who sees what follows from that number.

Legend: B batch, H heads, t tokens of a piece, K keys, L segment_len, M mem_len, c compression_rate, D head size, E hidden
size, n evicted rows.
"""

from dataclasses import dataclass, field
from typing import cast

import torch
from torch.nn import functional

from .cache_xl import LayerState
from .compression_xl import COMPRESSIONS, Decompression, MostUsed
from .memory_base import Projected, RowMemory, RowView

LOSSES = ("attention", "autoencode")


@dataclass
class Group:
    """Rows of the batch from which the same number of rows n leaves: their numbers (b,), and for what leaves how far it lies
    from the end of the state, and from the end of the state before the piece, both negative, and the positions, (b, n)."""

    chosen: torch.Tensor
    from_end: torch.Tensor
    from_past_end: torch.Tensor
    position: torch.Tensor


@dataclass
class Closing:
    """What happens at the end of a piece, the same in every layer. Empty where no segment closes.

    closes (B, 1): rows of the batch whose segment does. rows (B, 1): what each holds afterwards beside slots, at most
    most_rows. slots, made: most slots held afterwards, and made now. source (B, height): for each row of the new state one of
    the old, counted back from their end, negative; or one of those that are made, from 0. None where all rows of the batch
    are alike.
    """

    closes: torch.Tensor | None = None
    groups: list[Group] = field(default_factory=list)
    rows: torch.Tensor = field(default_factory=lambda: torch.zeros(0, 1, dtype=torch.long))
    most_rows: int = 0
    slots: int = 0
    made: int = 0
    source: torch.Tensor | None = None


class Compressive(RowMemory):
    """State: rows [slots ; memory ; open segment] as layer inputs (`hidden`), not normalised, and beside them, where
    gradient is off, keys and values. most_used also keeps keys that are not encoded (`content_key`), how much attention
    each row of the memory received in the open segment (`usage`) and the positions of the slots' rows (`place`)."""

    name = "compressive"
    needs_row_lines = True
    may_start_with_zeros = True
    has_two_forms = True
    uses_window = False
    config_fields = ("compressed_mem_len", "compression_rate", "compression_fn", "compression_dilation")

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.compression = COMPRESSIONS[config.compression_fn](config)
        self.decompression = Decompression(config) if config.compression_loss == "autoencode" else None

    @classmethod
    def validate(cls, config) -> None:
        def refuse(name: str, rule: str):
            raise ValueError(f"{name}={getattr(config, name)!r} {rule}.")

        for name in ("compressed_mem_len", "compression_rate", "compression_dilation"):
            value = getattr(config, name)
            if isinstance(value, bool) or value < 1:
                refuse(name, "must be an integer >= 1")
        if config.compression_fn not in COMPRESSIONS:
            refuse("compression_fn", f"is not one of {', '.join(COMPRESSIONS)}")
        if config.compression_loss is not None and config.compression_loss not in LOSSES:
            refuse("compression_loss", f"is not one of {', '.join(LOSSES)}, or None")
        if config.compression_loss is not None and config.compression_fn not in ("conv", "dilated"):
            refuse(
                "compression_loss",
                f"has nothing to train: compression_fn={config.compression_fn!r} has no parameters; set "
                "compression_loss=None, or compression_fn to conv or dilated",
            )
        if not config.compression_loss_coef >= 0 or config.compression_loss_coef == float("inf"):
            refuse("compression_loss_coef", "must be a finite number >= 0")
        if config.compression_rate > max(config.mem_len, 1):
            refuse("compression_rate", f"must be at most mem_len={config.mem_len}: so many rows are held back for one slot")
        if config.segment_len is None:
            refuse("segment_len", "must be set for memory_type='compressive': rows are compressed where a segment closes")
        if config.compressed_mem_len < config.segment_len // config.compression_rate:
            refuse(
                "compressed_mem_len",
                f"must be at least segment_len // compression_rate = {config.segment_len // config.compression_rate}, the "
                "slots that one segment fills",
            )

    @classmethod
    def check_mem_len(cls, config, mem_len: int) -> None:
        if config.segment_len is not None and mem_len < config.segment_len:
            raise ValueError(
                f"mem_len={mem_len} must be at least segment_len={config.segment_len} for memory_type='compressive': what "
                "leaves the memory was attended to by a whole segment before."
            )

    # Where rows are: integers, in tokens of the row from 0 up; rows of zeros before the first token are below 0.

    @classmethod
    def _zeros(cls, config, mem_len: int) -> int:
        return mem_len if config.initial_memory == "zeros" else 0

    @classmethod
    def _evicted(cls, config, mem_len: int, segments):
        """Rows, those of zeros included, that have left the memory after so many segments."""
        rate, extra = config.compression_rate, cls._zeros(config, mem_len) - mem_len
        return (segments * config.segment_len + extra).clamp(min=0) // rate * rate

    @classmethod
    def _first_of_slot(cls, config, mem_len: int, slot):
        """The oldest token that reaches the slot-th row ever compressed; below 0 also for what stands before any."""
        rate, zeros = config.compression_rate, cls._zeros(config, mem_len)
        last = slot * rate + rate - 1
        if config.compression_fn in ("mean", "max", "conv"):
            return last - rate + 1 - zeros
        # The others look further back, among what left together with the slot's own window.
        closing = -(-(last + 1 + mem_len - zeros) // config.segment_len)
        first = cls._evicted(config, mem_len, closing - 1)
        if config.compression_fn == "dilated":
            taps = ((last - first) // config.compression_dilation).clamp(max=rate - 1)
            first = last - taps * config.compression_dilation
        return torch.where(slot < 0, last - rate + 1, first) - zeros

    @classmethod
    def oldest_visible(cls, config, mem_len, positions, call_start=None):
        evicted = cls._evicted(config, mem_len, positions // config.segment_len)
        return cls._first_of_slot(config, mem_len, evicted // config.compression_rate - config.compressed_mem_len)

    @classmethod
    def pattern_len(cls, config):
        return config.segment_len * config.compression_rate

    @classmethod
    def kept_rows(cls, config, mem_len):
        return config.compressed_mem_len + mem_len + config.compression_rate - 1 + config.segment_len - 1

    @classmethod
    def remembered_tokens(cls, config):
        return config.mem_len + config.compression_rate * config.compressed_mem_len

    def rows_of_zeros(self, mem_len):
        zeros = self._zeros(self.config, mem_len)
        return zeros + self.config.compressed_mem_len if zeros else 0

    def _counts(self, mem_len: int, segments, lengths):
        """Rows and slots that a row of the batch holds with so many tokens, of so many segments closed."""
        config = self.config
        evicted, zeros = self._evicted(config, mem_len, segments), self._zeros(config, mem_len)
        slots = evicted // config.compression_rate + (config.compressed_mem_len if zeros else 0)
        return lengths + zeros - evicted, slots.clamp(max=config.compressed_mem_len)

    # Attention.

    def rows_beside(self, hidden_states, key):
        rows = {"hidden": hidden_states[:, None]}
        if self.compression.chooses:
            rows["content_key"] = key
        return rows

    def _view_key(self):
        # Which rows the slots hold differs from layer to layer where they are chosen.
        return (*super()._view_key(), self.layer_idx) if self.compression.chooses else super()._view_key()

    def make_view(self, state: LayerState, piece) -> RowView:
        config, width = self.config, piece.width
        begin = torch.minimum(piece.positions[:, :1], piece.lengths[:, None])  # (B, 1), also of rows that have ended
        segments = begin // config.segment_len
        rows, slots = self._counts(piece.mem_len, segments, begin)
        held = (rows + slots)[:, 0]
        if piece.fillers is not None:  # a row that has ended needs nothing
            held = held.masked_fill(piece.fillers >= width, 0)
        past = int(held.max())
        age = torch.arange(past - 1, -1, -1)[None]  # 0: the newest row before the piece
        first = torch.where(
            age < rows, begin - 1 - age, self._first_of_age(state, piece.mem_len, age - rows, segments)
        )  # (B, U)
        kept = age < held[:, None]
        mask = None
        begins = piece.document_start
        if not bool(kept.all()) or bool((begins[:, -1:] > first[:, :1]).any()) or bool((begins[:, -1:] > begin).any()):
            causal = torch.ones(width, width, dtype=torch.bool).tril()
            before = kept[:, None] & (first[:, None] >= begins[:, :, None])
            inside = causal & (piece.positions[:, None] >= begins[:, :, None])
            mask = torch.cat([before, inside], 2)[:, None].to(piece.device)
        key_positions = piece.key_positions(past)
        if piece.is_irregular:
            oldest = key_positions.gather(1, (past - rows).clamp(0, past + width - 1))
            slot = oldest - 1 - (age - rows)
            key_positions = torch.cat([torch.where(age < rows, key_positions[:, :past], slot), key_positions[:, past:]], 1)
        sinks = None
        if config.num_sink_tokens:
            oldest = self._evicted(config, piece.mem_len, segments) - self._zeros(config, piece.mem_len)
            sinks = self.view_sinks(oldest.expand_as(piece.positions), piece, between=slots)
        return RowView(
            past=past,
            mask=mask,
            distances=piece.falling(past + width),
            gather_distances=self.gather_distances(piece, key_positions),
            query_positions=piece.encode_positions,
            key_positions=key_positions,
            needed=int((rows + slots).max()) + width,
            kept=self.kept_rows(config, piece.mem_len) + piece.undo,
            sinks=sinks,
        )

    def _first_of_age(self, state: LayerState, mem_len: int, age, segments):
        """Oldest token that reaches a slot, (B, U); age: 0 is the newest slot of the row (others are no slots)."""
        if self.compression.chooses and "place" in state.fixed:
            place = state.fixed["place"].cpu()
            return place.gather(1, (place.shape[1] - 1 - age).clamp(0, place.shape[1] - 1))
        evicted = self._evicted(self.config, mem_len, segments)
        return self._first_of_slot(self.config, mem_len, evicted // self.config.compression_rate - 1 - age)

    def _newest_of_age(self, state: LayerState, mem_len: int, age, segments):
        """Newest token that reaches a slot; as `_first_of_age`."""
        if self.compression.chooses:
            return self._first_of_age(state, mem_len, age, segments)
        rate = self.config.compression_rate
        slot = self._evicted(self.config, mem_len, segments) // rate - 1 - age
        return slot * rate + rate - 1 - self._zeros(self.config, mem_len)

    def slot_positions(self, state, mem_len, position):
        begin = torch.tensor([[position]])
        segments = begin // self.config.segment_len
        _, slots = self._counts(mem_len, segments, begin)
        age = torch.arange(int(slots) - 1, -1, -1)[None]
        return self._newest_of_age(state or LayerState(), mem_len, age, segments)[0]

    def attend(self, attention, hidden_states, state, piece):
        attended = super().attend(attention, hidden_states, state, piece)
        if attended.weights is not None and piece.start:  # in a call's first piece they stand so already
            attended = attended._replace(weights=self._by_call_column(attended.weights, state or LayerState(), piece))
        return attended

    def _by_call_column(self, weights, state: LayerState, piece):
        """Weights (B, H, t, s + U + t) moved to columns that stand for the same at every piece of a call: sinks, the rows
        held at its start, its tokens so far. What goes to a slot made during the call goes to its newest token."""
        config, sinks = self.config, self.config.num_sink_tokens
        begin, start = piece.positions[:, :1], piece.call_start[:, None]
        rows, _ = self._counts(piece.mem_len, begin // config.segment_len, begin)
        first_rows, first_slots = self._counts(piece.mem_len, start // config.segment_len, start)
        before = int((first_rows + first_slots).max())
        past = weights.shape[-1] - sinks - piece.width
        age = torch.arange(past - 1, -1, -1)[None]
        rate = config.compression_rate
        slot = self._evicted(config, piece.mem_len, begin // config.segment_len) // rate - 1 - (age - rows)
        at_start = self._evicted(config, piece.mem_len, start // config.segment_len) // rate
        newest = self._newest_of_age(state, piece.mem_len, age - rows, begin // config.segment_len)
        column = torch.where(slot < at_start, before - first_rows - (at_start - slot), before + newest - start)
        column = torch.where(age < rows, before + begin - 1 - age - start, column)
        own = before + piece.positions - start
        sink_columns = torch.arange(sinks)[None].expand(len(begin), -1)
        columns = torch.cat([sink_columns, sinks + torch.cat([column, own], 1).clamp(min=0)], 1).to(weights.device)
        moved = weights.new_zeros(*weights.shape[:3], sinks + before + piece.stop)
        columns = columns.clamp(max=moved.shape[-1] - 1)[:, None, None].expand_as(weights)  # what is nothing weighs nothing
        return moved.scatter_add(-1, columns, weights)

    # The close of a segment.

    @torch.no_grad()
    def observe(self, attention, state, view, piece, projected):
        if not self.compression.chooses:
            return state
        query, past_key, _ = projected
        begin = piece.positions[:, :1]
        segments = begin // self.config.segment_len
        rows, _ = self._counts(piece.mem_len, segments, begin)
        memory = rows - begin % self.config.segment_len  # rows of the memory; the others are the open segment's
        size = piece.mem_len + self.config.compression_rate - 1
        usage = state.fixed.get("usage")
        if usage is None:
            usage = query.new_zeros(query.shape[0], size, dtype=torch.promote_types(query.dtype, torch.float32))
        if view.past:
            if past_key is None:
                past_key = state.last("content_key", view.past + piece.width)[:, :, : view.past].to(query.dtype)
            number = torch.arange(size)[None]
            column = (view.past - rows + number).clamp(0, view.past - 1)
            position = begin - rows + number
            visible = (number < memory)[:, None] & (position[:, None] >= piece.document_start[:, :, None])  # (B, t, M)
            if piece.fillers is not None:
                visible &= (torch.arange(piece.width) < piece.width - piece.fillers[:, None])[:, :, None]
            index = column[:, None, :, None].expand(-1, past_key.shape[1], -1, past_key.shape[3]).to(query.device)
            weights = content_weights(query, past_key.gather(2, index), visible[:, None].to(query.device))
            usage = usage + attention.mean_over_heads(weights.sum((1, 2)))
        return state.with_fixed(usage=usage)

    def prepare(self, attention, hidden_states, state, piece):
        super().prepare(attention, hidden_states, state, piece)
        self._closing(piece)

    def close(self, attention, state, piece, dtype, projected):
        closing = self._closing(piece)
        learns = piece.wants_aux_loss and self.config.compression_loss is not None
        usage = state.fixed.get("usage")
        made: list[tuple[torch.Tensor, torch.Tensor]] = []  # for each group the slots' rows and where in the old ones they lay
        total, count = None, 0
        if learns:  # its gradient is zero where nothing was evicted, and not missing
            total = sum((parameter.sum() * 0 for parameter in self.parameters()), torch.zeros((), device=piece.device))
        for group in closing.groups:
            hidden = state.last("hidden", state.size)[:, 0].detach()
            column = state.size + group.from_end
            old = hidden[group.chosen[:, None], column].to(dtype)
            with torch.set_grad_enabled(learns and torch.is_grad_enabled()):
                if usage is not None:
                    kept = cast(MostUsed, self.compression).choose(usage[group.chosen, : old.shape[1]])
                    new = old.gather(1, kept[..., None].expand(-1, -1, old.shape[-1]))
                else:
                    new, kept = self.compression(old), column[:, :0]
            if total is not None:
                if self.decompression is not None:
                    total = total + squared(self.decompression(new) - old)
                else:
                    segment = hidden[:, -self.config.segment_len :].to(dtype)
                    total = total + self._attention_loss(attention, piece, group, segment, new, projected)
                count += len(old)
            made.append((new.detach(), kept))
        aux_loss = None if total is None else torch.stack([total, torch.full_like(total, count)])
        if usage is not None and closing.closes is not None:
            state = state.with_fixed(usage=usage.masked_fill(closing.closes, 0.0))
        if made:
            state = self._with_slots(attention, state, piece, closing, made)
            if attention.position.rotates and not self.is_hidden(piece):
                self._encode_slots(attention, state, piece, closing, dtype)
        return state, aux_loss

    def _closing(self, piece) -> Closing:
        """Made once for all layers."""
        key = (self.name, "closing")
        if key in piece.memo:
            return piece.memo[key]
        config, rate, device = self.config, self.config.compression_rate, piece.device
        after = piece.lengths[:, None]
        closes = (after % config.segment_len == 0) & (after > piece.positions[:, :1])
        closing = piece.memo[key] = Closing()
        if not bool(closes.any()):
            return closing
        closing.closes = closes.to(device)
        segments = after // config.segment_len
        before = segments - closes.long()  # segments closed until now
        rows, slots = self._counts(piece.mem_len, before, after)
        evicted = self._evicted(config, piece.mem_len, segments) - self._evicted(config, piece.mem_len, before)  # (B, 1)
        for number in sorted(set(evicted.flatten().tolist()) - {0}):
            chosen = (evicted == number)[:, 0].nonzero()[:, 0]
            first, fed = rows[chosen], (after - piece.positions[:, :1])[chosen]
            closing.groups.append(
                Group(
                    chosen=chosen.to(device),
                    from_end=(torch.arange(number) - first).to(device),
                    from_past_end=(torch.arange(number) - first + fed).to(device),
                    position=(after[chosen] - first + torch.arange(number)).to(device),
                )
            )
        number = evicted // rate
        closing.rows = rows - evicted
        closing.most_rows = int(closing.rows.max())
        most_slots = (slots + number).clamp(max=config.compressed_mem_len)
        closing.slots, closing.made = int(most_slots.max()), int(number.max())
        if all(bool((counts == counts[:1]).all()) for counts in (rows, slots, evicted)):
            return closing
        height = closing.most_rows + closing.slots
        # Each row of the new state comes from a row of the old one, or from behind it, where the new slots are put. Age 0
        # is the newest; the slots' ages follow the rows'.
        age = torch.arange(height - 1, -1, -1)[None]
        slot_age = age - closing.rows
        from_old = -1 - torch.where(slot_age < 0, age, rows + slot_age - number)
        source = torch.where((slot_age >= 0) & (slot_age < number), closing.made - 1 - slot_age, from_old)
        closing.source = source.to(device)
        return closing

    def _attention_loss(self, attention, piece, group: Group, segment, new, projected: Projected):
        """Sum over the rows of the batch of the mean squared difference between what the segment (B, L, E) reads from the rows
        that leave and from the new ones, by content alone (section 3.2)."""
        with torch.no_grad():
            if piece.width == self.config.segment_len and piece.fillers is None:
                query = projected.query[group.chosen]
            else:  # the piece is only the segment's end
                query = attention.project_queries(segment[group.chosen])
            # What leaves was attended to by the piece, and so projected.
            past = cast(tuple[torch.Tensor, torch.Tensor], projected[1:])
            rows = group.chosen[:, None], slice(None), past[0].shape[2] + group.from_past_end
            target = content_attention(query, *(tensor[rows].transpose(1, 2) for tensor in past))
        return attention.mean_over_heads(squared(content_attention(query, *attention.project_past(new, frozen=True)) - target))

    def _with_slots(self, attention, state: LayerState, piece, closing: Closing, made) -> LayerState:
        """The state with the new rows as the newest slots and without what was evicted."""
        height = closing.most_rows + closing.slots
        # Without gradient there is room for the next segment, which would else copy all of it once more.
        room = 0 if torch.is_grad_enabled() else self.config.segment_len

        def moved(name: str, parts):
            """The rows of that name, (B, heads, height, size); parts: those of the new slots for each group."""
            tensor = state.last(name, state.size)
            new = tensor.new_zeros(*tensor.shape[:2], closing.made, tensor.shape[3])
            for group, part in zip(closing.groups, parts, strict=True):
                new[group.chosen, :, closing.made - part.shape[2] :] = part.to(new.dtype)
            if closing.source is None:
                newest = state.size - closing.most_rows
                oldest = newest - closing.made * self.config.compression_rate
                kept = max(closing.slots - closing.made, 0)  # more slots may be made than there is place for
                space = new.new_empty(*new.shape[:2], room, new.shape[3])
                slots = (tensor[:, :, oldest - kept : oldest], new[:, :, -closing.slots :])
                return torch.cat([*slots, tensor[:, :, newest:], space], 2)
            source = (state.size + closing.source).clamp(min=0)  # rows that hold less than others have nothing there
            index = functional.pad(source, (0, room))[:, None, :, None].expand(-1, tensor.shape[1], -1, tensor.shape[3])
            return torch.cat([tensor, new], 2).gather(2, index)

        rows = {"hidden": moved("hidden", [new[:, None] for new, _ in made])}
        fixed = dict(state.fixed)
        if self.compression.chooses:
            place = fixed.get("place")
            if place is None:
                place = torch.zeros(rows["hidden"].shape[0], self.config.compressed_mem_len, dtype=torch.long).to(piece.device)
            for group, (_, kept) in zip(closing.groups, made, strict=True):
                longer = torch.cat([place[group.chosen], group.position.gather(1, kept)], 1)
                place = place.index_copy(0, group.chosen, longer[:, -place.shape[1] :])
            fixed["place"] = place
        if not self.is_hidden(piece):
            projected = [attention.project_past(new) for new, _ in made]
            for name, part in (("content_key", 0), ("value", 1), ("key", 0)):
                if name in state.rows:
                    rows[name] = moved(name, [parts[part] for parts in projected])
        return LayerState(rows, fixed, height, height)

    def _encode_slots(self, attention, state: LayerState, piece, closing: Closing, dtype) -> None:
        """Encodes the slots' keys, in place, where they stand now: just before the oldest row."""
        rows = {name: state.last(name, state.size) for name in state.rows}
        key, after_rows, most = rows["key"], closing.rows, closing.slots
        column = key.shape[2] - after_rows - torch.arange(most, 0, -1)[None]  # (B, most)
        if piece.is_irregular:
            fillers = piece.positions[:, -1:] + 1 - piece.lengths[:, None]  # since the row's last token
            place = piece.history.shape[1] - fillers - after_rows
            oldest = piece.history.gather(1, place.clamp(0, piece.history.shape[1] - 1))
        else:
            oldest = piece.lengths[:, None] + (piece.encode_positions - piece.positions)[:, -1:] - after_rows
        positions = oldest - torch.arange(most, 0, -1)[None]
        index = column.to(key.device)[:, None, :, None]
        if "content_key" in rows:
            plain = rows["content_key"].gather(2, index.expand(-1, key.shape[1], -1, key.shape[3])).to(dtype)
        else:
            hidden = rows["hidden"].gather(2, index.expand(-1, 1, -1, rows["hidden"].shape[3]))
            plain = attention.project_keys(hidden[:, 0].to(dtype))
        _, encoded = attention.encode(plain[:, :1], plain, positions, positions, piece.context)
        key.scatter_(2, index.expand_as(encoded), encoded.to(key.dtype))


def squared(difference) -> torch.Tensor:
    """Sum over the rows of the batch of the mean square, in float32 at least."""
    return difference.to(torch.promote_types(difference.dtype, torch.float32)).square().flatten(1).mean(1).sum()


def content_weights(query, key, visible) -> torch.Tensor:
    """Softmax over content alone, mean over heads, (B, 1, t, n); zero where not `visible` (B, 1, t, n)."""
    key = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
    scores = (query @ key.transpose(-1, -2)) * query.shape[-1] ** -0.5
    scores = scores.to(torch.promote_types(scores.dtype, torch.float32)).masked_fill(~visible, torch.finfo(scores.dtype).min)
    return (scores.softmax(-1) * visible).mean(1, keepdim=True)


def content_attention(query, key, value) -> torch.Tensor:
    """Attention by content alone, every query to every row: no positions, no mask (equation of section 3.2)."""
    return functional.scaled_dot_product_attention(query, key, value, enable_gqa=key.shape[1] != query.shape[1])
