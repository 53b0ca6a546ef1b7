"""What XLA makes of a plan's collectives: how it writes, combines and places them."""
