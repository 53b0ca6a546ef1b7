"""Tokenizer and batches."""

from __future__ import annotations

import json
import sys
from itertools import islice
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from spmdctx.errors import ContextError, UnsupportedError
from spmdctx.models import WordTokenizer, batches, read_text, read_tokenizer


@pytest.mark.parametrize("text", ["", "Assignment of an object", "naïve “quotes” 🎈\n\n\tend", "a  b   c"])
def test_any_text_survives_encoding_and_decoding(text: str) -> None:
    tokenizer = WordTokenizer.train("of of of an an object object “quotes” ", 300)
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_the_prose_of_python_is_learnt_in_few_tokens() -> None:
    text = read_text()
    tokenizer = WordTokenizer.train(text, 768)
    tokens = tokenizer.encode(text)
    assert tokenizer.vocab_size == 768
    assert tokens.dtype == np.int32
    assert len(tokens) < 0.55 * len(text.encode())
    assert tokens.max() < 768


def test_a_small_vocabulary_is_bytes_alone() -> None:
    assert WordTokenizer.train("word word word", 100).vocab_size == 256


def test_targets_are_the_tokens_that_follow() -> None:
    batch = next(batches(np.arange(100, dtype=np.int32), 4, 8))
    assert batch["inputs"].shape == (4, 8)
    np.testing.assert_array_equal(batch["targets"], batch["inputs"] + 1)


def test_the_same_seed_gives_the_same_batches() -> None:
    tokens = np.arange(1000, dtype=np.int32)
    first, again, other = (list(islice(batches(tokens, 4, 8, seed=seed), 3)) for seed in (1, 1, 2))
    np.testing.assert_equal(first, again)
    assert not np.array_equal(first[0]["inputs"], other[0]["inputs"])


def test_a_text_shorter_than_a_sequence_is_refused() -> None:
    with pytest.raises(ContextError, match="at least 9"):
        batches(np.arange(8, dtype=np.int32), 4, 8)


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "noise.bin"
    path.write_bytes(b"text \xff\xfe")
    with pytest.raises(ContextError, match=r"noise\.bin is no UTF-8 text"):
        read_text(path)


def test_a_tokenizer_comes_back_from_its_file(tmp_path: Path) -> None:
    tokenizer = WordTokenizer.train("of of of an an object object “quotes” ", 300)
    tokenizer.save(tmp_path / "tokenizer.json")
    assert read_tokenizer(tmp_path / "tokenizer.json").words == tokenizer.words
    assert tokenizer.decode(np.array([104, 105, 5000])) == "hi\N{REPLACEMENT CHARACTER}"


@pytest.mark.parametrize(("content", "text"), [("text", "no JSON text"), ("[1]", "is no tokenizer"), ('{"words": []}', "is no tokenizer")])
def test_what_is_no_tokenizer_is_refused(tmp_path: Path, content: str, text: str) -> None:
    (tmp_path / "file.json").write_text(content)
    with pytest.raises(ContextError, match=text):
        read_tokenizer(tmp_path / "file.json")


class Library:
    """Stands for tokenizers.Tokenizer."""

    def __init__(self, words: list[str]) -> None:
        self.words = words

    @classmethod
    def from_file(cls, path: str) -> Library:
        return cls(json.loads(Path(path).read_text())["model"]["vocab"])

    def get_vocab_size(self) -> int:
        return len(self.words)

    def encode(self, text: str) -> SimpleNamespace:
        return SimpleNamespace(ids=[self.words.index(word) for word in text.split()])

    def decode(self, numbers: list[int]) -> str:
        return " ".join(self.words[number] for number in numbers)


def test_files_of_the_tokenizers_library_are_read_by_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "tokenizer.json"
    path.write_text('{"model": {"vocab": ["to", "be"]}}')
    monkeypatch.setitem(sys.modules, "tokenizers", SimpleNamespace(Tokenizer=Library))
    tokenizer = read_tokenizer(path)
    assert tokenizer.vocab_size == 2
    assert list(tokenizer.encode("be to be")) == [1, 0, 1]
    assert tokenizer.decode(np.array([0, 1])) == "to be"
    path.write_text('{"model": {}}')
    with pytest.raises(ContextError, match="cannot be read"):
        read_tokenizer(path)
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    with pytest.raises(UnsupportedError, match="needs the tokenizers library"):
        read_tokenizer(path)
