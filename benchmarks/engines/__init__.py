"""Beside the bare engines: the same rows, the same bytes, the same minute."""
