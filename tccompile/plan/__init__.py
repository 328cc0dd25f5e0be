"""The plan file: its dataclasses, bytes, limits and checks."""

FORMAT_VERSION = 16
"""Of what is in a plan's file: it grows with every change of that."""
