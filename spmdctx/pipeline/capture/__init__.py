"""Captures a step whose loss runs through a pipeline: what comes before the loss, the loss of a micro-batch, and what follows."""
