"""Stands in for XTuner, which is not on the index: its written contract, no code of its."""
