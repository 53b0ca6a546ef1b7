"""Text to train on: the prose that every Python ships, a tokenizer learnt from it, and batches of windows."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from spmdctx.errors import ContextError
from spmdctx.models.training import Batch

NUM_BYTES = 256
_PIECE = re.compile(r" ?\w+|\s+|[^\w\s]+")


def read_text(path: str | Path | None = None) -> str:
    """The text of a file, or the language reference in `pydoc_data.topics`.

    Raises:
        ContextError: the file is no UTF-8 text.
        OSError: it cannot be read.
    """
    if path is None:
        from pydoc_data.topics import topics  # half a megabyte that only training needs

        return "\n\n".join(topics.values())
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ContextError(f"{path} is no UTF-8 text.", got=f"byte {error.object[error.start]:#x} at offset {error.start}") from None


class WordTokenizer:
    """Numbers for the most frequent words of a text, and one for each byte, so that any text can be written.

    Args:
        words: the words, in the order of their numbers after the 256 bytes.
    """

    def __init__(self, words: tuple[str, ...]) -> None:
        self.words = words
        self._numbers = {word: NUM_BYTES + index for index, word in enumerate(words)}

    @classmethod
    def train(cls, text: str, vocab_size: int) -> WordTokenizer:
        """Learns the words that save the most bytes; at most `vocab_size` numbers in all."""
        counts = Counter(_PIECE.findall(text))
        savings = {piece: (len(piece.encode()) - 1) * count for piece, count in counts.items() if len(piece.encode()) > 1}
        best = sorted(savings, key=lambda piece: (-savings[piece], piece))
        return cls(tuple(best[: max(0, vocab_size - NUM_BYTES)]))

    @property
    def vocab_size(self) -> int:
        """How many numbers there are."""
        return NUM_BYTES + len(self.words)

    def encode(self, text: str) -> np.ndarray:
        """Token numbers of a text, [tokens] int32."""
        numbers: list[int] = []
        for piece in _PIECE.findall(text):
            number = self._numbers.get(piece)
            numbers.extend(piece.encode() if number is None else (number,))
        return np.asarray(numbers, np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """The text of token numbers; bytes that form no character are shown as the replacement character."""
        parts = [self.words[token - NUM_BYTES].encode() if token >= NUM_BYTES else bytes([token]) for token in map(int, tokens)]
        return b"".join(parts).decode(errors="replace")


def batches(tokens: np.ndarray, batch_size: int, seq: int, *, seed: int = 0) -> Iterator[Batch]:
    """Endless batches of windows at random places of a token stream, the same for the same seed.

    Raises:
        ContextError: the stream is shorter than one window.
    """
    if len(tokens) <= seq:
        raise ContextError("The text is shorter than one sequence.", got=f"{len(tokens)} tokens", need=f"at least {seq + 1}")
    return _windows(tokens, batch_size, seq, np.random.default_rng(seed))


def _windows(tokens: np.ndarray, batch_size: int, seq: int, rng: np.random.Generator) -> Iterator[Batch]:
    while True:
        starts = rng.integers(len(tokens) - seq, size=batch_size)
        window = tokens[starts[:, None] + np.arange(seq + 1)]
        yield {"inputs": window[:, :-1], "targets": window[:, 1:]}
