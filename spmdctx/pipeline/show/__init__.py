"""Shows the plan of a pipelined step: in a terminal, as a picture of its schedule, and as a page."""
