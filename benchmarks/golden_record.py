"""Whether a change leaves plans, programs and messages byte for byte as they were.

    python -m benchmarks.golden_record --base REVISION [--only REGEX]    # the present tree against a revision
    python -m benchmarks.golden_record --make FOLDER [--only REGEX]      # the record of the present tree
    python -m benchmarks.golden_record --compare FOLDER [--only REGEX]   # the present tree against a record

The record holds plan files, tables, pages and explanations of the zoo and of decoders by modes, searches, machines, budgets and options;
StableHLO for CPU and TPU; compiled programs (where in the source an op comes from aside) and their audits; and what bad input is answered.
Exits with 1 where a text differs.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import difflib
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
PROCESSES = 2
SHOWN = 12
"""Lines of a difference that are printed."""


def main() -> int:
    """Makes a record, or compares two."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--base", metavar="REVISION")
    what.add_argument("--make", type=Path, metavar="FOLDER")
    what.add_argument("--compare", type=Path, metavar="FOLDER")
    parser.add_argument("--only", default="", metavar="REGEX", help="entries whose name it matches, such as 'cells/mlp.*'")
    parser.add_argument("--share", default="", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.share:
        return _make_share(arguments.make, arguments.only, arguments.share)
    if arguments.make:
        return _make(ROOT, arguments.make, arguments.only)
    with tempfile.TemporaryDirectory() as scratch:
        folder, known = Path(scratch, "now"), arguments.compare
        if arguments.base:
            known, tree = Path(scratch, "base"), Path(scratch, "tree")
            subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(tree), arguments.base], cwd=ROOT, check=True)
            try:
                failed = _make(tree, known, arguments.only)
            finally:
                subprocess.run(["git", "worktree", "remove", "--force", str(tree)], cwd=ROOT, check=True)
            if failed:
                return failed
        return _make(ROOT, folder, arguments.only) or compare(known, folder, arguments.only)


def _make(tree: Path, folder: Path, only: str) -> int:
    """Writes the record of a tree, by this file's programs, in several processes."""
    folder.mkdir(parents=True, exist_ok=True)
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(tree), os.environ.get("PYTHONPATH", "")]),
        "JAX_PLATFORMS": "cpu",
        "XLA_FLAGS": "--xla_force_host_platform_device_count=8",
        "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
        "TPU_SKIP_MDS_QUERY": "1",
        "TPU_ACCELERATOR_TYPE": "v5litepod-8",
        "TPU_WORKER_HOSTNAMES": "localhost",
    }
    shares = [f"{number}/{PROCESSES}" for number in range(PROCESSES)]
    commands = [[sys.executable, __file__, "--make", str(folder.resolve()), "--only", only, "--share", share] for share in shares]
    with concurrent.futures.ThreadPoolExecutor(PROCESSES) as pool:
        return max(pool.map(lambda command: subprocess.run(command, cwd=tree, env=environment, check=False).returncode, commands))


def _make_share(folder: Path, only: str, share: str) -> int:
    """Writes every n-th entry of the record."""
    # The tree's own packages are found by PYTHONPATH; this file's folder would hide them, and its programs are read by their place.
    sys.path.remove(str(Path(__file__).parent))
    import importlib.util

    spec = importlib.util.spec_from_file_location("golden_programs", Path(__file__).with_name("golden_programs.py"))
    assert spec is not None
    assert spec.loader is not None
    programs = importlib.util.module_from_spec(spec)
    number, count = map(int, share.split("/"))
    with tempfile.TemporaryDirectory() as scratch:
        os.environ["SPMDCTX_GOLDEN_SCRATCH"] = scratch
        spec.loader.exec_module(programs)
        chosen = [entry for entry in programs.entries() if re.search(only, entry[0])]
        for name, make in chosen[number::count]:
            (folder / name).mkdir(parents=True, exist_ok=True)
            for file, text in make().items():
                (folder / name / file).write_text(text)
    return 0


def _texts(folder: Path, only: str) -> dict[str, str]:
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    names = {path.relative_to(folder).as_posix(): path for path in files}
    return {name: path.read_text() for name, path in names.items() if re.search(only, name.rpartition("/")[0])}


def compare(known: Path, folder: Path, only: str) -> int:
    """Prints where two records differ; returns the exit status."""
    before, after = _texts(known, only), _texts(folder, only)
    differ = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
    for name in differ:
        lines = difflib.unified_diff(before.get(name, "").splitlines(), after.get(name, "").splitlines(), "before", "after", "", "", 0, "")
        print(f"{name}:", *(f"    {line[:240]}" for line, _ in zip(lines, range(SHOWN), strict=False)), sep="\n")
    print(f"{len(after)} texts, {len(differ)} differ")
    return 1 if differ or not after else 0


if __name__ == "__main__":
    sys.exit(main())
