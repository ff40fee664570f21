"""Several processes in step: how they join, what they compare, how plans travel, and how all end when one is lost."""
