"""Integrations with trainers and inference engines, one module each, built on the public API.

This package imports none of them. Each module imports the third-party package it is for, which must
then be installed, unless it only converts objects that it is given.
"""
