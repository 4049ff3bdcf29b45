"""Tables and plots of results for docs/benchmarks.md and README.md."""
