"""The NVIDIA backend: a manifest and one adapter file per family and library."""
