"""The auto-parallel context: MindSpore's set, get and reset, layers for `with` and decorators, and the frozen value steps read.

There is one process-wide layer, which new threads see, and a stack of further layers per thread (or async task), pushed
by `auto_parallel_context`. Each setter changes the innermost layer only. A layer holds a frozen AutoParallelContext, so
that a step reads one consistent state however many threads set options.
"""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, fields
from functools import cache, wraps
from itertools import count
from types import TracebackType
from typing import Any, NamedTuple, TypeVar

from spmdctx.context_options import ALGO_BY_NAME, ALGO_OPTIONS, BY_NAME, OPTIONS, checked, find
from spmdctx.context_storage import Option
from spmdctx.context_values import CommFusion, DatasetStrategy, ParallelOptimizerConfig, StrategyFiles, plain
from spmdctx.errors import message

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True)
class AlgoParameters:
    """Parameters of the search; `explicit` names those the user set."""

    fully_use_devices: bool
    elementwise_op_strategy_follow: bool
    tensor_slice_align_enable: bool
    tensor_slice_align_size: int
    enable_algo_approxi: bool
    algo_approxi_epsilon: float
    explicit: frozenset[str] = frozenset()


DEFAULT_ALGO = AlgoParameters(**{option.name: option.default for option in ALGO_OPTIONS})


@dataclass(frozen=True)
class AutoParallelContext:
    """All options in normal form: frozen, hashable, one attribute per option.

    `explicit` names the options the user set, in whichever layer. `index_fusion` is True where the last call that chose
    the fusion of all-reduces asked for buckets by index; the indices are in `all_reduce_fusion_config`.
    """

    device_num: int
    global_rank: int
    gradients_mean: bool
    gradient_fp32_sync: bool
    loss_repeated_mean: bool
    parallel_mode: str
    search_mode: str
    sharding_propagation: bool
    parameter_broadcast: bool
    strategy_ckpt_config: StrategyFiles
    group_ckpt_save_file: str
    full_batch: bool
    dataset_strategy: DatasetStrategy
    enable_parallel_optimizer: bool
    parallel_optimizer_config: ParallelOptimizerConfig
    optimizer_weight_shard_aggregated_save: bool
    enable_alltoall: bool
    all_reduce_fusion_config: tuple[int, ...]
    comm_fusion: CommFusion
    pipeline_stages: int
    auto_pipeline: bool
    grad_accumulation_step: int
    communi_parallel_mode: str
    mem_coeff: float
    index_fusion: bool = False
    explicit: frozenset[str] = frozenset()
    algo: AlgoParameters = DEFAULT_ALGO

    @property
    def auto_parallel_search_mode(self) -> str:
        """The older name of search_mode."""
        return self.search_mode

    @property
    def strategy_ckpt_load_file(self) -> str:
        """The entry of strategy_ckpt_config."""
        return self.strategy_ckpt_config.load_file

    @property
    def strategy_ckpt_save_file(self) -> str:
        """The entry of strategy_ckpt_config."""
        return self.strategy_ckpt_config.save_file

    @property
    def optimizer_weight_shard_size(self) -> int:
        """The entry of parallel_optimizer_config."""
        return self.parallel_optimizer_config.optimizer_weight_shard_size

    @property
    def effective_search_mode(self) -> str:
        """The search that auto_parallel runs: the older switch sharding_propagation counts too."""
        return "sharding_propagation" if self.sharding_propagation else self.search_mode

    @property
    def batch_is_pinned(self) -> bool:
        """Whether the user said how the batch is split; in auto_parallel it is free otherwise."""
        return not self.explicit.isdisjoint(("dataset_strategy", "full_batch"))

    def is_set(self, name: str) -> bool:
        """Whether the user set the option, by either name where it has two."""
        return name in self.explicit

    def value(self, option: Option) -> Any:
        """The option's value in normal form."""
        return getattr(self, option.name)

    def replace(self, **options: Any) -> AutoParallelContext:
        """This context with options set on top, checked.

        Raises:
            ContextError: an unknown name or a bad value.
            TypeError: a value of a wrong type.
            UnsupportedError: an option that JAX has no counterpart of.
        """
        return self._with(checked(options))

    def plan_options(self) -> tuple[tuple[str, Any], ...]:
        """Options that differ from their defaults, in table order, as `get` gives them; none of paths and ranks."""
        rows = [(option, self.value(option)) for option in OPTIONS if option.in_plan and not option.same_as]
        found = [(option.name, plain(value)) for option, value in rows if value != option.default]
        algo = [(name, getattr(self.algo, name)) for name in ALGO_BY_NAME if name in self.algo.explicit]
        return tuple(found + algo)

    def _with(self, values: Mapping[str, Any]) -> AutoParallelContext:
        if not values:
            return self
        state = {name: getattr(self, name) for name in _FIELDS}
        for name, value in values.items():
            BY_NAME[name].write(state, value)
        names = {"search_mode" if name == "auto_parallel_search_mode" else name for name in values}
        return AutoParallelContext(**{**state, "explicit": self.explicit | names})


_FIELDS = tuple(field.name for field in fields(AutoParallelContext))
DEFAULT_CONTEXT = AutoParallelContext(**{option.name: option.default for option in OPTIONS if option.name in _FIELDS})


class _Layer(NamedTuple):
    context: AutoParallelContext
    version: int
    outer: _Layer | None


_versions = count()


@cache
def _version_of(context: AutoParallelContext) -> int:
    """One number per distinct context, so that a layer that is entered again costs a step no new look-up."""
    return next(_versions)


