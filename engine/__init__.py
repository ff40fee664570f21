"""The engine: scheduler, cache manager, runner and sampler."""
