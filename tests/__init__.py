"""Test suite; a package so that helpers are imported as ``tests.helpers``."""
