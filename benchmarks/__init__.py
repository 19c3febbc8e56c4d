"""Measurements of xlatrainer beside its peers: `python -m benchmarks --help`.

Timings are ratios between things that take turns in one run, since machines are shared and noisy.
"""
