"""Costs in trainers: concurrent draws, waiting times, memory and tensors."""
