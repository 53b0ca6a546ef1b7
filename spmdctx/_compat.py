"""Names that are not public in JAX or Flax, or differ between their versions; no other file may use them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.extend.core as jexc


def x64_is_on() -> bool:
    """Returns whether 64-bit types are enabled; the type stubs of `jax.config` know its flags in some versions only."""
    config: Any = jax.config
    return bool(config.jax_enable_x64)


class KeyValueStore:
    """A store through which processes exchange strings by key besides their computation; process 0 keeps it."""

    def __init__(self, client: Any) -> None:
        self._client = client

    def set(self, key: str, value: str) -> None:
        """Tells all processes; a key is set once."""
        self._client.key_value_set(key, value)

    def delete(self, key: str) -> None:
        """Forgets what was told."""
        self._client.key_value_delete(key)

    def get(self, key: str, timeout_s: float) -> str | None:
        """Waits for a string that another process sets; returns None if it does not come in time."""
        try:
            return str(self._client.blocking_key_value_get(key, int(1000 * timeout_s)))
        except jax.errors.JaxRuntimeError as error:
            if "DEADLINE_EXCEEDED" in str(error):
                return None
            raise


def key_value_store() -> KeyValueStore:
    """Returns the store of `jax.distributed`, whose client is only in a private module of JAX."""
    from jax._src import distributed

    return KeyValueStore(distributed.global_state.client)


def after_leaving_job(left: Callable[[], None]) -> None:
    """Calls `left` once this process has left JAX's job; until it returns, process 0 keeps the service that the others may still need.

    JAX ends that service as soon as process 0 has left. A process whose answer is then still on its way aborts.
    """
    from jax._src import distributed

    state: Any = distributed.global_state
    leave = state.shutdown

    def shutdown() -> None:
        del state.shutdown
        service, state.service = state.service, None
        try:
            leave()
        finally:
            state.service = service
        left()
        leave()

    state.shutdown = shutdown


def has_used_devices() -> bool:
    """Returns whether JAX has started to use its devices, after which it cannot join a job."""
    from jax._src import xla_bridge

    return bool(xla_bridge.backends_are_initialized())


def is_compile_only(device: Any) -> bool:
    """Returns whether a device is only a description to compile for; JAX has no public test, and fails late when it is used."""
    return "CompileOnly" in type(getattr(device, "client", None)).__name__


class JitOptions(NamedTuple):
    """The options for arguments that the user gave to `jax.jit` or `nnx.jit`."""

    static_argnums: tuple[int, ...] = ()
    static_argnames: tuple[str, ...] = ()
    donate_argnums: tuple[int, ...] = ()
    donate_argnames: tuple[str, ...] = ()


def is_jitted(fn: Any) -> bool:
    """Returns whether `fn` is a function of `jax.jit`; their type has no public name, but their methods are public."""
    return all(hasattr(fn, name) for name in ("__wrapped__", "clear_cache", "trace", "lower"))


def is_pmapped(fn: Any) -> bool:
    """Returns whether `fn` is a function of `jax.pmap`, which is a plain function of JAX's own module."""
    return str(getattr(fn, "__globals__", {}).get("__name__", "")).startswith("jax._src.pmap")


def unwrap_jit(fn: Callable[..., Any]) -> tuple[Callable[..., Any], JitOptions]:
    """Returns the function under `jax.jit` or `nnx.jit` and its options; other functions come back as they are.

    A jitted function with shardings also comes back as it is, since its trace holds the shardings, which are pins.
    """
    jitted = fn if is_jitted(fn) else _nnx_jitted(fn)
    if jitted is None:
        return fn, JitOptions()
    # A jitted function keeps its options in a private attribute, and JAX has no public way to read them.
    info = getattr(jitted, "_jit_info", None)
    if info is None:
        return fn, JitOptions()
    options = JitOptions(*(tuple(getattr(info, name)) for name in JitOptions._fields))
    leaves = (*info.in_shardings_leaves, *info.out_shardings_leaves)
    has_shardings = any(type(leaf).__name__ != "UnspecifiedValue" for leaf in leaves)
    return (fn if has_shardings else fn.__wrapped__), options  # type: ignore[attr-defined]  # a jitted function has it; its type does not say so


def _nnx_jitted(fn: Any) -> Any | None:
    """Returns the jitted function inside `nnx.jit`'s wrapper, which keeps the options, or None for other functions."""
    if not type(fn).__module__.startswith("flax.nnx") or not hasattr(fn, "__wrapped__"):
        return None
    return getattr(fn, "jitted_fn", None)


def scan_counts(params: Mapping[str, Any]) -> tuple[int, int]:
    """Returns how many operands of a scan are constants of its body, and how many are carried; the rest are scanned."""
    if "num_carry" in params:
        return params["num_consts"], params["num_carry"]
    # After 0.10 JAX replaced the two numbers by a tree of the operands.
    constants, carried, _ = params["ft_in"].unpack()
    return len(constants), len(carried)


