"""Write loader/unicode_table.py from the general categories of Unicode 15.1.

Usage: ``pip install unicodedata2==15.1.0 && python scripts/make_unicode_classes.py``. The version is
pinned because a tokenizer must not change its ids with the Python version it runs on; 15.1 is the
version of llama.cpp's own table (src/unicode-data.cpp, compared code point by code point).
"""

import itertools
import pathlib
import textwrap

import unicodedata2

OUT = pathlib.Path(__file__).parent.parent / "loader" / "unicode_table.py"
DIGITS = "0123456789abcdefghijklmnopqrstuvwxyz"
HEADER = '''"""Letters, numbers and marks of Unicode {version}, as runs over all code points.

Written by scripts/make_unicode_classes.py; do not edit. A run is a class (L letter, N number,
M mark, O other) followed by its length in base 36, from code point 0 upwards.

Source: general categories of the Unicode Character Database {version} (PyPI unicodedata2).
"""

UNICODE_VERSION = "{version}"

RUNS = (
{lines}
)
'''


def base36(number: int) -> str:
    """Write a positive integer in base 36."""
    digits = ""
    while number:
        number, rest = divmod(number, 36)
        digits = DIGITS[rest] + digits
    return digits


def main() -> None:
    """Write the table."""
    if unicodedata2.unidata_version != "15.1.0":
        raise SystemExit(f"unicodedata2 is {unicodedata2.unidata_version}, expected 15.1.0")
    majors = (unicodedata2.category(chr(code))[0] for code in range(0x110000))
    classes = (major if major in "LNM" else "O" for major in majors)
    runs = "".join(name + base36(len(list(g))) for name, g in itertools.groupby(classes))
    lines = "\n".join(f'    "{part}"' for part in textwrap.wrap(runs, 92))
    OUT.write_text(HEADER.format(version="15.1.0", lines=lines))


if __name__ == "__main__":
    main()
