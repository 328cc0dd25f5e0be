"""Operators of the user's own: what is said of one in Python, and what is made of it while a model is compiled."""