def _layer(context: AutoParallelContext, outer: _Layer | None) -> _Layer:
    with _lock:
        return _Layer(context, _version_of(context), outer)


_lock = threading.RLock()
_base = _layer(DEFAULT_CONTEXT, None)
_inner: ContextVar[_Layer | None] = ContextVar("spmdctx_context", default=None)


def current_context() -> AutoParallelContext:
    """The context that holds here: of the innermost layer of this thread, else the process-wide one."""
    return (_inner.get() or _base).context


def version() -> int:
    """A number that two equal contexts share and two different ones do not; the cheapest test for a change."""
    return (_inner.get() or _base).version


def _update(change: Callable[[AutoParallelContext], AutoParallelContext]) -> None:
    """Applies a change to the innermost layer; nothing happens where it raises."""
    global _base
    layer = _inner.get()
    if layer is not None:
        _inner.set(_layer(change(layer.context), layer.outer))
        return
    with _lock:
        _base = _layer(change(_base.context), None)


def set_auto_parallel_context(**options: Any) -> None:
    """Sets options of the innermost layer: of the process, or of the enclosing `with auto_parallel_context(...)`.

    All or nothing: where one option is bad, none is set. Options that contradict each other are found when a step is
    planned or called, so they can be set in any order. `docs/options.md` lists them.

    Raises:
        ContextError: an unknown name (the nearest one is named) or a bad value.
        TypeError: a value of a wrong type.
        UnsupportedError: an option that JAX has no counterpart of.
    """
    values = checked(options)
    _update(lambda context: context._with(values))


def get_auto_parallel_context(attr_key: str) -> Any:
    """The value of one option: the one that was set, or the documented default.

    Raises:
        ContextError: an unknown name.
    """
    option = find(attr_key, "Get")
    return plain(current_context().value(option))


def reset_auto_parallel_context() -> None:
    """Gives every option of the innermost layer its default again; search parameters stay."""
    _update(lambda context: _with_algo(DEFAULT_CONTEXT, context.algo))


def _with_algo(context: AutoParallelContext, algo: AlgoParameters) -> AutoParallelContext:
    state = {name: getattr(context, name) for name in _FIELDS}
    return AutoParallelContext(**{**state, "algo": algo})


def set_algo_parameters(**parameters: Any) -> None:
    """Sets parameters of the search, all or nothing.

    Raises:
        ContextError: an unknown name or a bad value.
        TypeError: a value of a wrong type.
    """
    values = checked(parameters, ALGO_BY_NAME)

    def change(context: AutoParallelContext) -> AutoParallelContext:
        state = {name: getattr(context.algo, name) for name in ALGO_BY_NAME}
        return _with_algo(context, AlgoParameters(**{**state, **values}, explicit=context.algo.explicit | values.keys()))

    _update(change)


def get_algo_parameters(attr_key: str) -> Any:
    """The value of one parameter of the search.

    Raises:
        ContextError: an unknown name.
    """
    return getattr(current_context().algo, find(attr_key, "Get", ALGO_BY_NAME).name)


def reset_algo_parameters() -> None:
    """Gives every parameter of the search its default again."""
    _update(lambda context: _with_algo(context, DEFAULT_ALGO))


class ContextLayer:
    """What `auto_parallel_context` returns: a layer for a `with` block, or a decorator; can be used again and nested."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        self._values = checked(options)

    def __enter__(self) -> AutoParallelContext:
        outer = _inner.get()
        context = current_context()._with(self._values)
        _inner.set(_layer(context, outer))
        return context

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        layer = _inner.get()
        _inner.set(layer.outer if layer is not None else None)

    def __call__(self, function: F) -> F:
        """The function, called inside the layer."""
        if inspect.isclass(function) or inspect.isgeneratorfunction(function) or inspect.isasyncgenfunction(function):
            # Their bodies would run after the layer has ended.
            raise TypeError(
                message("auto_parallel_context decorates functions and coroutines only.", got=repr(function), fix="use `with` inside it")
            )
        if inspect.iscoroutinefunction(function):

            @wraps(function)
            async def awaited(*args: Any, **kwargs: Any) -> Any:
                with self:
                    return await function(*args, **kwargs)

            return awaited  # type: ignore[return-value]

        @wraps(function)
        def called(*args: Any, **kwargs: Any) -> Any:
            with self:
                return function(*args, **kwargs)

        return called  # type: ignore[return-value]


def auto_parallel_context(**options: Any) -> ContextLayer:
    """A layer of the context, for a `with` block or as a decorator; the old state comes back on exit.

    Inside, `set_auto_parallel_context` and `reset_auto_parallel_context` change this layer only. Other threads do not
    see it. The options are checked at once, not on entry.

    Raises:
        ContextError: an unknown name or a bad value.
        TypeError: a value of a wrong type.
        UnsupportedError: an option that JAX has no counterpart of.
    """
    return ContextLayer(options)


def _signature(returns: object) -> inspect.Signature:
    """Keyword-only options with their defaults, so that notebooks and editors complete them."""
    keywords = [inspect.Parameter(option.name, inspect.Parameter.KEYWORD_ONLY, default=plain(option.default)) for option in OPTIONS]
    return inspect.Signature(keywords, return_annotation=returns)


set_auto_parallel_context.__signature__ = _signature(None)  # type: ignore[attr-defined]
auto_parallel_context.__signature__ = _signature(ContextLayer)  # type: ignore[attr-defined]
