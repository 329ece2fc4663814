"""Benchmarks: `python -m simulations.bench NAME`. Each gives one JSON object with rows and a headline."""
