"""`step.verify`: a split step against one device, judged by the noise of rounding."""
