"""The commands, and what they print."""
