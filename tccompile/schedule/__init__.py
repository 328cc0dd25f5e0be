"""Which kernel and config each op gets on a generation, and where its tensors lie."""
