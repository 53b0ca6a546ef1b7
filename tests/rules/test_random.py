"""Random numbers against Shardy and on eight devices: the same bits, however they are split."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import spmdctx
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


def test_a_batch_of_keys_draws_along_the_leading_dimensions():
    assert str(rule_for("random_gamma", ((8,), (8, 4)), ((8, 4),), {})) == "([i], [i, j])->([i, j]) {i=8, j=4} blocked_propagation={j}"
    assert str(rule_for("random_gamma", ((), (8, 4)), ((8, 4),), {})) == "([], [i, j])->([i, j]) {i=8, j=4} blocked_propagation={j}"
    assert rule_for("random_gamma", ((8, 1), (8, 1, 4)), ((8, 1, 4),), {}).operands == (((0,), ()), ((0,), (), (1,)))


DRAWS = {
    "gamma": lambda key, a: jax.random.gamma(key, a),
    "loggamma of one number": lambda key, a: jax.random.loggamma(key, a[0]),
    "beta": lambda key, a: jax.random.beta(key, a, a + 1),
    "dirichlet": lambda key, a: jax.random.dirichlet(key, a, (2,)),
    "t of a shape": lambda key, a: jax.random.t(key, a[0], (3, 2)),
    "binomial": lambda key, a: jax.random.binomial(key, 5.0, a / 5),
    "poisson": lambda key, a: jax.random.poisson(key, a),
    "choice": lambda key, a: jax.random.choice(key, a, (2,), replace=False),
    "two levels": lambda key, a: jax.vmap(jax.random.gamma)(jax.random.split(key, 3), a),
}


@pytest.mark.parametrize("name", DRAWS)
@pytest.mark.parametrize("mode", ["data_parallel", "semi_auto_parallel", "auto_parallel"])
def test_draws_for_a_batch_of_keys_are_planned(name, mode):
    step = spmdctx.parallel(jax.vmap(DRAWS[name]), device_num=8, parallel_mode=mode, batch_argnums=(0, 1), dataset_strategy="data_parallel")
    assert step.plan(KEYS, jnp.ones((8, 3)) * 2.0)


def test_gamma_for_a_batch_of_keys_is_split_and_gives_the_one_device_bits():
    shapes = jnp.linspace(0.5, 3.0, 24).reshape(8, 3)
    drawn = spmdctx.parallel(jax.vmap(jax.random.gamma), device_num=8, parallel_mode="data_parallel", batch_argnums=(0, 1))(KEYS, shapes)
    assert not drawn.is_fully_replicated
    np.testing.assert_allclose(drawn, jax.vmap(jax.random.gamma)(KEYS, shapes), rtol=1e-5)
