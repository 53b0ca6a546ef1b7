"""From chosen states to plans: values that nobody chose, stored inputs, and layers that follow different plans."""
