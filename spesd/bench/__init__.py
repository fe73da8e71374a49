"""Benchmarks of the product's own parts, each beside what it is compared with.

Decides what is measured and how it is reported: a benchmark is a module with `run`, which returns
a dict that JSON can hold, and `table`, which makes text of it. Figures are ratios within one run.
"""
