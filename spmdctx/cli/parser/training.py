"""The arguments of `train` and `generate`."""

from __future__ import annotations

import argparse
from pathlib import Path

from spmdctx.cli.parser.program import add_program_arguments
from spmdctx.cli.parser.values import fraction, natural, positive, seed, target
from spmdctx.wording.targets import TARGETS


def add_train_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `train`."""
    add_program_arguments(parser, only_decoders=True)
    training = parser.add_argument_group("training")
    training.add_argument("--steps", type=natural, default=120, metavar="N", help="training steps (default: %(default)s)")
    training.add_argument("--text", metavar="FILE", help="UTF-8 text to train on (default: Python's language reference)")
    training.add_argument("--learning-rate", type=fraction, default=3e-3, metavar="X", help="of AdamW (default: %(default)s)")
    training.add_argument("--seed", type=seed, default=0, metavar="N", help="of parameters and batches (default: %(default)s)")
    training.add_argument(
        "--save-every",
        type=positive,
        metavar="N",
        help="save every N steps, and go on from the last one where this command was stopped before (default: at the end only)",
    )
    training.add_argument(
        "--metrics",
        action="append",
        default=[],
        type=target,
        metavar="WHERE",
        help=f"write loss and seconds of each step, and the report; may be given several times: {TARGETS} (default: nowhere)",
    )
    training.add_argument("--out", type=Path, default=Path("out"), metavar="DIR", help="where state and plan go (default: %(default)s)")


def add_generate_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `generate`."""
    parser.add_argument("checkpoint", type=Path, help="what train wrote, a CheckpointManager's folder, or a folder of files per rank")
    text = parser.add_argument_group("text")
    text.add_argument("--prompt", action="append", metavar="TEXT", help="what the text begins with; several make a batch (default: 'The ')")
    text.add_argument("--tokens", type=int, default=48, metavar="N", help="new tokens (default: %(default)s)")
    text.add_argument("--temperature", type=float, default=0.0, metavar="X", help="0 takes the likeliest token (default: %(default)s)")
    text.add_argument(
        "--spell",
        action="store_true",
        help="let the model spell words letter by letter, too (default: only words that train's tokenizer knows)",
    )
    text.add_argument("--stop", metavar="TEXT", help="a token that ends a text, such as </s> (default: none)")
    text.add_argument("--seed", type=seed, default=0, metavar="N", help="of the draws (default: %(default)s)")
    text.add_argument(
        "--tokenizer",
        type=Path,
        metavar="FILE",
        help="of train, or of the tokenizers library (default: that of the checkpoint, else bytes)",
    )
    text.add_argument(
        "--train-strategy", type=Path, metavar="FILE", help="how files per rank are split (default: strategy.json beside them)"
    )
    add_program_arguments(parser)
