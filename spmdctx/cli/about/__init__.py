"""Commands about the installation: what it consists of, and how shells complete its commands."""
