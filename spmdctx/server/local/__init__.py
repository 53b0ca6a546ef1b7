"""State that stays with workers: parameters without a mark, and what the optimizer keeps of them."""
