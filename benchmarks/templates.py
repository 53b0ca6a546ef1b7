"""Expert templates for training steps, as plain `jax.jit` programs: data parallelism, ZeRO-1 and -3, tensor parallelism, their mixes.

Nothing here asks the planner. A template is a mesh of `data` by `model` slices and a ZeRO stage: weights are split over `model` as in
Megatron-LM (Shoeybi et al., 2019), optimizer state (ZeRO-1) or weights too (ZeRO-3, Rajbhandari et al., 2020) over `data`. ZeRO-3
gathers a weight where a layer uses it, in the activations' precision and again in the backward pass, by constraints inside each
layer's remat; gradients are pinned to the optimizer state's sharding. Batches are split over `data`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from spmdctx.models import DecoderConfig, abstract_batch, decoder
from spmdctx.models.training import create, loss_fn

Spec = tuple[tuple[str, ...], ...]
Shape = Sequence[int]

COLUMNS = re.compile(r"(query|key|value|gate|up|head)\W+(kernel|bias)|(^|\W)(up|wq|wk|wv)$")
"""Weights whose outputs Megatron-LM splits: the last dimension."""

ROWS = re.compile(r"(out|down)\W+kernel|embedding\W+embedding")
"""Weights whose inputs it splits: the last dimension but one; of an embedding the vocabulary."""


@dataclass(frozen=True)
class Template:
    """Slices of the batch and of the weights, and the ZeRO stage: 0, 1 or 3."""

    data: int
    model: int
    zero: int = 0

    def __str__(self) -> str:
        words = [{0: "dp", 1: "zero1_", 3: "zero3_"}[self.zero] + str(self.data)] if self.data > 1 else []
        return "_".join(words + ([f"tp{self.model}"] if self.model > 1 else [])) or "one device"

    @property
    def mesh_axes(self) -> dict[str, int]:
        """Axis sizes."""
        return {"data": self.data, "model": self.model}

    def mesh(self, devices: Sequence[Any]) -> Mesh:
        """The mesh, row-major over the devices."""
        return Mesh(np.array(devices).reshape(self.data, self.model), ("data", "model"))


def templates(num_devices: int) -> tuple[Template, ...]:
    """dp, ZeRO-1, ZeRO-3, tp, and each of the first three times tp, over all factorisations in two."""
    found = []
    for model in (size for size in range(1, num_devices + 1) if num_devices % size == 0):
        data = num_devices // model
        found += [Template(data, model, zero) for zero in ((0, 1, 3) if data > 1 else (0,))]
    return tuple(found)


def used_spec(path: str, shape: Shape, template: Template) -> Spec:
    """How a layer uses a weight: split over `model` where Megatron-LM does and the size allows, else whole."""
    spec: list[tuple[str, ...]] = [()] * len(shape)
    place = -1 if COLUMNS.search(path) else -2 if ROWS.search(path) and len(shape) > 1 else None
    if place is not None and template.model > 1 and shape[place] % template.model == 0:
        spec[place] = ("model",)
    return tuple(spec)


def stored_spec(path: str, shape: Shape, template: Template) -> Spec:
    """The same, and its largest whole dimension that divides split over `data`."""
    return split_over_data(used_spec(path, shape, template), shape, template.data)


def split_over_data(spec: Spec, shape: Shape, slices: int) -> Spec:
    """Splits the largest whole dimension that divides over `data`; as it is where there is none."""
    free = [place for place, axes in enumerate(spec) if not axes and shape[place] % slices == 0 and shape[place] > 1]
    if slices == 1 or not free:
        return spec
    chosen = max(free, key=lambda place: (shape[place], -place))
    return tuple(("data",) if place == chosen else axes for place, axes in enumerate(spec))


def partition_spec(spec: Spec) -> PartitionSpec:
    """For JAX."""
    return PartitionSpec(*(axes or None for axes in spec))


def constrain(x: Any, mesh: Mesh, spec: Spec) -> Any:
    """Pins a value."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, partition_spec(spec)))


def path_of(path: Any) -> str:
    """`layers/0/mlp/up/kernel`."""
    return jax.tree_util.keystr(path, simple=True, separator="/")


def lower_decoder(config: DecoderConfig, batch_size: int, seq: int, template: Template, devices: Sequence[Any]) -> jax.stages.Lowered:
    """The decoder's AdamW step under a template, its state donated.

    Raises:
        ValueError: the batch does not divide.
    """
    if batch_size % template.data:
        raise ValueError(f"A batch of {batch_size} does not split {template.data} ways.")
    mesh = template.mesh(devices)
    graph, state = nnx.split(nnx.eval_shape(lambda: create(config)))
    stored = jax.tree_util.tree_map_with_path(lambda path, leaf: _state_sharding(path_of(path), leaf, template, mesh), state)
    tokens = NamedSharding(mesh, PartitionSpec("data"))

    def step(state: Any, batch: Any) -> tuple[Any, Any]:
        model, optimizer = nnx.merge(graph, state)
        with gathering(template, mesh):
            loss, grads = nnx.value_and_grad(loss_fn)(model, batch)
        if template.zero:
            grads = jax.tree_util.tree_map_with_path(
                lambda path, leaf: constrain(leaf, mesh, stored_spec(path_of(path), leaf.shape, template)), grads
            )
        optimizer.update(model, grads)
        return nnx.state((model, optimizer)), loss

    return jax.jit(step, in_shardings=(stored, tokens), out_shardings=(stored, None), donate_argnums=0).lower(
        state, abstract_batch(batch_size, seq)
    )


def _state_sharding(path: str, leaf: Any, template: Template, mesh: Mesh) -> NamedSharding:
    moments = path.startswith("1/")
    split = template.zero == 3 or (template.zero == 1 and moments)
    spec = (stored_spec if split else used_spec)(path, leaf.shape, template)
    return NamedSharding(mesh, partition_spec(spec))


@contextmanager
def gathering(template: Template, mesh: Mesh) -> Iterator[None]:
    """While it lasts, the decoder's layers see their weights as a template uses them, and pin the residual stream and the logits."""
    columns = ("model",) if template.model > 1 else ()
    block = _with_weights(decoder.Block.__call__, lambda self: self.attention.config, (("data",), (), ()), template, mesh)
    whole = _with_weights(decoder.Decoder.__call__, lambda self: self.config, (("data",), (), columns), template, mesh)
    with mock.patch.object(decoder.Block, "__call__", block), mock.patch.object(decoder.Decoder, "__call__", whole):
        yield


def _with_weights(
    call: Callable[..., Any], config_of: Callable[[Any], DecoderConfig], result: Spec, template: Template, mesh: Mesh
) -> Callable[..., Any]:
    """A module's call with its own weights pinned as they are used; those of a decoder's layers are left to the layers."""

    def run(self: Any, x: Any, *source: Any) -> Any:
        graph, state = nnx.split(self)
        dtype = config_of(self).dtype

        def use(path: Any, weight: Any) -> Any:
            name = path_of(path)
            if name.startswith("layers") or not jnp.issubdtype(weight.dtype, jnp.floating):
                return weight
            cast = weight.astype(dtype) if weight.ndim > 1 else weight
            return constrain(cast, mesh, used_spec(name, weight.shape, template))

        return constrain(call(nnx.merge(graph, jax.tree_util.tree_map_with_path(use, state)), x, *source), mesh, result)

    return run