def _names_axis(effect: Any) -> bool:
    """Returns whether an effect only names a mesh axis; the class of such effects is private."""
    from jax._src.core import NamedAxisEffect

    return isinstance(effect, NamedAxisEffect)


def is_axis_effect(effect: Any, names: Container[str]) -> bool:
    """Returns whether an effect says that an equation communicates over one of some mesh axes."""
    return _names_axis(effect) and effect.name in names


def acts_outside(eqn: jexc.JaxprEqn) -> bool:
    """Returns whether an equation acts on more than its results."""
    return not all(map(_names_axis, eqn.effects))


def without_mesh(context: Any) -> Any:
    """Returns the context of an equation with no mesh set; other settings in it stay. Contexts have a private type."""
    with context.manager, jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        return type(context)()


@functools.cache
def plain_call_params() -> Mapping[str, Any]:
    """Returns what `jax.jit` gives a call that has no shardings and no mesh; the value for "unspecified" has no public name."""
    with jax.sharding.use_abstract_mesh(jax.sharding.AbstractMesh((), ())):
        params = jax.make_jaxpr(jax.jit(lambda x: -x))(0.0).eqns[0].params
    return {"in_shardings": params["in_shardings"][0], "out_shardings": params["out_shardings"][0], "ctx_mesh": params.get("ctx_mesh")}


def is_tracing() -> bool:
    """Returns whether JAX traces the code that calls this."""
    from jax._src import core

    return not core.trace_state_clean()


def entered_mesh() -> Any:
    """Returns the mesh of `with mesh:`, empty if there is none; `jax.set_mesh` sets another one, which JAX has a public name for."""
    from jax._src import mesh

    return mesh.thread_resources.env.physical_mesh


def without_high_primitives(jaxpr: jexc.ClosedJaxpr) -> jexc.ClosedJaxpr:
    """Replaces every `hijax` primitive of a program by what it does; source lines and name scopes stay.

    JAX does this when it lowers, and has no public way to request it earlier.
    """
    # After 0.10 JAX made one of a function of its own (jnp.searchsorted); before, they were only those that users write.
    if not getattr(jaxpr.jaxpr, "is_high", False):
        return jaxpr
    from jax._src.interpreters import partial_eval

    return partial_eval.lower_jaxpr2(jaxpr)


def without_unread(jaxpr: jexc.ClosedJaxpr, stays: Sequence[bool]) -> tuple[jexc.ClosedJaxpr, list[bool]]:
    """Drops the equations of a program whose results nothing reads, and then the operands that nothing reads.

    JAX does this where it compiles, and has no public way to do it to a jaxpr.

    Args:
        jaxpr: the program.
        stays: for each operand, whether it stays in any case.

    Returns:
        The program, and for each operand whether it has stayed.
    """
    from jax._src.interpreters import partial_eval

    body = jaxpr.jaxpr
    found, used_consts, used = partial_eval.dce_jaxpr_consts(body, [True] * len(body.outvars), [True] * len(body.constvars) + list(stays))
    return jexc.ClosedJaxpr(found, [value for value, is_used in zip(jaxpr.consts, used_consts, strict=True) if is_used]), used


def gamma_sampler(params: Mapping[str, Any]) -> Callable[..., Any]:
    """Returns the function of keys and shapes to which JAX lowers `random_gamma`; JAX runs it only when it lowers."""
    from jax._src.random import core

    return functools.partial(core._gamma_impl, log_space=params["log_space"], use_vmap=True)


def ordered_effects() -> tuple[Any, Any]:
    """Returns the effects of ordered calls of `jax.debug` and of `io_callback`; they have no public names."""
    from jax._src import callback, debugging

    return debugging.ordered_debug_effect, callback._OrderedIOEffect


def shard_copier(targets: Sequence[Any]) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns what copies arrays to the devices of `targets`, shard by shard: each array must be divided as its target is.

    `jax.device_put` makes the same call, after looking at each array for ten times as long as the call takes.
    """
    from jax._src import config, lib

    private: Any = vars(lib)["_jax"]
    devices = [target._internal_device_list.addressable_device_list for target in targets]
    semantics = [private.ArrayCopySemantics.REUSE_INPUT] * len(devices)

    def copy(arrays: Sequence[Any]) -> Sequence[Any]:
        # The call does not look whether arrays are deleted: the process would end.
        for array in arrays:
            array._check_if_deleted()
        # Outside of this scope, `jax.transfer_guard` takes the copies for implicit ones.
        with config.explicit_device_put_scope():
            copied: Sequence[Any] = private.batched_copy_array_to_devices_with_sharding(arrays, devices, targets, semantics)
        return copied

    return copy
