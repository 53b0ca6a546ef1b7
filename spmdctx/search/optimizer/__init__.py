"""The parallel optimizer (ZeRO): it splits optimizer state, gradients and weights, by pins and couplings."""
