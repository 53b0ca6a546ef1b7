"""Turns a captured step into its plan: the request, the search, the price, the notes, and plan files."""
