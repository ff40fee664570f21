"""Blocks that several networks share."""
