"""What XLA keeps on the chip, and how its scheduler is held to a limit."""
