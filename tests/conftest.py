"""Eight CPU devices for every test, set before jax is imported, and the default context after it; long files come first."""

import os

import pytest

from tests.quick import QUICK

os.environ["JAX_PLATFORMS"] = "cpu"
_FLAGS = f"--xla_force_host_platform_device_count=8 {QUICK}"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")

_LONG = (
    "lowering/rewrite/test_waits.py",
    "test_notebooks.py",
    "cli/test_main.py",
    "zoo/test_matrix.py",
    "step/pipelined/",
    "step/served/",
    "processes/",
    "server/",
    "search/dynamic/test_hopeless.py",
)
"""Files and folders of tests that take minutes, longest tests first; what comes last is then short, and no worker waits for another."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts long files first, each of them whole, since its tests share what is made once for a file."""
    tests = os.path.dirname(__file__)

    def place(item: pytest.Item) -> int:
        path = os.path.relpath(item.path, tests)
        return next((number for number, long in enumerate(_LONG) if path.startswith(long)), len(_LONG))

    items.sort(key=place)


@pytest.fixture(autouse=True)
def fresh_context():
    """Whatever a test sets in the context is gone after it."""
    yield
    from spmdctx.context.layers import reset_algo_parameters, reset_auto_parallel_context, reset_ps_context

    reset_auto_parallel_context()
    reset_algo_parameters()
    reset_ps_context()


def pytest_make_parametrize_id(val: object, argname: str) -> str | None:
    """Names of functions without their addresses, so that every process collects the same ids."""
    return str(getattr(val, "__name__", argname)).strip("<>") if callable(val) else None
