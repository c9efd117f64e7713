"""Records: what was measured, on what, as one versioned JSON object that can be checked.

Owns the schema ``cudflash-bench/1``, its file and its checks. Must not know engines. Invariants: the
runs are the record, every summary is computed from them when it is shown; a file is replaced whole or
not at all; a record that is not complete says so.
"""

import json
import os
from contextlib import contextmanager
from datetime import datetime, timezone
from pathlib import Path

from cudflash.bench.fields import RECORD, check_costs, check_run
from cudflash.bench.machine import machine, versions
from cudflash.errors import CudflashError, FormatError, UsageError
from cudflash.spec.stats import identities

SCHEMA = "cudflash-bench/1"
_EXPECTED = "expected a record of 'cudflash bench --record'"
COMPLETE, RUNNING, INTERRUPTED, FAILED = "complete", "running", "interrupted", "failed"
STATES = (COMPLETE, RUNNING, INTERRUPTED, FAILED)


def new_record(command, settings, items, sets):
    """Return the record of a bench that begins.

    Parameters
    ----------
    command : str
    settings : Settings
    items : sequence of Item
    sets : sequence of PromptSet
    """
    from cudflash.bench.prompts import prompts_digest

    return {
        "schema": SCHEMA, "status": RUNNING,
        "created": datetime.now(timezone.utc).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "command": command, "machine": machine(), "versions": versions(),
        "settings": settings.to_dict(),
        "prompts": {
            "sha256": prompts_digest(items),
            "sets": [
                {"name": s.name, "kind": s.kind, "source": s.source, "what": s.what} for s in sets
            ],
            "items": [item.to_dict() for item in items],
        },
        "groups": [], "runs": [], "verify_cost": [], "differences": [], "others_share": None,
    }  # fmt: skip


def to_text(record):
    """Return a record as JSON, one line per run, so that two records can be compared by eye."""
    parts = []
    for key, value in record.items():
        if isinstance(value, list) and value and isinstance(value[0], dict):
            lines = ",\n  ".join(_compact(one) for one in value)
            parts.append(f"{json.dumps(key)}: [\n  {lines}\n ]")
        else:
            parts.append(f"{json.dumps(key)}: {_compact(value)}")
    return "{\n " + ",\n ".join(parts) + "\n}\n"


def _compact(value):
    return json.dumps(value, ensure_ascii=False, allow_nan=False)


class RecordFile:
    """The file of a record; made before any work, so that it is known to be writable.

    Parameters
    ----------
    path : str or path-like
    replace : bool
        Whether a file that is there may be replaced.

    Raises
    ------
    UsageError
        If it cannot be written, or is there already.
    """

    def __init__(self, path, replace=False):
        self.path = Path(path)
        if self.path.exists() and not replace:
            raise UsageError(
                f"{path}: is there already, and a record is not overwritten; pass another name, or "
                "--force"
            )
        if self.path.is_dir():
            raise UsageError(f"{path}: is a directory, expected the name of a file")
        self._beside = self.path.with_name(self.path.name + ".partial")
        try:
            self._beside.write_text("", encoding="utf-8")
        except OSError as err:
            raise UsageError(
                f"{path}: cannot be written ({err.strerror or err}); choose another place"
            ) from None

    def save(self, record):
        """Write a state of the record beside the file: nothing is lost if the program is killed."""
        self._beside.write_text(to_text(record), encoding="utf-8")

    def finish(self, record):
        """Write the record and put it in its place."""
        self.save(record)
        os.replace(self._beside, self.path)

    def drop(self):
        """Nothing was measured: leave no file behind."""
        self._beside.unlink(missing_ok=True)


def read_record(path):
    """Return the checked record in a file.

    Raises
    ------
    FormatError
        Naming the file and the first thing that is wrong.
    """
    try:
        text = Path(path).read_text(encoding="utf-8")
    except OSError as err:
        raise UsageError(f"{path}: cannot be read ({err.strerror or err}); check the path") from None
    except UnicodeDecodeError as err:
        raise FormatError(f"{path}: byte {err.start} is not UTF-8, expected a record") from None
    try:
        record = json.loads(text)
    except ValueError as err:
        raise FormatError(f"{path}: is not JSON ({err}), {_EXPECTED}") from None
    except RecursionError:
        raise FormatError(f"{path}: is nested too deeply to be read, {_EXPECTED}") from None
    try:
        return validate_record(record)
    except FormatError as err:
        raise FormatError(f"{path}: {err}") from None


@contextmanager
def reporting_on(*paths):
    """Blame the records for what goes wrong while a report is made of them.

    ``validate_record`` looks at every field that a report reads; this is for what it does not know.

    Raises
    ------
    FormatError
        Naming the files, instead of an error of arithmetic or of looking something up.
    """
    try:
        yield
    except (ArithmeticError, AssertionError, AttributeError, LookupError, RecursionError,
            StopIteration, TypeError, ValueError) as err:  # fmt: skip
        if isinstance(err, UnicodeError) and "surrogates" not in err.reason:
            raise  # of the place that the report is written to, not of the record
        raise FormatError(
            f"{' or '.join(dict.fromkeys(map(str, paths)))}: no report can be made of what it holds "
            f"({type(err).__name__}: {' '.join(str(err).split())[:80]}), {_EXPECTED}"
        ) from None


def validate_record(record):
    """Return the record if it follows the schema and its counters keep their identities.

    Raises
    ------
    FormatError
    """
    if not isinstance(record, dict) or "schema" not in record:
        raise FormatError(f"has no key 'schema', {_EXPECTED}")
    schema = record["schema"]
    if schema != SCHEMA:
        about = "measure again with this version"
        if str(schema).startswith("cudflash-receipt/"):
            about = "that is the receipt of one answer; records come from 'cudflash bench --record'"
        raise FormatError(f"schema is {schema!r}, expected {SCHEMA!r}; {about}")
    RECORD.check(record, "record")
    if record["status"] not in STATES:
        raise FormatError(f"status is {record['status']!r}, expected one of {', '.join(STATES)}")
    known = {(g["name"], lane["name"]) for g in record["groups"] for lane in g["lanes"]}
    for index, run in enumerate(record["runs"]):
        if (run["group"], run["lane"]) not in known:
            raise FormatError(
                f"record.runs[{index}].lane is {run['lane']!r}, expected a lane of a group"
            )
        check_run(run, f"record.runs[{index}]")
        if run["counts"] is not None:
            _check_counts(run, index)
    check_costs(record["verify_cost"])
    return record


def _check_counts(run, index):
    try:
        identities(run["counts"])
    except CudflashError as err:
        raise FormatError(f"record.runs[{index}].counts: {err}") from None
    if run["counts"]["emitted"] != run["decode_tokens"]:
        raise FormatError(
            f"record.runs[{index}].counts.emitted is {run['counts']['emitted']}, expected "
            f"{run['decode_tokens']}, the tokens after the first"
        )
