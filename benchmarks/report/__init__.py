"""Results to tables in docs/benchmarks.md, and to plots beside it."""
