"""Kernels in Triton and TileLang that run on both vendors. They know nothing of the HAL."""
