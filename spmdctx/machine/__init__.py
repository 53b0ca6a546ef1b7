"""The machine that a step is planned for: its chips and links, and the time of collectives and reshards on it."""
