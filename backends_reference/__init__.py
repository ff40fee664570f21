"""The reference backend: every contract in plain torch. It is the definition of correct."""
