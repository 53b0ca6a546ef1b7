"""The context: the table of options, their values and layers, what is checked, files and generated docs."""
