"""Sharded Flax modules: subclasses made at run time whose call is a region, so that types, paths and checkpoints stay valid."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax
from flax import linen, nnx

from spmdctx.shard.call import Eager, Region, Strategies, call_marked, marked_variables, path_part, variables_of
from spmdctx.shard.eager import run_split, runs_eagerly


def shard_nnx(module: nnx.Module, strategies: Strategies) -> nnx.Module:
    """Makes an instance of a subclass of the module's type, which shares the module's variables and submodules."""
    sharded: nnx.Module = object.__new__(_nnx_subclass(type(module), strategies))
    vars(sharded).update(vars(module))
    return sharded


@functools.cache
def _nnx_subclass(base: type[nnx.Module], strategies: Strategies) -> Any:
    def call(self: nnx.Module, *args: Any, **kwargs: Any) -> Any:
        def body(region: Region) -> Callable[..., Any]:
            region.warn_missing(list(variables_of(self, "")))

            def run(*inner_args: Any, **inner_kwargs: Any) -> Any:
                with marked_variables(region, {"": self}, 0):
                    return base.__call__(self, *inner_args, **inner_kwargs)

            return run

        return call_marked(strategies, base.__name__, body, args, kwargs, eager=Eager(_call_module, self))

    return _subclass(base, {"pytree": base._pytree__is_pytree}, __call__=call)


def _call_module(module: nnx.Module, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


def _subclass(base: type, options: dict[str, Any], **methods: Any) -> Any:
    """Makes a subclass with other methods that looks like `base`, since Flax names submodules after their class."""
    for name, method in methods.items():
        functools.update_wrapper(method, getattr(base, name), updated=())
    body = {**methods, "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__}
    return type(base)(base.__name__, (base,), body, **options)


def shard_linen(module: linen.Module, strategies: Strategies) -> linen.Module:
    """Makes a copy of the module with a subclass as its type; inside a parent's setup or compact method it replaces the module."""
    alone = module.parent is None and module.scope is None
    sharded: Any = module.clone() if alone else copy.copy(module)
    base: Any = type(module)
    object.__setattr__(sharded, "__class__", _linen_subclass(base, strategies))
    return sharded  # type: ignore[no-any-return]  # the module's own class, made at run time


@functools.cache
def _linen_subclass(base: Any, strategies: Strategies) -> Any:
    def call(self: linen.Module, *args: Any, **kwargs: Any) -> Any:
        def body(region: Region) -> Callable[..., Any]:
            if not strategies.parameter_plan or self.is_initializing():
                return functools.partial(base.__call__, self)
            mark = functools.partial(_marked_collection, region)
            return functools.partial(linen.map_variables(base.__call__, "params", trans_in_fn=mark), self)

        return call_marked(strategies, base.__name__, body, args, kwargs)

    def apply(self: linen.Module, *args: Any, **kwargs: Any) -> Any:
        if runs_eagerly(args, kwargs):
            return run_split(_apply_module, (self, *args), kwargs)
        return base.apply(self, *args, **kwargs)

    return _subclass(base, {}, __call__=call, apply=apply)


def _apply_module(module: linen.Module, *args: Any, **kwargs: Any) -> Any:
    return module.apply(*args, **kwargs)


def _marked_collection(region: Region, variables: Any) -> Any:
    """Marks the planned leaves of a collection `{"params": tree}`; boxes of partitioning metadata stay around them."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(variables)
    paths = ["/".join(path_part(key) for key in path[1:] if not isinstance(key, jax.tree_util.GetAttrKey)) for path, _ in leaves]
    region.warn_missing(paths)
    marked = []
    for index, (path, (_, value)) in enumerate(zip(paths, leaves, strict=True)):
        spec = region.strategies.parameter_spec(path)
        marked.append(value if spec is None else region.mark(value, "parameter", index, spec, f"{region.label}/{path}"))
    return jax.tree.unflatten(tree, marked)
