"""The outside world of the tests: what really happened, whatever the database says.

It is the ledger that the plugin gives to everybody, under the short name that the tests here use.
"""

from agentruns.testing.effects import VARIABLE, EffectsLedger as Effects

__all__ = ["VARIABLE", "Effects"]
