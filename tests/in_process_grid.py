"""Flower's Grid without its processes, for tests: see `simulations.in_process_grid`."""

from simulations.in_process_grid import CLIENT_RAISED, NODE_UNAVAILABLE, SERVER_NODE, InProcessGrid, set_task_identity

__all__ = ["CLIENT_RAISED", "NODE_UNAVAILABLE", "SERVER_NODE", "InProcessGrid", "set_task_identity"]
