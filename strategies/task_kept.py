"""TaskKeptError: why a task's weights stay what they are."""

from __future__ import annotations


class TaskKeptError(Exception):
    """A task's updates cannot be aggregated this round: its weights stay, and the record gives this text."""
