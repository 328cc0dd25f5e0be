"""Bytes for what products read, of models that are not quantized: which, and what the bytes stand for."""
