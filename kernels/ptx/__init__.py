"""Inline PTX: instructions that Numba has no function for, one line each, by the unit they drive."""
