"""Random numbers against Shardy and on eight devices: the same bits, however they are split."""

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from spmdctx.rules import rule_for
from tests.rules.cases import Case

KEYS = jax.random.split(jax.random.key(0), 8)
WORDS = jnp.arange(64, dtype=jnp.uint32).reshape(8, 8)


def bits(key):
    return jax.random.bits(key, (8, 8))


CASES = [
    Case("random_bits", bits, (KEYS[0],)),
    Case("random_bits", jax.vmap(bits), (KEYS,), label="a batch of keys"),
    Case("random_split", lambda key: jax.random.split(key, (8, 4)), (KEYS[0],)),
    Case("random_fold_in", jax.vmap(jax.random.fold_in), (KEYS, jnp.arange(8))),
    Case("random_seed", jax.vmap(jax.random.key), (jnp.arange(8),)),
    Case("random_wrap", jax.random.wrap_key_data, (jax.random.key_data(KEYS),)),
    Case("random_unwrap", jax.random.key_data, (KEYS,)),
    Case("random_clone", jax.random.clone, (KEYS,)),
    Case("random_gamma", jax.random.gamma, (KEYS[0], jnp.ones((8, 8)) * 2.0), also=("all-reduce",)),
    Case("rng_bit_generator", lambda state: lax.rng_bit_generator(state, (8, 8)), (WORDS[0, :4],)),
    Case("threefry2x32", lambda k, x: jax.extend.random.threefry2x32_p.bind(k, k, x, x), (WORDS, WORDS)),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_sharding_of_a_draw_gives_the_one_device_bits(case):
    case.check()


def test_the_words_of_a_key_stay_together():
    assert str(rule_for("random_unwrap", ((8,),), ((8, 2),), {})) == "([i])->([i, 1]) {i=8}"


def test_a_lone_seed_has_nothing_to_split():
    assert str(rule_for("random_seed", ((),), ((),), {})) == "([])->([]) {}"
