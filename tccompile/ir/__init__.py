"""Types, expressions, programs and what they mean: what all stages from lowering on share."""
