"""How much text tokens stand for: bytes and characters, counted piece by piece, so that no text is held whole."""

import torch
from transformers import ByT5Tokenizer, PreTrainedTokenizerBase

# Tokens of what is before that are decoded again with a piece.
OVERLAP = 16


class Extent:
    """The UTF-8 bytes and the characters (Unicode code points) of tokens that come in pieces."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        self.tokenizer = tokenizer
        self.special_ids = torch.tensor(tokenizer.all_special_ids, dtype=torch.long)
        self.num_bytes = self.num_characters = 0
        self.begin()

    def begin(self) -> None:
        """What comes next does not go on with what was."""
        self.last = torch.empty(0, dtype=torch.long)

    def add(self, tokens: torch.Tensor) -> None:
        """Counts tokens [n] that follow those before, cut anywhere.

        The sum is that of all tokens decoded at once, for decoders that look back no further than 16 tokens.
        """
        # Together with what is before: what some decoders put between two words, or leave out there, depends on both.
        joined = torch.cat([self.last, tokens])
        (num_bytes, num_characters), known = text_size(joined, self.tokenizer), text_size(self.last, self.tokenizer)
        self.num_bytes += num_bytes - known[0]
        self.num_characters += num_characters - known[1]
        is_text = ~torch.isin(joined, self.special_ids)
        newest = int(is_text.nonzero()[-1]) if bool(is_text.any()) else 0
        self.last = joined[max(0, min(newest, len(joined) - OVERLAP)) :]


def text_size(tokens: torch.Tensor, tokenizer: PreTrainedTokenizerBase) -> tuple[int, int]:
    """(UTF-8 bytes, code points) of the text that `tokens` [N] stand for; special tokens have none.

    Of a tokenizer of bytes, a character counts where its first byte is among the tokens.
    """
    if isinstance(tokenizer, ByT5Tokenizer):
        codes = tokens[tokens >= tokenizer.offset] - tokenizer.offset
        return len(codes), int(((codes & 0xC0) != 0x80).sum())
    text = tokenizer.decode(tokens.tolist(), skip_special_tokens=True, clean_up_tokenization_spaces=False)
    return len(text.encode()), len(text)
