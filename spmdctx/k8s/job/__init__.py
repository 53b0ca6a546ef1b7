"""What a user says about a job on a cluster, checked, and what its containers are told."""
