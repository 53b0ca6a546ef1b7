"""What XLA makes of a program: one file per behavior, with its evidence, its switch and where it is priced."""
