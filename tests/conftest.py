"""Eight CPU devices for every test, set before jax is imported, and the default context after it."""

import os

import pytest

os.environ["JAX_PLATFORMS"] = "cpu"
# LLVM's optimisation takes longer than the small programs of the tests run. It changes neither collectives nor buffers.
_FLAGS = "--xla_force_host_platform_device_count=8 --xla_backend_optimization_level=0"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}"
os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")


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
