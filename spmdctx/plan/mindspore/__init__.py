"""MindSpore's strategy files: written from plans, and read as pins."""
