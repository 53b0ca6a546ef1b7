"""Renders the option table as documentation and as command-line options."""

from __future__ import annotations

import argparse
import ast
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from spmdctx.context.options import ALGO_OPTIONS, BY_NAME, OPTIONS, PARALLEL_MODES
from spmdctx.context.storage import Option
from spmdctx.context.values import dataset_strategy_from_lists, plain
from spmdctx.errors import SpmdctxError

_HEADER = ("Option", "Type", "Default", "Allowed", "Modes", "Meaning in JAX")

_PAGE = """# Options

The options of `set_auto_parallel_context`, `auto_parallel_context`, `parallel` and the command line, with MindSpore's names.
This page is made from the option table in `spmdctx/context/options.py`:
`python -m spmdctx.context.docs > docs/options.md`.

- A call sets all of its options or none. An unknown name or a bad value is a `ContextError` (a `ValueError`), a wrong type a `TypeError`.
- Options that contradict each other, or the devices, are found when a step is planned or called; so they can be set in any order.
- An option that the mode does not use, or that is marked *not built yet*, gives a `ContextWarning` by its name when a step is planned.
- *All* modes are {modes}.

{options}

## Search parameters

`set_algo_parameters`, `get_algo_parameters`, `reset_algo_parameters`.

{algo}
"""


def options_table(options: tuple[Option, ...] = OPTIONS) -> str:
    """Renders the table as Markdown, with one row for each option."""
    rows = [_HEADER, ("---",) * len(_HEADER), *map(_row, options)]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in row) + " |" for row in rows)


def options_page() -> str:
    """Renders the whole of `docs/options.md`."""
    return _PAGE.format(options=options_table(), algo=options_table(ALGO_OPTIONS), modes=", ".join(PARALLEL_MODES))


def _row(option: Option) -> tuple[str, ...]:
    meaning = option.meaning if option.built else f"{option.meaning} *(not built yet)*"
    default = f"`{plain(option.default)!r}`"
    return (f"`{option.name}`", option.kind, default, option.allowed or "True, False", _modes(option.modes), meaning)


def _modes(modes: tuple[str, ...]) -> str:
    if modes == PARALLEL_MODES:
        return "all"
    if modes == PARALLEL_MODES[1:]:
        return "all but stand_alone"
    return ", ".join(modes) or "none"


def cli_arguments(defaults: Mapping[str, str]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yields the flag and `add_argument` keywords of each option that acts; options that are not given leave no trace.

    `defaults` says in words what a command uses for options that it does not leave at the context's defaults.
    """
    for option in OPTIONS:
        if not option.modes:
            continue
        allowed = f" Allowed: {option.allowed}." if option.allowed else ""
        default = defaults.get(option.name, repr(plain(option.default)))
        help_text = f"{option.meaning}{allowed} Default: {default}.".replace("%", "%%")
        keywords: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": help_text}
        if option.kind == "bool":
            keywords["action"] = argparse.BooleanOptionalAction
        else:
            keywords |= {"type": _parser(option), "metavar": option.kind.split()[-1].upper()}
        yield "--" + option.name.replace("_", "-"), keywords


def add_context_arguments(parser: argparse.ArgumentParser, defaults: Mapping[str, str]) -> None:
    """Adds every option to a command, in a group of its own; `defaults` as for `cli_arguments`."""
    group = parser.add_argument_group("context options")
    for flag, keywords in cli_arguments(defaults):
        action = group.add_argument(flag, **keywords)
        if choices := BY_NAME[keywords["dest"]].choices:
            offer(action, choices)


def offer(action: argparse.Action, words: Iterable[str]) -> None:
    """Has shells complete an argument by these words."""
    action.completer = lambda **_: list(words)  # type: ignore[attr-defined]  # argcomplete reads it


def options_from_arguments(arguments: argparse.Namespace) -> dict[str, Any]:
    """Returns the context options that were given on the command line."""
    given = vars(arguments)
    return {option.name: given[option.name] for option in OPTIONS if option.name in given}


def _parser(option: Option) -> Callable[[str], Any]:
    """Reads the option's value from text, as JSON or as a Python literal, and checks it."""

    def parse(text: str) -> Any:
        value = text if option.kind == "str" else _literal(text)
        try:
            value = dataset_strategy_from_lists(value) if option.name == "dataset_strategy" else value
            option.check(option.name, value)
        except (SpmdctxError, TypeError) as error:
            raise argparse.ArgumentTypeError(str(error)) from error
        return value

    return parse


def _literal(text: str) -> Any:
    for read in (json.loads, ast.literal_eval):
        try:
            return read(text)
        except (ValueError, SyntaxError):
            continue
    return text


if __name__ == "__main__":
    print(options_page(), end="")
