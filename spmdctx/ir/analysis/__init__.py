"""Facts that follow from the graph alone: numbering, kinds of values, sums in loops, the order of gradients, the batch."""
