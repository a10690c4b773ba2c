"""Measurements: ratios taken side by side in one run, raw samples kept."""
