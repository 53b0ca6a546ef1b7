"""Which values XLA keeps in memory that it could compute again on the way into others."""
