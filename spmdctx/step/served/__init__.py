"""Steps whose state lies on servers."""
