"""Fused operations besides attention."""
