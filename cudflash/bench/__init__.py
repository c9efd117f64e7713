"""The measuring instrument behind ``cudflash bench``: prompts, runs, statistics, records, reports.

``prompts`` has the shipped texts, ``lanes`` what is measured against what, ``runner`` the measuring,
``statistics`` the arithmetic, ``record`` the paper trail, ``report`` and ``plot`` its views.
docs/MEASURING.md defines every number.
"""
