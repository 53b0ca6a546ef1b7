"""The commands of `spmdctx k8s`."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from spmdctx.cli.k8s.arguments import job_options
from spmdctx.cli.output import Output
from spmdctx.errors import ContextError, naming_file
from spmdctx.k8s.cluster import Cluster
from spmdctx.k8s.manifest import advice, manifests
from spmdctx.k8s.mindspore.convert import Changes, convert
from spmdctx.k8s.render import objects_of, read_objects, text_of, write_folder
from spmdctx.k8s.state import FAILED

STDIN = "-"


def manifest(arguments: argparse.Namespace, output: Output) -> int:
    """Writes the manifest of a job."""
    options = job_options(arguments)
    made, notes = manifests(options), advice(options)
    _note(notes)
    _finish(made, arguments.out, output, notes)
    return 0


def convert_file(arguments: argparse.Namespace, output: Output) -> int:
    """Converts an MSJob, and names what has no counterpart on standard error."""
    found = [one for one in _read("file", arguments.file) if one["kind"] == "MSJob"]
    if len(found) != 1:
        raise ContextError("convert takes one MSJob.", got=f"{len(found)}", where=arguments.file)
    changes = Changes(arguments.image, arguments.device, arguments.claim, arguments.checkpoint_path, arguments.namespace, arguments.queue)
    converted = convert(found[0], changes)
    _note(converted.notes)
    _finish(converted.objects, arguments.out, output, converted.notes)
    return 0


def submit(arguments: argparse.Namespace, output: Output) -> int:
    """Hands a job to a cluster."""
    if (arguments.script is None) == (arguments.file is None):
        raise ContextError("submit takes a script or --file.", need="one of the two")
    if arguments.file is None:
        options = job_options(arguments)
        objects = manifests(options)
        _note(advice(options))
    else:
        objects = _read("--file", arguments.file)
    made = Cluster(arguments.context, arguments.namespace).submit(objects, dry_run=arguments.dry_run)
    for name in made:
        output.say(f"{'would create' if arguments.dry_run else 'created'} {name}")
    output.finish_with("k8s_submit", {"created": [] if arguments.dry_run else made, "dry_run": arguments.dry_run, "objects": objects})
    return 0


def status(arguments: argparse.Namespace, output: Output) -> int:
    """Says how a job is; returns 1 if it has failed."""
    found = Cluster(arguments.context, arguments.namespace).status(arguments.name)
    output.say(f"{found.kind} {found.name}: {found.word}, started again {found.restarts} times")
    if found.reason:
        output.say(f"  {found.reason}")
    for pod in found.pods:
        ended = f", exit code {', '.join(map(str, pod.exit_codes))}" if pod.exit_codes else ""
        output.say(f"  {pod.component:9} {pod.name}: {pod.phase}{ended}")
    pods = [{"name": pod.name, "component": pod.component, "phase": pod.phase, "exit_codes": pod.exit_codes} for pod in found.pods]
    output.finish_with("k8s_status", {**found._asdict(), "pods": pods})
    return 1 if found.word == FAILED else 0


def logs(arguments: argparse.Namespace, output: Output) -> int:
    """Prints what a process of a job writes."""
    cluster, lines = Cluster(arguments.context, arguments.namespace), []
    for written in cluster.logs(arguments.name, arguments.process, follow=arguments.follow, tail=arguments.tail):
        if output.as_json:
            lines.append(written.line)
        else:
            sys.stdout.write(f"{written.line}\n")
            sys.stdout.flush()
    output.finish_with("k8s_logs", {"name": arguments.name, "lines": lines})
    return 0


def delete(arguments: argparse.Namespace, output: Output) -> int:
    """Deletes a job."""
    gone = Cluster(arguments.context, arguments.namespace).delete(arguments.name)
    output.say(f"deleted {gone}")
    output.finish_with("k8s_delete", {"deleted": gone})
    return 0


def _read(option: str, file: str) -> list[dict[str, Any]]:
    if file == STDIN:
        return objects_of(option, sys.stdin.read())
    with naming_file(option, file, "the file cannot be read"):
        return read_objects(option, Path(file))


def _note(notes: Sequence[str]) -> None:
    for note in notes:
        sys.stderr.write(f"note: {note}\n")


def _finish(objects: Sequence[Mapping[str, Any]], out: Path | None, output: Output, notes: Sequence[str]) -> None:
    """Writes objects where the user wants them."""
    files: list[str] = []
    made = [dict(one) for one in objects]
    if out is not None:
        files = [str(out / name) for name in write_folder(made, out)]
        output.say("  ".join(files))
    elif not output.as_json:
        sys.stdout.write(text_of(made))
    output.finish_with("k8s_objects", {"objects": made, "files": files, "notes": list(notes)})
