"""The networks, written with torch and hal.ops only."""
