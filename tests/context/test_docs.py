import argparse
from pathlib import Path

import pytest

from spmdctx.context.docs import add_context_arguments, options_from_arguments, options_page, options_table
from spmdctx.context.options import OPTIONS

PAGE = Path(__file__).parents[2] / "docs" / "options.md"


def parser():
    made = argparse.ArgumentParser(exit_on_error=False)
    add_context_arguments(made, {})
    return made


def test_the_page_of_options_is_up_to_date():
    assert PAGE.read_text() == options_page(), "run `python -m spmdctx.context.docs > docs/options.md`"


def test_the_table_has_one_row_per_option():
    lines = options_table().splitlines()
    assert [line.split("`")[1] for line in lines[2:]] == [option.name for option in OPTIONS]
    assert len({line.count(" | ") for line in lines}) == 1


@pytest.mark.parametrize(
    ("arguments", "options"),
    [
        ([], {}),
        (["--device-num", "8", "--parallel-mode", "auto_parallel"], {"device_num": 8, "parallel_mode": "auto_parallel"}),
        (["--gradients-mean", "--no-gradient-fp32-sync"], {"gradients_mean": True, "gradient_fp32_sync": False}),
        (["--dataset-strategy", "full_batch"], {"dataset_strategy": "full_batch"}),
        (["--dataset-strategy", "[[8, 1], [8]]"], {"dataset_strategy": ((8, 1), (8,))}),
        (["--dataset-strategy", "((8, 1), (8,))"], {"dataset_strategy": ((8, 1), (8,))}),
        (["--all-reduce-fusion-config", "[20, 35]"], {"all_reduce_fusion_config": [20, 35]}),
        (["--comm-fusion", '{"openstate": false}'], {"comm_fusion": {"openstate": False}}),
        (["--mem-coeff", "0.25"], {"mem_coeff": 0.25}),
        (["--strategy-ckpt-load-file", "8"], {"strategy_ckpt_load_file": "8"}),
    ],
)
def test_the_command_line_takes_every_kind_of_option(arguments, options):
    assert options_from_arguments(parser().parse_args(arguments)) == options


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--device-num", "0"], "device_num does not accept 0"),
        (["--device-num", "many"], "device_num does not take values of type str"),
        (["--parallel-mode", "auto"], "parallel_mode does not accept"),
        (["--dataset-strategy", "[[0]]"], "dataset_strategy"),
    ],
)
def test_a_bad_command_line_value_is_refused_in_the_same_words(arguments, text):
    with pytest.raises(argparse.ArgumentError, match=text):
        parser().parse_args(arguments)


def test_help_mentions_every_option_that_acts():
    shown = parser().format_help()
    assert all("--" + option.name.replace("_", "-") in shown for option in OPTIONS if option.modes)
