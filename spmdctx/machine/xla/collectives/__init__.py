"""The way in which XLA writes, combines and places a plan's collectives."""
