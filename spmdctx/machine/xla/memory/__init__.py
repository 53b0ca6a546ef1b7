"""The tensors that XLA keeps on the chip, and the limit to which its scheduler is held."""
