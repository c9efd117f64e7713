"""Speculation: drafters, acceptance rules, rounds, gate, statistics, diagnosis.

NumPy only: no models, no devices, no terminal.
"""
