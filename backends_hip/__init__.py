"""The AMD backend: a manifest and one adapter file per family and library."""
