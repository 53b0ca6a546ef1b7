"""`AutoParallel`: MindSpore's newer name for a step with options, whose methods set these one by one."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from spmdctx.context.options import checked
from spmdctx.errors import ContextError, UnsupportedError, message, shown
from spmdctx.step.step import ParallelStep

_MODE_OPTIONS = {
    "semi_auto": {"parallel_mode": "semi_auto_parallel"},
    **{
        name: {"parallel_mode": "auto_parallel", "search_mode": name}
        for name in ("sharding_propagation", "recursive_programming", "dynamic_programming")
    },
}
"""The options of each mode; dynamic_programming is one that MindSpore's class does not have."""


class AutoParallel:
    """A step with options, as MindSpore's class of this name: `AutoParallel(step, parallel_mode="semi_auto")`, then its methods.

    It is called like the step, and has everything that `spmdctx.parallel` gives: `plan`, `init`, `lower`, `audit`. Each method checks its
    values where it is called, and acts from the next call of the step on.
    """

    def __init__(self, network: Callable[..., Any], parallel_mode: str = "semi_auto", **options: Any) -> None:
        """Takes a step, or a module that is called; `options` are further ones of `spmdctx.parallel`.

        Raises:
            ContextError: no such mode, or a bad option.
            TypeError: what cannot be called.
        """
        if parallel_mode not in _MODE_OPTIONS:
            raise ContextError(
                "AutoParallel has no such parallel_mode.", got=shown(parallel_mode), need=", ".join(map(repr, _MODE_OPTIONS))
            )
        self.network = network
        self._options: dict[str, Any] = {**_MODE_OPTIONS[parallel_mode], **options}
        self._files: dict[str, Any] = {}
        self._step: ParallelStep[..., Any] = ParallelStep(network, self._options)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Runs the step."""
        return self._step(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or "_step" not in self.__dict__:
            raise AttributeError(name)
        return getattr(self._step, name)

    def __repr__(self) -> str:
        return f"<spmdctx.AutoParallel of {self._step!r}>"

    def _set(self, **options: Any) -> None:
        checked(options)
        self._options.update(options)
        self._step = ParallelStep(self.network, self._options)

    def _file(self, key: str, value: Any) -> None:
        if not isinstance(value, bool | str):
            raise TypeError(message("A strategy file must be a path.", got=shown(value)))
        self._set(strategy_ckpt_config={**self._files, key: value})
        self._files[key] = value

    def load_param_strategy_file(self, file_path: str) -> None:
        """Uses a saved plan or a strategy file in place of a search (`strategy_ckpt_load_file`)."""
        self._file("load_file", file_path)

    def save_param_strategy_file(self, file_path: str) -> None:
        """Writes each plan to a file (`strategy_ckpt_save_file`)."""
        self._file("save_file", file_path)

    def disable_strategy_file_only_for_trainable_params(self) -> None:
        """Asks for other state in strategy files too; plan files hold every tensor anyway."""
        self._file("only_trainable_params", False)

    def load_operator_strategy_file(self, file_path: str) -> None:
        """The same as `load_param_strategy_file`: a plan holds parameters and ops."""
        self._operators("load_file", file_path)

    def save_operator_strategy_file(self, file_path: str) -> None:
        """The same as `save_param_strategy_file`: a plan holds parameters and ops."""
        self._operators("save_file", file_path)

    def _operators(self, key: str, file_path: str) -> None:
        if isinstance(file_path, str) and not (os.path.isabs(file_path) and file_path.endswith(".json")):
            raise ContextError("A file of operators' strategies needs an absolute path that ends in .json.", got=shown(file_path))
        self._file(key, file_path)

    def dataset_strategy(self, config: Any) -> None:
        """Sets how each input of the batch is split: "data_parallel", "full_batch", or tuples or Layouts."""
        self._set(dataset_strategy=config)

    def hsdp(self, shard_size: int = -1, threshold: int = 64, optimizer_level: str = "level1") -> None:
        """Splits optimizer state over replicas (`enable_parallel_optimizer`); `threshold` is in KB."""
        config = {
            "optimizer_weight_shard_size": shard_size,
            "parallel_optimizer_threshold": threshold,
            "optimizer_level": optimizer_level,
        }
        self._set(enable_parallel_optimizer=True, parallel_optimizer_config=config)

    def pipeline(self, stages: int = 1, output_broadcast: bool = False, interleave: bool = False, scheduler: str = "1f1b") -> None:
        """Cuts the loss into stages (`pipeline_stages`, `pipeline_config`).

        Raises:
            UnsupportedError: output_broadcast, or a scheduler that is not built.
        """
        if output_broadcast:
            _refuse("pipeline(output_broadcast=True)", "read the results of the last stage: a step gives them back to every process")
        self._set(pipeline_stages=stages, pipeline_config={"pipeline_interleave": interleave, "pipeline_scheduler": scheduler})

    def get_pipeline_stages(self) -> int:
        """Returns the number of stages."""
        return self._step.context.pipeline_stages

    def comm_fusion(self, config: Mapping[str, Any]) -> None:
        """Sets what collectives are combined (`comm_fusion`)."""
        self._set(comm_fusion=config)

    def enable_gradients_mean(self) -> None:
        """Averages gradients over the replicas (`gradients_mean`)."""
        self._set(gradients_mean=True)

    def disable_gradient_fp32_sync(self) -> None:
        """Reduces low-precision gradients in their own type (`gradient_fp32_sync`)."""
        self._set(gradient_fp32_sync=False)

    def disable_loss_repeated_mean(self) -> None:
        """Sums the gradients of a loss that all devices compute alike (`loss_repeated_mean`)."""
        self._set(loss_repeated_mean=False)

    def set_group_ckpt_save_file(self, file_path: str) -> None:
        """Refuses by name: JAX has no communication group files."""
        self._set(group_ckpt_save_file=file_path)

    def no_init_parameters_in_compile(self) -> None:
        """Changes nothing: compiling a step never makes its parameters; `init` makes them, split."""

    def enable_fp32_communication(self) -> NoReturn:
        """Refuses by name: gradients are reduced in float32 by default, other sums in their own type."""
        _refuse("enable_fp32_communication", "gradient_fp32_sync, which is on by default, for gradients; compute in float32 for other sums")

    def print_local_norm(self) -> NoReturn:
        """Refuses by name."""
        _refuse("print_local_norm", _NORMS)

    def dump_local_norm(self, file_path: str) -> NoReturn:
        """Refuses by name."""
        _refuse(f"dump_local_norm({file_path!r})", _NORMS)

    def enable_device_local_norm(self) -> NoReturn:
        """Refuses by name."""
        _refuse("enable_device_local_norm", _NORMS)

    def transformer_opt(self, file_path: str | None) -> None:
        """Refuses a file of Ascend's switches; None or an empty name sets none."""
        if file_path:
            _refuse(f"transformer_opt({file_path!r})", "leave it out: XLA decides what runs beside communication")


_NORMS = "return optax.global_norm(gradients) from the step"


def _refuse(method: str, fix: str) -> NoReturn:
    raise UnsupportedError(f"AutoParallel.{method} is not supported.", fix=fix)
