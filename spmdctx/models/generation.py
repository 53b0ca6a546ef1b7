"""Text generation with a decoder split over devices: plans the step that makes one token, and runs the loop around it."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.experimental import multihost_utils

from spmdctx.api import parallel
from spmdctx.checkpoint.layouts import plan_layouts
from spmdctx.context.options import PLANNED_MODES
from spmdctx.errors import ContextError
from spmdctx.models.config import DecoderConfig
from spmdctx.models.decoder import Decoder
from spmdctx.models.hand_strategies import UNSPLIT, Split
from spmdctx.plan.mindspore.file import ParameterLayout, write_layouts
from spmdctx.plan.plan import Plan
from spmdctx.step.step import ParallelStep


def next_token(model: Decoder, tokens: jax.Array, key: jax.Array, temperature: jax.Array) -> jax.Array:
    """Returns the token [batch, 1] after `tokens` [batch, seq]: the likeliest at temperature 0, else one drawn with `key`."""
    return _drawn(model(tokens)[:, -1], key, temperature)


def _drawn(logits: jax.Array, key: jax.Array, temperature: jax.Array) -> jax.Array:
    drawn = jax.random.categorical(key, logits / jnp.maximum(temperature, 1e-6))
    return jnp.where(temperature > 0, drawn, jnp.argmax(logits, axis=-1)).astype(jnp.int32)[:, None]


def _next_of(allowed: np.ndarray | None) -> Callable[..., jax.Array]:
    """Returns `next_token`, which takes only tokens that are `allowed`, [vocab] bool, if that is given."""
    if allowed is None:
        return next_token
    minus = np.where(allowed, np.float32(0), -np.float32(np.inf))

    def next_allowed(model: Decoder, tokens: jax.Array, key: jax.Array, temperature: jax.Array) -> jax.Array:
        return _drawn(model(tokens)[:, -1] + minus, key, temperature)

    return next_allowed


class _Sized(NamedTuple):
    """The step for one number of tokens at once, and where it takes them."""

    step: ParallelStep[..., Any]
    tokens: Any


class Generator:
    """A decoder that makes text, planned for devices before it has parameters.

        generator = Generator(config, batch=2, length=96, parallel_mode="auto_parallel", device_num=4)
        network = generator.network()
        spmdctx.load_distributed_checkpoint({"model": network}, "run", generator.layouts)
        tokens = generator.run(network, prompts, 32)

    Args:
        config: sizes and options of the decoder.
        batch: prompts at a time.
        length: the most tokens of a prompt and its answer.
        split: strategies that `shard()` gives the layers.
        allowed: whether each token may be answered, [vocab] bool; all may by default.
        options: of `spmdctx.parallel`.

    Raises:
        ContextError: `length` is more than there are learned positions, or options that do not fit.
    """

    def __init__(
        self,
        config: DecoderConfig,
        *,
        batch: int,
        length: int,
        split: Split = UNSPLIT,
        allowed: np.ndarray | None = None,
        **options: Any,
    ) -> None:
        self._config, self._split, self._options = config, split.parameters_alone(), options
        self._batch, self._length = batch, length
        self._step = parallel(_next_of(allowed), **options)
        self._sized: dict[int, _Sized] = {}
        self._abstract = nnx.eval_shape(self._remembering)

    def network(self) -> Decoder:
        """Returns the decoder as shapes, into which parameters can be loaded."""
        model: Decoder = nnx.eval_shape(lambda: Decoder(self._config, nnx.Rngs(0), self._split))
        return model

    @cached_property
    def plan(self) -> Plan:
        """The plan of the step that makes one token."""
        return self._step.plan(*self._arguments(1))

    @cached_property
    def layouts(self) -> dict[str, ParameterLayout]:
        """The layouts of the parameters, and of the cached keys and values."""
        return plan_layouts(self.plan)

    @cached_property
    def shardings(self) -> Any:
        """The shardings of the parameters of `network`: a state with a sharding in place of each."""
        whole = self._step.in_shardings(*self._arguments(1))[0]
        return nnx.filter_state(whole, lambda path, _: not _is_kept(path))

    def run(
        self,
        network: Decoder,
        prompts: Sequence[np.ndarray],
        count: int,
        *,
        temperature: float = 0.0,
        seed: int = 0,
        stop: int | None = None,
        show: Callable[[np.ndarray], None] | None = None,
    ) -> np.ndarray:
        """Continues each prompt for `count` tokens.

        The tokens that all prompts have are read at once; of longer ones the rest is read token by token while the others go on.

        Args:
            network: the decoder with its parameters.
            prompts: token numbers, one row each.
            count: new tokens per prompt.
            temperature: 0 takes the likeliest token; the higher, the more even the draw.
            seed: of the draws, which do not depend on how the model is split.
            stop: a token that ends an answer: what would follow it is that token again; all ended, no more are made.
            show: called with each new token of every prompt, [batch].

        Returns:
            [batch, count] token numbers.

        Raises:
            ContextError: an empty prompt, another number of prompts than planned for, or no room for the tokens.
        """
        lengths = self._checked(prompts, count)
        model, first = self._joined(network), min(lengths)
        known = np.zeros((len(prompts), max(lengths) + count), np.int32)
        for row, prompt in zip(known, prompts, strict=True):
            row[: len(prompt)] = prompt
        key, heat = jax.random.key(seed), np.float32(temperature)
        start, answers = 0, np.asarray(lengths)
        for end in range(first, known.shape[1]):
            step, where = self._for_tokens(end - start)
            tokens = jax.make_array_from_callback((len(prompts), end - start), where, partial(_block, known[:, start:end]))
            drawn = _host(step(model, tokens, jax.random.fold_in(key, end), heat))[:, 0]
            known[:, end] = np.where(answers > end, known[:, end], drawn)
            if stop is not None:
                has_ended = (answers < end) & (known[:, end - 1] == stop)
                known[has_ended, end] = stop
            if show is not None:
                show(known[:, end])
            start = end
            if stop is not None and np.all((answers <= end) & (known[:, end] == stop)):
                known[:, end:] = stop
                break
        return np.stack([row[length : length + count] for row, length in zip(known, lengths, strict=True)])

    def _remembering(self) -> Decoder:
        model = Decoder(self._config, nnx.Rngs(0), self._split)
        model.remember(self._batch, self._length)
        return model

    def _arguments(self, seq: int) -> tuple[Any, ...]:
        """Returns the step's arguments as shapes, for `seq` tokens at once."""
        tokens = jax.ShapeDtypeStruct((self._batch, seq), jnp.int32)
        return self._abstract, tokens, jax.eval_shape(lambda: jax.random.key(0)), jax.ShapeDtypeStruct((), jnp.float32)

    def _for_tokens(self, seq: int) -> _Sized:
        """Returns the step for `seq` tokens at once; parameters and the cache are placed as for a single token."""
        if seq not in self._sized:
            step = self._step if seq == 1 or self.plan.mode not in PLANNED_MODES else self._pinned(seq)
            self._sized[seq] = _Sized(step, step.in_shardings(*self._arguments(seq))[1])
        return self._sized[seq]

    def _pinned(self, seq: int) -> ParallelStep[..., Any]:
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "strategy.json"
            write_layouts({name: layout for name, layout in self.layouts.items() if layout.shape}, path)
            options = {**self._options, "mesh": None, "device_num": self.plan.logical_mesh.num_devices}
            step = parallel(next_token, **{**options, "strategy_ckpt_load_file": str(path)})
            step.plan(*self._arguments(seq))
        return step

    def _joined(self, network: Decoder) -> Decoder:
        """Returns the decoder with parameters and an empty cache."""
        graph, state = nnx.split(self._abstract)
        shardings = dict(nnx.to_flat_state(self._step.in_shardings(*self._arguments(1))[0]))
        parameters = dict(nnx.to_flat_state(nnx.state(network)))
        for path, variable in nnx.to_flat_state(state):
            shape, where = variable.get_value(), shardings[path].get_value()
            variable.set_value(jnp.zeros(shape.shape, shape.dtype, device=where) if _is_kept(path) else parameters[path].get_value())
        model: Decoder = nnx.merge(graph, state)
        return model

    def _checked(self, prompts: Sequence[np.ndarray], count: int) -> list[int]:
        lengths = [len(prompt) for prompt in prompts]
        if len(prompts) != self._batch:
            raise ContextError("The generator was planned for another number of prompts.", got=str(len(prompts)), need=str(self._batch))
        if min(lengths) < 1 or count < 1:
            raise ContextError("A prompt and its answer have at least one token.", got=f"{min(lengths)} and {count} tokens")
        if max(lengths) + count > self._length:
            raise ContextError(
                "There is no room for so many tokens.",
                got=f"{max(lengths)} of the prompt and {count} new ones",
                need=f"at most {self._length}",
            )
        return lengths


def _is_kept(path: tuple[Any, ...]) -> bool:
    """Returns whether a variable belongs to the cache of tokens and is not a parameter."""
    return "past" in path or path[-1] == "used"


def _block(tokens: np.ndarray, index: Any) -> np.ndarray:
    return np.asarray(tokens[index])


def _host(array: jax.Array) -> np.ndarray:
    """Returns the whole array on every process."""
    if array.is_fully_addressable or array.is_fully_replicated:
        return np.asarray(array)
    return np.asarray(multihost_utils.process_allgather(array, tiled=True))
