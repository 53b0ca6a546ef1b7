"""Options of the parameter server: MindSpore's names, and those that say how servers and workers train."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from spmdctx.context import values
from spmdctx.context.options import checked, find
from spmdctx.context.storage import Option
from spmdctx.errors import ContextError, UnsupportedError, shown

MODES = ("sync", "async")


def _refused(fix: str) -> Any:
    def check(name: str, value: Any) -> Any:
        if value:
            raise UnsupportedError(f"{name} has no counterpart here.", got=f"{name}={shown(value)}", fix=fix)
        return value

    return check


_TLS = "set RAY_USE_TLS and its certificates for Ray, whose local clusters ask for a token by themselves"


def _port(name: str, value: Any) -> int:
    port: int = values.integer(1, 65535)(name, value)
    if port != _MANAGE_PORT:
        raise UnsupportedError(
            f"{name} has no counterpart here: no port listens for requests to scale.",
            got=f"{name}={port}",
            fix="spmdctx launch --scale FOLDER --servers N --workers N",
        )
    return port


_MANAGE_PORT = 11202
_ALL = ("stand_alone", "semi_auto_parallel", "auto_parallel")

PS_OPTIONS: tuple[Option, ...] = (
    Option("enable_ps", "bool", values.boolean, False, "", _ALL, "Servers hold the state of steps and renew it."),
    Option("config_file_path", "str", values.text, "", "", _ALL, "A JSON file whose `recovery` names the folder of saved states."),
    Option("scheduler_manage_port", "int", _port, _MANAGE_PORT, "11202", _ALL, "Only its default: nothing listens there."),
    Option("enable_ssl", "bool", _refused(_TLS), False, "False", _ALL, "Only its default: Ray has TLS of its own."),
    Option("client_password", "str", _refused(_TLS), "", "empty", _ALL, "Only its default."),
    Option("server_password", "str", _refused(_TLS), "", "empty", _ALL, "Only its default."),
    Option("num_servers", "int", values.integer(1, 1024), 1, "1 to 1024", _ALL, "Servers."),
    Option("update_mode", "str", values.choice(MODES), "sync", "sync, async", _ALL, "Whether workers wait for each other in each step."),
    Option("max_staleness", "int", values.integer(0, 1 << 20), 4, ">= 0", _ALL, "Updates by which a worker's values may be late in async."),
    Option("save_every", "int", values.integer(1, 1 << 30), 10, ">= 1", _ALL, "Updates between two saved states."),
    Option("folder", "str", values.text, "", "", _ALL, "Where states are saved; a job goes on from those that it holds."),
)
PS_BY_NAME = {option.name: option for option in PS_OPTIONS}


@dataclass(frozen=True)
class ServerOptions:
    """The options of the parameter server in normal form; `explicit` names those that the user set.

    `marked` are the patterns of `set_param_ps`, and `made_by_servers` those of them with `init_in_server`.
    """

    enable_ps: bool = False
    config_file_path: str = ""
    scheduler_manage_port: int = _MANAGE_PORT
    enable_ssl: bool = False
    client_password: str = ""
    server_password: str = ""
    num_servers: int = 1
    update_mode: str = "sync"
    max_staleness: int = 4
    save_every: int = 10
    folder: str = ""
    marked: tuple[str, ...] = ()
    made_by_servers: tuple[str, ...] = ()
    explicit: frozenset[str] = frozenset()


DEFAULT_SERVERS = ServerOptions()


def checked_server_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns all values in normal form; a configuration file adds what it says.

    Raises:
        ContextError: an unknown name or a bad value.
        TypeError: a value of a wrong type.
        UnsupportedError: an option that has no counterpart.
    """
    for name in options:
        _check_known(name, "Set")
    found = checked(options, PS_BY_NAME)
    if found.get("config_file_path"):
        found = {"folder": _recovery_folder(found["config_file_path"]), **found}
    return found


def find_server_option(key: Any) -> Option:
    """Returns the option of a name.

    Raises:
        ContextError: there is none.
    """
    _check_known(key, "Get")
    return find(key, "Get", PS_BY_NAME)


def _check_known(key: Any, verb: str) -> None:
    """Refuses a name that is none of these options, with those that are; `find` refuses what is no name.

    Raises:
        ContextError: there is no such option.
    """
    if isinstance(key, str) and key not in PS_BY_NAME:
        fix = values.nearest(key, PS_BY_NAME) or f"the options are {', '.join(PS_BY_NAME)}"
        raise ContextError(f"{verb} PS context keyword {shown(key)} is not recognized.", fix=fix)


def _recovery_folder(path: str) -> str:
    """Returns the folder that a configuration file of MindSpore names for recovery.

    Raises:
        ContextError: a file that cannot be read, or that has no such entry.
    """
    try:
        said = json.loads(Path(os.path.expanduser(path)).read_text())
        recovery = said["recovery"]
        folder = recovery.get("storage_file_path") or recovery["storge_file_path"]
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ContextError(
            "config_file_path is no configuration of a parameter server.",
            got=f"{shown(path)}: {error}",
            need='{"recovery": {"storage_type": 1, "storage_file_path": "FOLDER/NAME"}}',
        ) from error
    return str(folder)
