"""Machine code: the only room that knows Numba and ptxas; the cache; packing a plan."""
