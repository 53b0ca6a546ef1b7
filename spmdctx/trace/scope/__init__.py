"""The surroundings in which a step is traced, planned and run: its settings, its mesh and its environment."""
