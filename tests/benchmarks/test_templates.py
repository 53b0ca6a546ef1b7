"""Expert templates: which meshes there are, and how each splits a weight where it is stored and where it is used."""

import pytest

from benchmarks.templates import Template, stored_spec, templates, used_spec


def test_eight_devices_have_the_pure_templates_and_their_mixes():
    assert [str(one) for one in templates(8)] == [
        *("dp8", "zero1_8", "zero3_8"),
        *("dp4_tp2", "zero1_4_tp2", "zero3_4_tp2"),
        *("dp2_tp4", "zero1_2_tp4", "zero3_2_tp4"),
        "tp8",
    ]


@pytest.mark.parametrize(
    ("path", "shape", "used", "stored"),
    [
        ("layers/0/attention/query/kernel", (64, 32), ((), ("model",)), (("data",), ("model",))),
        ("layers/0/attention/out/kernel", (32, 64), (("model",), ()), (("model",), ("data",))),
        ("layers/0/mlp/down/kernel", (96, 64), (("model",), ()), (("model",), ("data",))),
        ("embedding/embedding", (128, 64), (("model",), ()), (("model",), ("data",))),
        ("head/kernel", (64, 128), ((), ("model",)), (("data",), ("model",))),
        ("layers/0/attention/query/bias", (32,), (("model",),), (("model",),)),
        ("norm/scale", (64,), ((),), (("data",),)),
        ("layers/0/mlp/up/kernel", (6, 32), ((), ("model",)), ((), ("model",))),
        ("count", (), (), ()),
    ],
)
def test_weights_are_used_as_in_megatron_and_stored_split_over_data_too(path, shape, used, stored):
    template = Template(4, 2, 3)
    assert used_spec(path, shape, template) == used
    assert stored_spec(path, shape, template) == stored


def test_a_size_that_does_not_divide_stays_whole():
    assert used_spec("head/kernel", (64, 129), Template(4, 2)) == ((), ())
