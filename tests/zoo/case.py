"""What a model of the zoo is: a whole training step, its arguments, and the strategies that split it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import flax.linen as nn
import jax
import numpy as np
import optax
from flax import nnx
from flax.training.train_state import TrainState

import spmdctx

Kind = Literal["none", "strategies", "pins"]
Step = Callable[..., Any]
Maker = Callable[["Split", Any], tuple[Step, tuple[Any, ...]]]

BATCH = 24
LEARNING_RATE = 1e-2

COLUMN = {"kernel": "-m", "bias": "m"}
"""Specs of a dense layer whose outputs are split."""

ROW = {"kernel": "m-", "bias": "-"}
"""Specs of a dense layer whose inputs are split."""

_FACTORS = {1: (1, 1), 2: (1, 2), 3: (1, 3), 6: (2, 3), 8: (4, 2)}


@dataclass(frozen=True)
class Split:
    """Turns functions and modules into `shard()` regions; `none` leaves them as they are.

    Specs are one word per operand: `d` splits a dimension over the data slices, `m` over the model slices, `-` leaves it
    whole; the word `*` leaves the operand free. `strategies` uses the whole spec, `pins` only the regions that give one.
    """

    kind: Kind = "none"
    data: int = 1
    model: int = 1

    def __call__(self, fn: Step, spec: str, out: str | None = None, *, pin: str | None = None) -> Step:
        """`fn` as a region with the strategies of `spec` (or of `pin`, where only pins are wanted)."""
        chosen = {"none": None, "strategies": spec, "pins": pin}[self.kind]
        if chosen is None:
            return fn
        out_strategy = self._strategy(out) if out is not None and self.kind == "strategies" else None
        return spmdctx.shard(fn, in_strategy=self._strategy(chosen), out_strategy=out_strategy)

    def module(self, module: Any, spec: str, parameters: Mapping[str, str], out: str | None = None, *, pin: bool = False) -> Any:
        """A linen or nnx module as a region, with a spec per parameter."""
        if self.kind == "none" or (self.kind == "pins" and not pin):
            return module
        plan = {path: self._slices(word) for path, word in parameters.items()}
        whole = self.kind == "strategies"
        free = tuple(None for _ in spec.split())
        out_strategy = self._strategy(out) if out is not None and whole else None
        return spmdctx.shard(module, self._strategy(spec) if whole else free, out_strategy, parameter_plan=plan)

    def _strategy(self, spec: str) -> tuple[tuple[int, ...] | None, ...]:
        return tuple(None if word == "*" else self._slices(word) for word in spec.split())

    def _slices(self, word: str) -> tuple[int, ...]:
        return tuple({"d": self.data, "m": self.model, "-": 1}[letter] for letter in word)


UNSPLIT = Split()


@dataclass(frozen=True)
class Case:
    """One model in one flavor. `make(split, dtype)` gives the training step and its arguments.

    Where the model's layers give nothing to split (`splits_model`), all devices split the batch.

    Pure steps are `(state, *batch) -> (state, loss)`; nnx steps are `(model, optimizer, *batch) -> loss` and change both.
    """

    name: str
    flavor: Literal["pytree", "linen", "nnx"]
    make: Maker
    splits_model: bool = True

    def split(self, kind: Kind, num_devices: int) -> Split:
        """The Split of a device count: slices over data times slices over model."""
        data, model = _FACTORS[num_devices] if self.splits_model else (num_devices, 1)
        return Split(kind, data, model)

    @property
    def num_state_args(self) -> int:
        """How many leading arguments are state; the rest is the batch."""
        return 2 if self.flavor == "nnx" else 1

    def jit(self, step: Step) -> Step:
        """The step on one device, as its framework compiles it."""
        return nnx.jit(step) if self.flavor == "nnx" else jax.jit(step)

    def run(self, step: Step, args: tuple[Any, ...]) -> dict[str, np.ndarray]:
        """One call's outputs and the state after it, by path."""
        result = step(*args)
        everything = (result, nnx.state(args[:2])) if self.flavor == "nnx" else result
        return {jax.tree_util.keystr(path): _numpy(leaf) for path, leaf in jax.tree_util.tree_leaves_with_path(everything)}

    def dataset_strategy(self, split: Split, args: tuple[Any, ...]) -> tuple[tuple[int, ...], ...]:
        """Dimension 0 of every batch leaf over the data slices."""
        leaves = jax.tree.leaves(args[self.num_state_args :])
        return tuple((split.data,) + (1,) * (leaf.ndim - 1) for leaf in leaves)


def _numpy(leaf: Any) -> np.ndarray:
    return np.asarray(jax.random.key_data(leaf) if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key) else leaf)


