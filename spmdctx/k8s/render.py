"""Manifests as YAML, and back."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from spmdctx.errors import ContextError
from spmdctx.wording.files import read_file, write_file

_NOTE = "# Written by spmdctx k8s, for an operator of the cluster. No manifest of spmdctx was ever run on a real cluster.\n"


_WORD = re.compile(r"[A-Za-z_/$][A-Za-z0-9_./$-]*")
"""A text that no reader of YAML takes for a number; others stand in quotes: the cluster's takes 1e3 and 08 for numbers."""
_NO_WORDS = {"y", "n", "yes", "no", "on", "off", "true", "false", "null"}


class _Plain(yaml.SafeDumper):
    """Writes repeated values out in full, and texts in quotes unless they are plain words."""

    def ignore_aliases(self, data: Any) -> bool:
        return True

    def represent_text(self, text: str) -> yaml.ScalarNode:
        """Chooses the quotes."""
        is_plain = _WORD.fullmatch(text) is not None and text.lower() not in _NO_WORDS
        return self.represent_scalar("tag:yaml.org,2002:str", text, style=None if is_plain else "'")


_Plain.add_representer(str, _Plain.represent_text)


def text_of(objects: Sequence[dict[str, Any]]) -> str:
    """Returns objects as one YAML text."""
    return _NOTE + "---\n".join(yaml.dump(one, Dumper=_Plain, sort_keys=False, width=120) for one in objects)


def write_folder(objects: Sequence[dict[str, Any]], folder: Path) -> list[str]:
    """Writes a file for each object, and a Kustomization that names them; returns the names of the files.

    Raises:
        FileError: a file cannot be written.
    """
    names = []
    for one in objects:
        name = f"{one['metadata']['name']}-{one['kind'].lower()}.yaml"
        write_file(folder / name, text_of([one]))
        names.append(name)
    kustomization = {"apiVersion": "kustomize.config.k8s.io/v1beta1", "kind": "Kustomization", "resources": names}
    write_file(folder / "kustomization.yaml", text_of([kustomization]))
    return [*names, "kustomization.yaml"]


def read_objects(option: str, path: Path) -> list[dict[str, Any]]:
    """Reads the objects of a YAML file.

    Raises:
        ContextError: it cannot be read, or holds something else.
        OSError: the file system refuses.
    """
    try:
        return objects_of(option, read_file(path).decode())
    except (ValueError, UnicodeError) as error:
        if isinstance(error, ContextError):
            raise
        raise ContextError(f"{option}: the file cannot be read.", where=str(path), got=str(error)) from None


def objects_of(option: str, text: str) -> list[dict[str, Any]]:
    """Returns the objects in a YAML text.

    Raises:
        ContextError: it is no YAML, or holds something else.
    """
    try:
        found = [one for one in yaml.safe_load_all(text) if one is not None]
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ContextError(f"{option}: this is no YAML.", got=str(error).splitlines()[0]) from None
    wrong = [
        one
        for one in found
        if not isinstance(one, dict) or not isinstance(one.get("kind"), str) or not isinstance(one.get("apiVersion"), str)
    ]
    if wrong or not found:
        raise ContextError(f"{option}: this is no object of Kubernetes.", need="apiVersion, kind, metadata and spec")
    return found
