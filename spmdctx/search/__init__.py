"""The searches: they choose which mesh axes split which factor of each op, by propagation, dynamic or recursive programming."""
