"""The flows: which stage runs in which order. No other logic."""
