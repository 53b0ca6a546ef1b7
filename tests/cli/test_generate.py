"""`spmdctx generate`: from what train wrote and from files per rank, the same text on any number of devices."""

from __future__ import annotations

import json

import pytest

import spmdctx
from spmdctx.checkpoint import CheckpointManager
from spmdctx.cli.main import main
from spmdctx.models import WordTokenizer, create, preset, read_tokenizer

PROMPT = ["--prompt", "The value of", "--prompt", "An object", "--tokens", "6"]


@pytest.fixture(scope="module")
def run_folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    arguments = ["--layers", "1", "--seq", "24", "--batch-size", "8", "--steps", "4", "--out", str(folder)]
    assert main(["train", *arguments, "--parallel-mode", "semi_auto_parallel"]) == 0
    return folder


def run(capsys, *arguments):
    capsys.readouterr()
    code = main(["generate", *map(str, arguments), "--json"])
    return code, json.loads(capsys.readouterr().out) if code == 0 else None


@pytest.fixture(scope="module")
def ranks(run_folder):
    """The same parameters in files per rank."""
    from spmdctx.cli.generate import _model

    config = _model(None, run_folder)
    model, optimizer = create(config, seed=1)
    with CheckpointManager(run_folder / "state") as checkpoints:
        checkpoints.restore({"model": model, "optimizer": optimizer})
    spmdctx.save_distributed_checkpoint({"model": model, "optimizer": optimizer}, run_folder / "ranks")
    for name in ("model.json", "tokenizer.json"):
        (run_folder / "ranks" / name).write_bytes((run_folder / name).read_bytes())
    return run_folder / "ranks"


def test_every_form_of_a_checkpoint_gives_the_same_text_on_any_devices(run_folder, ranks, capsys):
    code, found = run(capsys, run_folder, *PROMPT, "--device-num", "4")
    assert code == 0
    assert found["texts"][0].startswith("The value of")
    assert len(found["tokens"]) == 2
    assert len(found["tokens"][0]) == 6
    assert found["loaded"] == "checkpoint of step 4"
    code, other = run(capsys, ranks, *PROMPT, "--device-num", "2", "--parallel-mode", "semi_auto_parallel")
    assert code == 0
    assert other["tokens"] == found["tokens"]
    assert "bytes read for" in other["loaded"]
    assert other["plan"]["mesh"] != found["plan"]["mesh"]


def test_a_folder_without_sizes_takes_those_of_the_arguments(run_folder, capsys):
    sizes = ["--layers", "1", "--seq", "24", "--tokenizer", str(run_folder / "tokenizer.json")]
    code, found = run(capsys, run_folder / "state", *PROMPT, *sizes, "--device-num", "1", "--temperature", "0.5")
    assert code == 0
    assert found["texts"][1].startswith("An object")


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["gone", "--layers", "1"], "no such checkpoint"),
        ([".", "--layers", "1"], "no complete checkpoint"),
        ([".", "--tokens", "0"], "--tokens must be at least 1"),
        ([".", "--temperature", "nan"], "--temperature a number from 0 on"),
        ([".", "--prompt", ""], "at least one token"),
        ([".", "--stop", "no token"], "--stop is no token of the tokenizer"),
        ([".", "--tokenizer", "words.json"], "is no tokenizer"),
        ([".", "--tokenizer", "many.json", "--prompt", "far word"], "tokens that the model does not know"),
    ],
)
def test_what_is_missing_or_wrong_is_said(tmp_path, monkeypatch, capsys, arguments, text):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "words.json").write_text("{}")
    many = [f"w{number}" for number in range(preset("tiny").vocab_size)]
    (tmp_path / "many.json").write_text(json.dumps({"format": "spmdctx words", "words": [*many, "far", " word"]}))
    assert main(["generate", *arguments, "--device-num", "1"]) == 2
    assert text in capsys.readouterr().err


@pytest.mark.parametrize("folder", ["gone", "empty", "ranks", "half"])
def test_a_bad_checkpoint_is_said_before_anything_is_planned(tmp_path, capsys, monkeypatch, folder):
    (tmp_path / "empty").mkdir()
    (tmp_path / "ranks" / "rank_0").mkdir(parents=True)
    (tmp_path / "half" / "state" / "7.orbax-checkpoint-tmp-0").mkdir(parents=True)
    monkeypatch.setattr("spmdctx.cli.generate.Generator", None)
    assert main(["generate", str(tmp_path / folder), "--layers", "1", "--device-num", "1"]) == 2
    assert str(tmp_path / folder) in capsys.readouterr().err


def test_a_strategy_that_is_missing_is_said_before_anything_is_planned(ranks, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("spmdctx.cli.generate.Generator", None)
    assert main(["generate", str(ranks), "--train-strategy", str(tmp_path / "gone.json"), "--device-num", "1"]) == 2
    assert "gone.json" in capsys.readouterr().err


def test_damaged_sizes_are_named(tmp_path, capsys):
    (tmp_path / "model.json").write_text('{"width": 3}')
    assert main(["generate", str(tmp_path)]) == 2
    assert "model.json" in capsys.readouterr().err


def test_without_a_tokenizer_text_is_bytes():
    assert list(read_tokenizer().encode("é!")) == [0xC3, 0xA9, 0x21]


def test_a_trained_checkpoint_gives_words_and_spells_none_unless_asked(run_folder, capsys):
    known = read_tokenizer(run_folder / "tokenizer.json")
    asked = [run_folder, "--tokens", "16", "--temperature", "1.5", "--device-num", "2"]
    tokens = run(capsys, *asked)[1]["tokens"][0]
    assert all(known.are_whole(known.vocab_size)[token] for token in tokens)
    assert len({token for token in tokens if token >= 256}) > 3
    spelled = run(capsys, *asked, "--spell")[1]["tokens"][0]
    assert any(token < 256 and chr(token).isalnum() for token in spelled)


def test_whole_tokens_are_words_spaces_and_punctuation():
    known = WordTokenizer((" word", "the", "\n\n"))
    whole = known.are_whole(300)
    assert whole.shape == (300,)
    assert all(whole[known.encode(text)].all() for text in (" word", "the", "\n\n", " ", "\n", ".,;()"))
    assert not whole[known.encode("xyz_1é")].any()
    assert not whole[known.vocab_size :].any()
