"""What moving model state costs, side by side with what else would be used for it: ``python -m benchmarks``."""
