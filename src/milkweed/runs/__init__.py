"""The loops, the run directory, evaluation, and the mesh that a recipe holds in its hands."""
