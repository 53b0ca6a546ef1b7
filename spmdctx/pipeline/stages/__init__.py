"""Plans the chunks of a pipeline, each on the devices of its stage."""
