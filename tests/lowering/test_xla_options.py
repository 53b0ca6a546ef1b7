from types import SimpleNamespace

import jax
import pytest

from spmdctx.errors import UnsupportedError
from spmdctx.lowering.xla_options import backend_of, compile_options
from tests.audit.compile_only import need_gpu, need_tpu


def test_the_backend_of_real_and_compile_only_devices_is_told():
    assert backend_of(jax.devices()) == "cpu"
    assert backend_of(need_tpu()) == "tpu"
    assert backend_of(need_gpu()) == "gpu"


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_nothing_is_set_by_default(platform):
    assert compile_options([SimpleNamespace(platform=platform)]) == {}


@pytest.mark.parametrize("platforms", [["cpu", "tpu"], ["abacus"], []])
def test_mixed_unknown_or_no_devices_are_refused(platforms):
    with pytest.raises(UnsupportedError, match="one backend"):
        backend_of([SimpleNamespace(platform=platform) for platform in platforms])
