"""Training text: the prose that every Python ships, a tokenizer learned from it, and batches of windows."""

from __future__ import annotations

import json
import os
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from spmdctx.errors import ContextError, UnsupportedError
from spmdctx.models.training import Batch
from spmdctx.wording.files import read_file, write_file
from spmdctx.wording.text_data import read_json_text

NUM_BYTES = 256
_FORMAT = "spmdctx words"
_PIECE = re.compile(r" ?\w+|\s+|[^\w\s]+")


_MOST_BYTES = 1 << 30
"""The bytes of a text, all of which is read."""


_PROSE = 0.94
"""The least share of letters, spaces, commas and periods in a paragraph of prose."""


def read_text(path: str | Path | None = None) -> str:
    """Reads the text of a file, or the prose of the language reference in `pydoc_data.topics`, without its code and grammar.

    Raises:
        ContextError: the file is not UTF-8 text.
        OSError: the file cannot be read.
    """
    if path is None:
        from pydoc_data.topics import topics  # half a megabyte that only training needs

        return "\n\n".join(part for topic in topics.values() for part in topic.split("\n\n") if _is_prose(part))
    try:
        return read_file(path, _MOST_BYTES).decode()
    except UnicodeDecodeError as error:
        raise ContextError(f"{path} is no UTF-8 text.", got=f"byte {error.object[error.start]:#x} at offset {error.start}") from None
    except ValueError as error:
        raise ContextError("The text cannot be read.", where=str(path), got=str(error)) from None


def _is_prose(paragraph: str) -> bool:
    return sum(one.isalpha() or one in " ,.\n" for one in paragraph) > _PROSE * len(paragraph)


class Tokenizer(Protocol):
    """Text to token numbers and back."""

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""

    def encode(self, text: str) -> np.ndarray:
        """Returns the token numbers of a text, [tokens] int32."""

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of token numbers."""


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
        """The number of tokens."""
        return NUM_BYTES + len(self.words)

    def encode(self, text: str) -> np.ndarray:
        """Returns the token numbers of a text, [tokens] int32."""
        numbers: list[int] = []
        for piece in _PIECE.findall(text):
            number = self._numbers.get(piece)
            numbers.extend(piece.encode() if number is None else (number,))
        return np.asarray(numbers, np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of token numbers; unknown ones and bytes that form no character become the replacement character."""
        return b"".join(map(self._bytes_of, map(int, tokens))).decode(errors="replace")

    def are_whole(self, vocab_size: int) -> np.ndarray:
        """Returns which of a model's tokens are words, spaces or punctuation, and not letters of words to be spelled, [vocab] bool."""
        whole = np.zeros(vocab_size, bool)
        whole[NUM_BYTES : self.vocab_size] = True
        whole[[number for number in range(128) if not (chr(number).isalnum() or chr(number) == "_" or number < ord(" "))]] = True
        whole[ord("\n")] = True
        return whole

    def save(self, path: str | os.PathLike[str]) -> None:
        """Writes the words as JSON, for `read_tokenizer`.

        Raises:
            FileError: the file cannot be written; a former one is as it was.
        """
        write_file(path, json.dumps({"format": _FORMAT, "words": self.words}, ensure_ascii=False))

    def _bytes_of(self, token: int) -> bytes:
        if token < NUM_BYTES:
            return bytes([token])
        return self.words[token - NUM_BYTES].encode() if token < self.vocab_size else b"\xff"


class LibraryTokenizer:
    """A tokenizer file of Hugging Face's tokenizers library.

    Args:
        path: the file, usually called tokenizer.json.

    Raises:
        UnsupportedError: the library is not installed.
        ContextError: it cannot read the file.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        try:
            from tokenizers import Tokenizer as Library
        except ImportError as error:
            raise UnsupportedError(
                "This tokenizer file needs the tokenizers library.", where=str(path), fix="pip install tokenizers"
            ) from error
        try:
            self._own: Any = Library.from_file(os.fspath(path))
        except Exception as error:
            raise ContextError("The tokenizer file cannot be read.", where=str(path), got=str(error)) from error

    @property
    def vocab_size(self) -> int:
        """The number of tokens."""
        return int(self._own.get_vocab_size())

    def encode(self, text: str) -> np.ndarray:
        """Returns the token numbers of a text, [tokens] int32."""
        return np.asarray(self._own.encode(text).ids, np.int32)

    def decode(self, tokens: np.ndarray) -> str:
        """Returns the text of token numbers."""
        return str(self._own.decode([int(token) for token in tokens]))


def read_tokenizer(path: str | os.PathLike[str] | None = None) -> Tokenizer:
    """Reads the tokenizer of a file that `WordTokenizer.save` or the tokenizers library wrote; by default the 256 bytes.

    Raises:
        ContextError: the file is not a tokenizer.
        UnsupportedError: the file needs a library that is not installed.
        OSError: the file cannot be read.
    """
    if path is None:
        return WordTokenizer(())
    try:
        body = read_json_text(read_file(path))
    except ValueError as error:
        raise ContextError("The tokenizer file holds no JSON text.", where=str(path), got=str(error)) from error
    if isinstance(body, dict) and body.get("format") == _FORMAT:
        return WordTokenizer(tuple(map(str, body["words"])))
    if not isinstance(body, dict) or "model" not in body:
        raise ContextError("The file is no tokenizer.", where=str(path), need=f"format {_FORMAT!r}, or a file of the tokenizers library")
    return LibraryTokenizer(path)


def batches(tokens: np.ndarray, batch_size: int, seq: int, *, seed: int = 0) -> Iterator[Batch]:
    """Yields endless batches of windows at random places of a token stream, the same for the same seed.

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
