"""The training of the small graded model that ships with the repository. Not part of the wheel."""
