"""The parallel optimizer (ZeRO): which optimizer state, gradients and weights are split, as pins and couplings."""
