"""`spmdctx generate`: generates text from a checkpoint with a decoder planned for other devices than it was trained on."""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np

from spmdctx.checkpoint import CheckpointManager, load_distributed_checkpoint
from spmdctx.checkpoint.per_rank import complete_files
from spmdctx.cli.output import Output
from spmdctx.cli.program import Choice, started
from spmdctx.errors import CheckpointError, ContextError
from spmdctx.models import Decoder, DecoderConfig, Generator, Lora, Tokenizer, WordTokenizer, read_tokenizer
from spmdctx.wording.files import read_file, write_file
from spmdctx.wording.text_data import read_json_text

MODEL, TOKENIZER, STATE = "model.json", "tokenizer.json", "state"
"""Files that `spmdctx train` writes into its folder besides the plan: sizes, words and checkpoints."""


def generate(arguments: argparse.Namespace, output: Output) -> int:
    """Plans the decoder, loads its parameters by slices, and generates text."""
    choice = started(arguments, output)
    config, tokenizer = _model(choice, arguments.checkpoint), _tokenizer(arguments)
    prompts = [_encoded(tokenizer, text, config) for text in arguments.prompt or ["The "]]
    stop = None if arguments.stop is None else _stop(tokenizer, arguments.stop)
    _check_options(arguments)
    _check_checkpoint(arguments)  # before the planning, which takes longer
    length = max(map(len, prompts)) + arguments.tokens
    allowed = None if arguments.spell or not isinstance(tokenizer, WordTokenizer) else tokenizer.are_whole(config.vocab_size)
    if allowed is not None and stop is not None:
        allowed[stop] = True
    with choice.context():
        generator = Generator(config, batch=len(prompts), length=length, split=choice.split, allowed=allowed, **choice.step_options)
        with output.waiting("planning the step of one token"):
            plan = generator.plan
        output.show(plan)
        with output.waiting("loading the parameters, each device its slices"):
            network, loaded = _loaded(generator, arguments)
        output.title("Text")
        start = time.perf_counter()
        tokens = generator.run(network, prompts, arguments.tokens, temperature=arguments.temperature, seed=arguments.seed, stop=stop)
        seconds = time.perf_counter() - start
    texts = [tokenizer.decode(np.concatenate([prompt, _until(row, stop)])) for prompt, row in zip(prompts, tokens, strict=True)]
    for text in texts:
        output.say(text)
    output.say(f"{loaded}; {tokens.size} tokens in {seconds:.1f} s, compiling included")
    output.finish_with(
        "generate", {"plan": plan.to_dict(), "texts": texts, "tokens": tokens.tolist(), "seconds": seconds, "loaded": loaded}
    )
    return 0


def save_model(folder: Path, config: DecoderConfig, tokenizer: WordTokenizer) -> None:
    """Writes what `generate` needs besides the parameters: a decoder's sizes, and its words."""
    write_file(folder / MODEL, json.dumps(asdict(config), indent=1))
    tokenizer.save(folder / TOKENIZER)


def _model(choice: Choice, folder: Path) -> DecoderConfig:
    """Returns the sizes stored with the checkpoint, else those of the arguments."""
    path = folder / MODEL
    if not path.is_file():
        return replace(choice.decoder(), max_seq=choice.seq)
    try:
        body: dict[str, Any] = read_json_text(read_file(path))
        lora = body.pop("lora", None)
        return DecoderConfig(**body, lora=None if lora is None else Lora(**{**lora, "targets": tuple(lora["targets"])}))
    except (ValueError, TypeError, AttributeError) as error:
        raise CheckpointError("The sizes of the model cannot be read.", where=str(path), got=str(error)) from error


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    beside = arguments.checkpoint / TOKENIZER
    return read_tokenizer(arguments.tokenizer or (beside if beside.is_file() else None))


def _encoded(tokenizer: Tokenizer, text: str, config: DecoderConfig) -> np.ndarray:
    tokens = tokenizer.encode(text)
    if not len(tokens):
        raise ContextError("A prompt has at least one token.", got=repr(text))
    if int(tokens.max()) >= config.vocab_size:
        raise ContextError(
            "The tokenizer has tokens that the model does not know.", got=f"token {tokens.max()}", need=f"numbers below {config.vocab_size}"
        )
    return tokens


def _stop(tokenizer: Tokenizer, text: str) -> int:
    tokens = tokenizer.encode(text)
    if len(tokens) != 1:
        raise ContextError("--stop is no token of the tokenizer.", got=f"{text!r}, which is {len(tokens)} tokens", need="one")
    return int(tokens[0])


def _until(tokens: np.ndarray, stop: int | None) -> np.ndarray:
    """Returns the tokens before the first one that ends the text."""
    return tokens if stop is None else tokens[: np.argmax(np.append(tokens, stop) == stop)]


def _check_options(arguments: argparse.Namespace) -> None:
    if arguments.tokens < 1 or not 0 <= arguments.temperature < math.inf:
        raise ContextError(
            "--tokens must be at least 1, and --temperature a number from 0 on.", got=f"{arguments.tokens} and {arguments.temperature}"
        )


def _checkpoint_folder(folder: Path) -> Path:
    """Returns the folder of checkpoints inside one that `train` wrote, else the folder itself."""
    state = folder / STATE if (folder / STATE).is_dir() else folder
    if not state.is_dir():
        raise CheckpointError("There is no such checkpoint.", where=str(state))
    return state


def _check_checkpoint(arguments: argparse.Namespace) -> None:
    """Refuses a folder without a complete checkpoint."""
    if (arguments.checkpoint / "rank_0").is_dir():
        complete_files(arguments.checkpoint, arguments.train_strategy)
        return
    state = _checkpoint_folder(arguments.checkpoint)
    with CheckpointManager(state, keep=None) as checkpoints:
        if checkpoints.latest_step() is None:
            raise CheckpointError(
                "The folder holds no complete checkpoint.", where=str(state), need="what train, or a CheckpointManager, wrote"
            )


def _loaded(generator: Generator, arguments: argparse.Namespace) -> tuple[Decoder, str]:
    """Returns the decoder with its parameters, and a text that says what was read."""
    network, folder = generator.network(), arguments.checkpoint
    if (folder / "rank_0").is_dir():
        reads = load_distributed_checkpoint({"model": network}, folder, generator.layouts, arguments.train_strategy).reads
        return network, f"{reads.read_bytes} bytes read for {reads.needed_bytes} of parameters, {reads.num_files} files"
    with CheckpointManager(_checkpoint_folder(folder), keep=None) as checkpoints:
        restored = checkpoints.restore({"model": network}, shardings={"model": generator.shardings})
    return network, f"checkpoint of step {restored.step}"
