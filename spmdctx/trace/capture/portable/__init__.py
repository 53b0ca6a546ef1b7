"""Frees a traced step of what it says of the devices that it was written for."""
