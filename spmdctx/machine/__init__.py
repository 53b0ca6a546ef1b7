"""The machine to plan for: its chips and links, and the time of collectives and reshards on it."""
