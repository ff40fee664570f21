"""DeepSeek-V4: configuration, weights and network."""
