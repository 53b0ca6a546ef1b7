"""Expert templates for models of the test zoo, as plain `jax.jit` programs: ZeRO, tensor and expert parallelism.

The models mark their layers with a `Split`; here its place is taken by `with_sharding_constraint` on what goes into and comes out of each
layer, as an expert writes it by hand. Weights are split over `model` by name. With `experts`, a mixture's experts are split over the
slices of the batch, and tokens travel to them and back by all-to-alls (Lepikhin et al., "GShard", 2020).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from benchmarks.judge_models import zoo_program
from benchmarks.templates import Spec, Template, constrain, partition_spec, path_of, split_over_data, templates

_ATTENTION = {r"(attention|cross)/[012]$": 1, r"(attention|cross)/3$": 0}
RULES: dict[str, dict[str, int]] = {
    "mlp": {"up/": -1, r"down/w$": 0, r"head/": -1},
    "transformer": {r"attention/[012]$": 2, r"attention/3$": 1, r"up$": 2, r"down$": 1, "embed$": 0, "head$": 1},
    "encoder_decoder": {**_ATTENTION, "mlp/0$": 1, "mlp/1$": 0, "embed$": 0, "head$": 1},
    "moe": {"(up|down)$": 0},
    "gshard": {**_ATTENTION, "(up|down)$": 0},
    "vit": {r"(query|key|value)/kernel$": 1, "out/kernel$": 0, r"up\d+/": -1, r"down\d+/kernel$": 0, "head/": -1},
    "unet": {"first/kernel$": 3, "second/kernel$": 2},
}
"""Which dimension of a weight tensor parallelism splits, by the end of its path; for experts, that of the experts."""

EXPERT_MODELS = ("moe", "gshard")
_MIXTURE = {"dispatch": {"m": ""}, "collect": {"m": ""}, "experts": {"m": "data", "d": ""}}


@dataclass(frozen=True)
class ZooTemplate:
    """A template, and whether experts are split over the slices of the batch."""

    base: Template
    experts: bool = False

    def __str__(self) -> str:
        return f"{self.base}_ep" if self.experts else str(self.base)


def zoo_templates(model: str, num_devices: int) -> tuple[ZooTemplate, ...]:
    """Those of `templates`, and for mixtures of experts those of one axis with the experts split too."""
    known = [ZooTemplate(one) for one in templates(num_devices)]
    if model in EXPERT_MODELS:
        known += [replace(one, experts=True) for one in known if one.base.model == 1]
    return tuple(known)


@dataclass(frozen=True)
class Constraints:
    """Takes the place of a `Split`: its words become constraints, `d` for the data axis, `m` for the model axis."""

    mesh: Mesh
    template: ZooTemplate
    kind: str = "strategies"

    def __call__(self, fn: Callable[..., Any], spec: str, out: str | None = None, *, pin: str | None = None) -> Callable[..., Any]:
        """`fn` with its operands and result constrained."""
        letters = {"d": "data", "m": "model" if self.template.base.model > 1 else "", "-": ""}
        if self.template.experts:
            letters |= _MIXTURE.get(fn.__name__, {})

        def run(*operands: Any) -> Any:
            pinned = [self._pin(operand, word, letters) for operand, word in zip(operands, spec.split(), strict=True)]
            result = fn(*pinned)
            return self._pin(result, out, letters) if out is not None else result

        return run

    def module(self, module: Any, spec: str, parameters: Mapping[str, str], out: str | None = None, *, pin: bool = False) -> Any:
        """A linen module's call; its weights are constrained by name."""
        words = " ".join(word for word in spec.split() if word != "*")
        return lambda *operands: self(lambda *args: module(*args), words + " *" * (len(operands) - len(words.split())), out)(*operands)

    def _pin(self, value: Any, word: str, letters: Mapping[str, str]) -> Any:
        if word == "*" or getattr(value, "ndim", -1) != len(word):
            return value
        axes = tuple((letters[letter],) if letters[letter] else () for letter in word)
        sizes = [self.mesh.shape[own[0]] if own else 1 for own in axes]
        if any(size % count for size, count in zip(value.shape, sizes, strict=True)):
            return value
        return constrain(value, self.mesh, axes)


def used(model: str, path: str, shape: Sequence[int], template: ZooTemplate) -> Spec:
    """How a layer uses a weight."""
    spec: list[tuple[str, ...]] = [()] * len(shape)
    place = next((dim for pattern, dim in RULES[model].items() if re.search(pattern, path)), None)
    is_expert = model in EXPERT_MODELS and re.search("(up|down)$", path) is not None
    axis = "data" if template.experts and is_expert else "model"
    size = {"data": template.base.data, "model": template.base.model}[axis]
    if place is not None and place < len(shape) and size > 1 and shape[place] % size == 0:
        spec[place] = (axis,)
    return tuple(spec)


def lower_zoo(model: str, template: ZooTemplate, devices: Sequence[Any]) -> jax.stages.Lowered:
    """A zoo model's AdamW step under a template, its state donated."""
    mesh = template.base.mesh(devices)
    step, (state, *batch) = zoo_program(model, Constraints(mesh, template))

    def stored(path: str, leaf: Any, zero: bool) -> Spec:
        spec = used(model, path, leaf.shape, template)
        return split_over_data(spec, leaf.shape, template.base.data) if zero and ("data",) not in spec else spec

    def state_sharding(path: Any, leaf: Any) -> NamedSharding:
        name = path_of(path)
        moments = re.search(r"(^|\W)opt(imizer|_state)\W", name) is not None
        zero = template.base.zero == 3 or (template.base.zero == 1 and moments)
        return NamedSharding(mesh, partition_spec(stored(name, leaf, zero)))

    def run(state: Any, *batch: Any) -> Any:
        with mock.patch.object(jax, "value_and_grad", _gathered(jax.value_and_grad, gather, scatter)):
            return step(state, *batch)

    def gather(path: Any, leaf: Any) -> Any:
        return constrain(leaf, mesh, used(model, path_of(path), leaf.shape, template))

    def scatter(path: Any, leaf: Any) -> Any:
        return constrain(leaf, mesh, stored(path_of(path), leaf, template.base.zero > 0))

    shardings = jax.tree_util.tree_map_with_path(state_sharding, state)
    rows = tuple(jax.tree.map(lambda _: NamedSharding(mesh, PartitionSpec("data")), list(batch)))
    jitted = jax.jit(run, in_shardings=(shardings, *rows), out_shardings=(shardings, None), donate_argnums=0)
    return jitted.lower(state, *batch)


def _gathered(value_and_grad: Callable[..., Any], gather: Callable[..., Any], scatter: Callable[..., Any]) -> Callable[..., Any]:
    """`jax.value_and_grad` whose function sees its parameters gathered, and whose gradients come back scattered."""

    def transform(fn: Callable[..., Any], **options: Any) -> Callable[..., Any]:
        def whole(params: Any, *rest: Any) -> Any:
            return fn(jax.tree_util.tree_map_with_path(gather, params), *rest)

        def run(params: Any, *rest: Any) -> Any:
            value, grads = value_and_grad(whole, **options)(params, *rest)
            return value, jax.tree_util.tree_map_with_path(scatter, grads)

        return run

    return transform
