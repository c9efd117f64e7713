"""Timed runs of kernels and rounds for ``make bench``; never part of the tests."""
