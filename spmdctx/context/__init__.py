"""The context: the table of options, their values, layers and checks, configuration files and generated docs."""
