"""What tests of pipelines share."""

import jax
import pytest


@pytest.fixture
def quick_compiler():
    """Compiles with few optimizations: programs run for microseconds here, and compile for seconds."""
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
