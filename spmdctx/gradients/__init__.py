"""`value_and_grad` and `grad`, and the gradient options of the context: local losses, their reduction, and micro-batches."""

from pathlib import Path

from jax.extend import source_info_util

from spmdctx.gradients.cell import MicroBatchInterleaved, PipelineCell
from spmdctx.gradients.transforms import grad, value_and_grad

__all__ = ["MicroBatchInterleaved", "PipelineCell", "grad", "value_and_grad"]

# The source line of what this package adds to a step is the user's call.
for _file in Path(__file__).parent.glob("*.py"):
    source_info_util.register_exclusion(str(_file))
