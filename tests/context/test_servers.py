"""Options of the parameter server: MindSpore's names and defaults, what is refused, and all or nothing."""

import json

import pytest

import spmdctx
from spmdctx.context.layers import version
from spmdctx.context.servers import PS_OPTIONS
from spmdctx.errors import ContextError, UnsupportedError

DEFAULTS = {"enable_ps": False, "config_file_path": "", "scheduler_manage_port": 11202, "enable_ssl": False, "client_password": ""}


@pytest.mark.parametrize(("name", "value"), DEFAULTS.items())
def test_defaults_are_those_of_the_original(name, value):
    assert spmdctx.get_ps_context(name) == value


def test_an_option_is_set_and_reset():
    before = version()
    spmdctx.set_ps_context(enable_ps=True, num_servers=3)
    assert spmdctx.get_ps_context("enable_ps") is True
    assert spmdctx.get_ps_context("num_servers") == 3
    assert version() != before
    spmdctx.reset_auto_parallel_context()
    assert spmdctx.get_ps_context("num_servers") == 3
    spmdctx.reset_ps_context()
    assert spmdctx.get_ps_context("num_servers") == 1


@pytest.mark.parametrize(
    ("options", "error", "words"),
    [
        ({"enable_pss": True}, ContextError, "enable_ps"),
        ({"enable_ps": 1}, TypeError, "enable_ps"),
        ({"num_servers": 0}, ContextError, "num_servers"),
        ({"update_mode": "later"}, ContextError, "update_mode"),
        ({"enable_ssl": True}, UnsupportedError, "RAY_USE_TLS"),
        ({"client_password": "word"}, UnsupportedError, "client_password"),
        ({"scheduler_manage_port": 8080}, UnsupportedError, "scheduler_manage_port"),
    ],
)
def test_bad_input_is_one_error_and_sets_nothing(options, error, words):
    with pytest.raises(error, match=words):
        spmdctx.set_ps_context(save_every=7, **options)
    assert spmdctx.get_ps_context("save_every") == 10


def test_getting_what_is_unknown_names_the_nearest():
    with pytest.raises(ContextError, match="enable_ps"):
        spmdctx.get_ps_context("enable_p")


@pytest.mark.parametrize("use", [lambda: spmdctx.get_ps_context("q"), lambda: spmdctx.set_ps_context(q=1)], ids=["get", "set"])
def test_a_name_that_is_near_none_lists_the_options(use):
    with pytest.raises(ContextError, match=r"(?s)PS context keyword 'q' is not recognized.*enable_ps, .*folder"):
        use()


@pytest.mark.parametrize("key", ["storage_file_path", "storge_file_path"])
def test_a_file_of_the_original_names_the_folder(tmp_path, key):
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"recovery": {"storage_type": 1, key: str(tmp_path / "states")}}))
    spmdctx.set_ps_context(config_file_path=str(path))
    assert spmdctx.get_ps_context("folder") == str(tmp_path / "states")


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"recovery": 3}'])
def test_a_file_that_is_no_configuration_is_one_error(tmp_path, text):
    path = tmp_path / "config.json"
    path.write_text(text)
    with pytest.raises(ContextError, match="no configuration of a parameter server"):
        spmdctx.set_ps_context(config_file_path=str(path))


def test_every_option_says_what_it_does():
    assert all(option.meaning.endswith(".") for option in PS_OPTIONS)
