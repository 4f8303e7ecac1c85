"""Who charges a card twice when its process is killed: `python -m benchmarks.kill_comparison`."""
