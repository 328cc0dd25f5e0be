"""Other weights in a plan: what they are held to, names that differ, adapters that are merged. Needs NumPy only."""
