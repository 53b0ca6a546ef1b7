"""The parameter server: servers hold the state of a step and renew it, workers compute gradients of parts of the batch."""
