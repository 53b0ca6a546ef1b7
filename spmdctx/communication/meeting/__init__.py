"""How the processes of a job meet: where process 0 listens, who may join, and the connections that are left of it."""
