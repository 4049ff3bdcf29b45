"""Comparisons with bare drivers, on the same rows and payloads and in the same rounds."""
