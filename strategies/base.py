"""MultiTaskStrategy: the round that arch-sync and the stock strategies share. Options and records are re-exported."""

from __future__ import annotations

from strategies.options import StrategyError, StrategyOptions
from strategies.records import ClientRecord, ClientTaskRecord, RoundRecord

__all__ = ["ClientRecord", "ClientTaskRecord", "RoundRecord", "StrategyError", "StrategyOptions"]
