"""How tensors are stored: what values they take, what rounding would cost, and the formats chosen."""
