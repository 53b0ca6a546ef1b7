"""Builds the site: `python -m docs.site.build`, or `make docs`.

The pages are copied to `out/docs/source`, where their Python blocks become cells, the gallery is made there, and Sphinx executes and
writes all of it into `out/docs/html`. A warning of Sphinx, and a cell that fails, end the build with exit code 1.
"""

import json
import os
import shutil
import sys
from pathlib import Path

from docs.site import gallery
from docs.site.cells import as_notebook

ROOT = Path(__file__).parents[2]
OUT = ROOT / "out" / "docs"
PAGES = ("docs/**/*.md", "notebooks/*.ipynb", "benchmarks/RESULTS.md", "CONTRIBUTING.md", "SECURITY.md", "CHANGELOG.md")
"""What becomes a page, by patterns below the root of the repository."""
FILES = ("docs/kubernetes/**/*", "docs/plan_page.png", "LICENSE")
"""What pages link to or show."""


def copied(source: Path) -> None:
    """Copies pages, as notebooks, and the files that they link to, to the same places below `source`."""
    shutil.rmtree(source, ignore_errors=True)
    for pattern in (*PAGES, *FILES):
        for path in filter(Path.is_file, sorted(ROOT.glob(pattern))):
            target = source / path.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".md":
                target.write_text(as_notebook(path.read_text()))
            else:
                shutil.copy(path, target)


def add_kernel(folder: Path) -> None:
    """Writes the kernel `python3` that runs cells: this interpreter on CPU devices, with this tree's package and no chatter."""
    folder = folder / "kernels" / "python3"
    folder.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}", "--log-level=ERROR"]
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}
    spec = {"argv": command, "display_name": "Python 3", "language": "python", "env": environment}
    (folder / "kernel.json").write_text(json.dumps(spec))
    os.environ["JUPYTER_PATH"] = str(folder.parents[1])


def main(arguments: list[str]) -> int:
    """Builds the site; `arguments` go to Sphinx."""
    from sphinx.cmd.build import build_main

    copied(OUT / "source")
    gallery.make(OUT / "source" / "docs" / "gallery")
    add_kernel(OUT / "jupyter")
    folders = ["-c", str(ROOT / "docs" / "site"), "-d", str(OUT / "doctrees"), str(OUT / "source"), str(OUT / "html")]
    status = build_main(["-b", "html", "-W", "--keep-going", "-n", "-E", "-j", "6", "-q", *arguments, *folders])
    if status == 0:
        (OUT / "html" / "index.html").write_text('<!doctype html><meta http-equiv="refresh" content="0; url=docs/index.html">\n')
        print(f"The site is in {(OUT / 'html' / 'index.html').relative_to(ROOT)}.")
    return status


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
