"""A stand-in for XTuner, which is not on an index: its documented contract, none of its code."""
