"""What comes right before a call: the fast path, and the check of donated arguments."""
