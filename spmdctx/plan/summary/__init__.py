"""What a plan is, in one sentence that is read off its shardings."""
