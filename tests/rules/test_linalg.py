"""Decompositions, solvers and FFTs: batches split on eight devices, matrices stay whole."""

import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from spmdctx.rules import rule_for
from tests.rules.cases import Case

_RANDOM = np.random.default_rng(0).normal(size=(8, 4, 4))
SQUARE = jnp.asarray(_RANDOM, jnp.float32)
POSITIVE = jnp.asarray(_RANDOM @ _RANDOM.transpose(0, 2, 1) + 4 * np.eye(4), jnp.float32)
COMPLEX = SQUARE.astype(jnp.complex64)
linalg = lax.linalg

DECOMPOSITIONS = [
    Case("cholesky", lambda a: linalg.cholesky(a, symmetrize_input=False), (POSITIVE,)),
    Case("lu", linalg.lu, (SQUARE,)),
    Case("qr", linalg.qr, (SQUARE,)),
    Case("eigh", lambda a: linalg.eigh(a, symmetrize_input=False), (POSITIVE,)),
    Case("eig", linalg.eig, (SQUARE,)),
    Case("svd", linalg.svd, (SQUARE,)),
    Case("svd", lambda a: linalg.svd(a, compute_uv=False), (SQUARE,), label="singular values"),
    Case("schur", linalg.schur, (SQUARE,)),
    Case("hessenberg", linalg.hessenberg, (SQUARE,)),
    Case("tridiagonal", linalg.tridiagonal, (POSITIVE,)),
    Case("householder_product", linalg.householder_product, (SQUARE, (8, 4))),
    Case("ormqr", linalg.ormqr, (SQUARE, (8, 4), (8, 4, 3))),
    Case("symmetric_product", lambda a, c: linalg.symmetric_product(a, c, beta=0.5, symmetrize_output=False), (SQUARE, POSITIVE)),
    Case("lu_pivots_to_permutation", lambda p: linalg.lu_pivots_to_permutation(p, 4), (jnp.tile(jnp.array([1, 1, 3, 3]), (8, 1)),)),
]
GATHERS = ("all-gather",)
"""XLA's CPU partitioner gathers the batch of an FFT; the TPU's does not."""

SOLVES = [
    Case(
        "triangular_solve",
        lambda a, b: linalg.triangular_solve(a, b, left_side=True),
        (POSITIVE, (8, 4, 8)),
        "stablehlo.triangular_solve",
        platform="tpu",
    ),
    Case(
        "triangular_solve",
        linalg.triangular_solve,
        (POSITIVE, (8, 8, 4)),
        "stablehlo.triangular_solve",
        label="from the right",
        platform="tpu",
    ),
    Case("fft", lambda x: lax.fft(x, "FFT", (4,)), (COMPLEX,), "stablehlo.fft", also=GATHERS),
    Case("fft", lambda x: lax.fft(x, "RFFT", (4,)), (SQUARE,), "stablehlo.fft", also=GATHERS, label="real fft"),
]
ZEROS, ONES = jnp.zeros((8, 4)), jnp.ones((8, 4))
TRIDIAGONAL = Case("tridiagonal_solve", linalg.tridiagonal_solve, (ZEROS, ONES, ZEROS, (8, 4, 8)))


@pytest.mark.parametrize("case", SOLVES, ids=str)
def test_solvers_and_transforms_have_the_factors_that_shardy_gives_them(case):
    assert case.disagreements() == sorted(case.explained)


@pytest.mark.parametrize("case", [*DECOMPOSITIONS, *SOLVES, TRIDIAGONAL], ids=str)
def test_every_batch_sharding_of_a_matrix_op_gives_the_one_device_result(case):
    rule = case.check()
    assert rule.reason == ""


@pytest.mark.parametrize("name", ["cholesky", "eigh", "symmetric_product"])
def test_a_lone_matrix_says_why_it_stays_whole(name):
    rule = rule_for(name, ((8, 8),) * 2, ((8, 8),), {})
    assert not any(rule.splittable)
    assert rule.reason == f"the matrix dimensions of {name} depend on each other"


def test_a_transform_over_all_dimensions_says_why_it_stays_whole():
    rule = rule_for("fft", ((8, 8),), ((8, 8),), {"fft_lengths": (8, 8)})
    assert not any(rule.splittable)
    assert "depends on all others" in rule.reason