class Numbers:
    """A stream of reproducible NumPy arrays."""

    def __init__(self, dtype: Any, seed: int = 0) -> None:
        self._rng = np.random.default_rng(seed)
        self.dtype = dtype

    def normal(self, *shape: int) -> np.ndarray:
        """Standard normal values: inputs."""
        return self._rng.normal(size=shape).astype(self.dtype)

    def weight(self, *shape: int, fan_in: int | None = None) -> np.ndarray:
        """Normal values over the square root of the fan-in (all dimensions but the last, unless given)."""
        return (self._rng.normal(size=shape) / math.sqrt(fan_in or math.prod(shape[:-1]))).astype(self.dtype)

    def zeros(self, *shape: int) -> np.ndarray:
        """Biases."""
        return np.zeros(shape, self.dtype)

    def ones(self, *shape: int) -> np.ndarray:
        """Scales."""
        return np.ones(shape, self.dtype)

    def integers(self, high: int, *shape: int) -> np.ndarray:
        """Class and token numbers below `high`."""
        return self._rng.integers(high, size=shape).astype(np.int32)

    def initial(self, path: tuple[Any, ...], leaf: Any) -> Any:
        """The first value of a linen variable, by its name."""
        name = path[-1].key
        return {"bias": self.zeros, "mean": self.zeros, "scale": self.ones, "var": self.ones}.get(name, self.weight)(*leaf.shape)


class Shapes(Numbers):
    """Abstract arrays in place of numbers: for models at a size at which they are planned only."""

    def normal(self, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, self.dtype)

    def weight(self, *shape: int, fan_in: int | None = None) -> Any:
        return jax.ShapeDtypeStruct(shape, self.dtype)

    zeros = ones = normal

    def integers(self, high: int, *shape: int) -> Any:
        return jax.ShapeDtypeStruct(shape, np.int32)


def _is_abstract(tree: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def _as_arrays(tree: Any) -> Any:
    return tree if _is_abstract(tree) else jax.tree.map(jax.numpy.asarray, tree)


def _created(create: Step, tree: Any) -> Any:
    """`create(tree)`, abstract where the tree is."""
    return jax.eval_shape(create, tree) if _is_abstract(tree) else create(tree)


def pure_program(loss: Step, params: Any, batch: tuple[Any, ...]) -> tuple[Step, tuple[Any, ...]]:
    """A whole step around `loss(params, *batch)`, with the state {"params", "optimizer"}."""
    optimizer = optax.adamw(LEARNING_RATE)

    def step(state: Any, *batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(state["params"], *batch)
        updates, moments = optimizer.update(grads, state["optimizer"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, value

    params = _as_arrays(params)
    return step, ({"params": params, "optimizer": _created(optimizer.init, params)}, *batch)


class LinenState(TrainState):
    """The state of a linen model with running statistics, if it has any."""

    batch_stats: Any = None


def linen_model_program(loss: Step, model: nn.Module, numbers: Numbers, batch: tuple[Any, ...], num_inputs: int = 1) -> tuple[Step, Any]:
    """`linen_program` on a new LinenState of a model that takes the first `num_inputs` arrays of the batch."""
    shapes = jax.eval_shape(model.init, jax.random.key(0), *batch[:num_inputs])
    # JAX's own initialisers in float64 take longer to compile than the step.
    variables = _as_arrays(jax.tree_util.tree_map_with_path(numbers.initial, shapes))

    def create(variables: Any) -> LinenState:
        return LinenState.create(apply_fn=model.apply, tx=optax.adamw(LEARNING_RATE), **variables)

    return linen_program(loss, _created(create, variables), batch)


def linen_program(loss: Step, state: Any, batch: tuple[Any, ...]) -> tuple[Step, tuple[Any, ...]]:
    """A whole step on a TrainState around `loss(params, state, *batch) -> (loss, fields to replace)`."""

    def step(state: Any, *batch: Any) -> Any:
        (value, fields), grads = jax.value_and_grad(loss, has_aux=True)(state.params, state, *batch)
        return state.apply_gradients(grads=grads, **fields), value

    return step, (state, *batch)


def nnx_program(loss: Step, model: nnx.Module, batch: tuple[Any, ...]) -> tuple[Step, tuple[Any, ...]]:
    """A whole step on a module and its optimizer around `loss(model, *batch)`."""

    def step(model: Any, optimizer: Any, *batch: Any) -> Any:
        value, grads = nnx.value_and_grad(loss)(model, *batch)
        optimizer.update(model, grads)
        return value

    return step, (model, nnx.Optimizer(model, optax.adamw(LEARNING_RATE), wrt=nnx.Param), *batch)


def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Mean cross entropy over all positions."""
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def layer_norm(x: jax.Array, scale: jax.Array) -> jax.Array:
    """Normalises the last dimension."""
    mean = x.mean(-1, keepdims=True)
    variance = ((x - mean) ** 2).mean(-1, keepdims=True)
    return (x - mean) * jax.lax.rsqrt(variance + 1e-6) * scale
