"""The command line: one file per command group, imported only when the command runs."""
