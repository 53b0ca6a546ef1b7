"""Other plans than the chosen one: what they cost, and which link, budget or batch would make one of them win."""
