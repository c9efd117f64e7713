"""Tests of the measuring instrument."""
