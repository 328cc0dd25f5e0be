"""The plan file: its dataclasses, bytes, limits and checks."""
