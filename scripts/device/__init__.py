"""Parts of ``scripts/device_check.py``: what is checked and measured on a real card."""
