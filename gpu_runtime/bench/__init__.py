"""Benchmarks of one device, on synthetic tensors: they need neither data nor Flower."""
