"""The start of a search: the parallel mode, the mesh, the user's marks and the dataset strategy."""
