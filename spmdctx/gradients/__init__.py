"""`value_and_grad` and `grad`, and the gradient options of the context: local losses, their reduction, and micro-batches."""

from spmdctx.gradients.transforms import grad, value_and_grad

__all__ = ["grad", "value_and_grad"]
