"""The lessons of the graded model, one module each."""
