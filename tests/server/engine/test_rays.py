"""Ray is an extra: nothing imports it before servers are asked for, and where it is missing the error says what to install."""

import importlib
import subprocess
import sys

import pytest

from spmdctx.errors import UnsupportedError
from spmdctx.server.engine.rays import ray


@pytest.mark.parametrize("missing", ["ray", "flatbuffers"])
def test_what_is_not_installed_is_named_with_the_remedy(monkeypatch, missing):
    found = importlib.import_module

    def without(name, *rest):
        if name == missing:
            raise ModuleNotFoundError(f"No module named '{name}'", name=name)
        return found(name, *rest)

    monkeypatch.setattr(importlib, "import_module", without)
    with pytest.raises(UnsupportedError, match=rf"(?s)not installed.*No module named '{missing}'.*pip install 'spmdctx\[ps\]'"):
        ray()


def test_nothing_of_ray_is_imported_before_it_is_needed():
    script = "import sys, spmdctx, spmdctx.cli.main; spmdctx.set_ps_context(enable_ps=True); print('ray' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.split() == ["False"]
