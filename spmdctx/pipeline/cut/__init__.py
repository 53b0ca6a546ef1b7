"""Cuts the forward pass of a loss into chunks, one for each place of a pipeline."""
