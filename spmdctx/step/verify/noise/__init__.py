"""The noise floor of a step: how much its results move when every operation rounds otherwise."""
