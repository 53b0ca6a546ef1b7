"""Manifests against the operators' own schemas, with unknown fields forbidden: a server would leave these out without a word.

    python -m benchmarks.k8s_schemas FOLDER [--compact tests/k8s/schemas.json]

FOLDER has the CustomResourceDefinitions jobset.yaml, trainjob.yaml and rayjob.yaml. All manifests of the covering array
(`benchmarks/k8s_options.py`) and all MSJobs of the tests are checked, then the mutants of `benchmarks/k8s_mutants.py`. `--compact` writes
what the tests use where these files are not at hand: of each schema the fields that manifests have.
Exits with 1 if a manifest is refused or a mutant accepted.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import yaml

from benchmarks.k8s_mutants import mutants
from benchmarks.k8s_options import covering_jobs
from spmdctx.k8s import manifests

Schema = Mapping[str, Any]

FILES = {"JobSet": "jobset.yaml", "TrainJob": "trainjob.yaml", "RayJob": "rayjob.yaml"}
_TYPES: Mapping[str, tuple[type, ...]] = {
    "object": (dict,),
    "array": (list,),
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
}
_OBJECT: Schema = {"type": "object", "additionalProperties": {"type": "string"}}
_METADATA: Schema = {
    "type": "object",
    "required": ["name"],
    "properties": {"name": {"type": "string"}, "namespace": {"type": "string"}, "labels": _OBJECT, "annotations": _OBJECT},
}
_KEPT = (
    *("type", "enum", "required", "default", "pattern", "format", "minimum", "maximum", "minLength", "maxLength", "minItems", "maxItems"),
    *("x-kubernetes-int-or-string", "x-kubernetes-preserve-unknown-fields"),
)


def read_definitions(folder: Path) -> dict[str, Schema]:
    """Returns the schema of each kind of job, of the version that manifests have."""
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    found = {}
    for kind, file in FILES.items():
        definition = yaml.load((folder / file).read_text(), Loader=loader)
        group = definition["spec"]["group"]
        for version in definition["spec"]["versions"]:
            schema = dict(version["schema"]["openAPIV3Schema"])
            schema["properties"] = {**schema["properties"], "metadata": _METADATA}
            found[f"{group}/{version['name']} {kind}"] = schema
    return found


def faults(schemas: Mapping[str, Schema], manifest: Mapping[str, Any]) -> list[str]:
    """Returns what a server would refuse in a manifest, or leave out of it."""
    name = f"{manifest.get('apiVersion')} {manifest.get('kind')}"
    return list(_faults(schemas[name], manifest, "")) if name in schemas else [f"there is no {name}"]


def _faults(schema: Schema, value: Any, path: str) -> Iterator[str]:
    if schema.get("x-kubernetes-int-or-string"):
        if isinstance(value, bool) or not isinstance(value, int | str):
            yield f"{path}: {value!r} is no number and no string"
        elif isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{path}: {value!r} does not fit {schema['pattern']}"
        return
    kind = schema.get("type")
    if kind is not None and (not isinstance(value, _TYPES[kind]) or (isinstance(value, bool) and kind != "boolean")):
        yield f"{path}: {value!r} is no {kind}"
        return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{path}: {value!r} is none of {schema['enum']}"
    yield from _bounds(schema, value, path)
    if isinstance(value, dict):
        yield from _fields(schema, value, path)
    elif isinstance(value, list) and "items" in schema:
        for index, item in enumerate(value):
            yield from _faults(schema["items"], item, f"{path}[{index}]")


def _fields(schema: Schema, value: Mapping[str, Any], path: str) -> Iterator[str]:
    properties, more = schema.get("properties", {}), schema.get("additionalProperties")
    for name in schema.get("required", ()):
        if name not in value and "default" not in properties.get(name, {}):
            yield f"{path}.{name}: is missing"
    for name, item in value.items():
        if name in properties:
            yield from _faults(properties[name], item, f"{path}.{name}")
        elif isinstance(more, dict):
            yield from _faults(more, item, f"{path}.{name}")
        elif not schema.get("x-kubernetes-preserve-unknown-fields") and not more:
            yield f"{path}.{name}: is unknown"


def _bounds(schema: Schema, value: Any, path: str) -> Iterator[str]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        if value < schema.get("minimum", value) or value > schema.get("maximum", value):
            yield f"{path}: {value} is out of bounds"
    elif isinstance(value, str | list):
        low, high = ("minLength", "maxLength") if isinstance(value, str) else ("minItems", "maxItems")
        if not schema.get(low, 0) <= len(value) <= schema.get(high, len(value)):
            yield f"{path}: its length {len(value)} is out of bounds"
        if isinstance(value, str) and "pattern" in schema and not re.search(schema["pattern"], value):
            yield f"{path}: {value!r} does not fit {schema['pattern']}"


def compacted(schema: Schema, values: Iterable[Any]) -> dict[str, Any]:
    """Returns of a schema the fields that these values have."""
    values = list(values)
    found = {name: schema[name] for name in _KEPT if name in schema}
    maps = [value for value in values if isinstance(value, dict)]
    if "properties" in schema:
        used = {name: [value[name] for value in maps if name in value] for name in sorted(schema["properties"])}
        found["properties"] = {name: compacted(schema["properties"][name], mine) for name, mine in used.items() if mine}
    if isinstance(schema.get("additionalProperties"), dict):
        found["additionalProperties"] = compacted(schema["additionalProperties"], (item for value in maps for item in value.values()))
    if "items" in schema:
        found["items"] = compacted(schema["items"], (item for value in values if isinstance(value, list) for item in value))
    return found


def rules_broken(schemas: Mapping[str, Schema], manifest: Mapping[str, Any]) -> list[str]:
    """Returns the CEL rules of a schema that a manifest breaks; those that compare it with a former version are left out."""
    import celpy
    from celpy import json_to_cel

    environment, broken = celpy.Environment(), []
    for rule, value in _rules(schemas[f"{manifest['apiVersion']} {manifest['kind']}"], manifest):
        if "oldSelf" in rule:
            continue
        program = environment.program(environment.compile(rule))
        try:
            held = bool(program.evaluate({"self": json_to_cel(value)}))
        except celpy.CELEvalError as error:
            held = False
            rule = f"{rule} ({error})"
        if not held:
            broken.append(rule)
    return broken


def _rules(schema: Schema, value: Any) -> Iterator[tuple[str, Any]]:
    for row in schema.get("x-kubernetes-validations", ()):
        yield row["rule"], value
    if isinstance(value, dict):
        for name, item in value.items():
            if name in schema.get("properties", {}):
                yield from _rules(schema["properties"][name], item)
    elif isinstance(value, list) and "items" in schema:
        for item in value:
            yield from _rules(schema["items"], item)


def all_manifests() -> list[tuple[str, dict[str, Any]]]:
    """Returns the manifests of the covering array, and those of converted MSJobs."""
    from tests.k8s.msjobs import converted_manifests

    made = [(name, one) for name, job in covering_jobs() for one in manifests(job)]
    return made + converted_manifests()


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--compact", type=Path)
    arguments = parser.parse_args()
    schemas, made, start = read_definitions(arguments.folder), all_manifests(), time.perf_counter()
    wrong = [(name, fault) for name, one in made for fault in faults(schemas, one)]
    for name, fault in wrong[:20]:
        print(f"{name}: {fault}")
    checked = time.perf_counter() - start
    accepted = [name for name, one in mutants() if not faults(schemas, one)]
    rules = [(name, rule) for name, one in made for rule in rules_broken(schemas, one)]
    kinds = {kind: sum(one["kind"] == kind for _, one in made) for kind in FILES}
    print(f"{len(made)} manifests ({kinds}): {len(wrong)} faults in {checked:.1f} s, {len(rules)} rules broken")
    print(f"{len(list(mutants()))} mutants: {len(accepted)} accepted {accepted}")
    if arguments.compact:
        compact = {
            name: compacted(schema, [one for _, one in made if f"{one['apiVersion']} {one['kind']}" == name])
            for name, schema in schemas.items()
            if any(f"{one['apiVersion']} {one['kind']}" == name for _, one in made)
        }
        arguments.compact.write_text(json.dumps(compact, indent=1, sort_keys=True) + "\n")
        print(f"{arguments.compact}: {arguments.compact.stat().st_size} bytes")
    return 1 if wrong or accepted or rules else 0


if __name__ == "__main__":
    sys.exit(main())
