"""From a captured step to its plan: the request, the search, the price, the notes, and plans in files."""
