"""Trainers and engines that people use, made durable: a module for each, over the public API.

None is imported here. A module imports its package, so only who has it can import the module.
"""
