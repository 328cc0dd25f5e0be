"""Whether a plan computes what its model says: the oracle, certificates, and code made again."""
