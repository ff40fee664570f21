"""Halocline: DeepSeek-V4 inference with the same model code on NVIDIA and AMD."""
