"""What each operator does to axes whose extent the data decide: see `load/sizes.py`."""
