"""What other plans would cost, and which link, budget or batch would make one of them win."""
