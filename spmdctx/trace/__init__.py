"""From a user's function to a program: the flat jaxpr of a call, and the graph made of it."""
