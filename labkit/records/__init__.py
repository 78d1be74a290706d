"""What a run leaves: schema, codec, store and the registry of counters.

Lies under the experiment, which writes records, and the analysis, which reads them.
Standard library only.
"""

from labkit.records.cell_session import DONE, Sitting, is_held, last_sitting, sitting_path
from labkit.records.record_codec import read_json, write_json
from labkit.records.record_schema import (
    BETTER,
    MACHINE_FIELDS,
    OUTCOMES,
    PROCESSES,
    ROLES,
    SCHEMA_VERSION,
    Arm,
    CaseRecord,
    Metric,
    Record,
    RecordError,
    machine_difference,
    parse_run_name,
    run_name,
)
from labkit.records.record_store import (
    read,
    read_arm,
    read_arms,
    read_cell,
    read_runs,
    values_path,
    write,
)

__all__ = [
    "BETTER",
    "DONE",
    "MACHINE_FIELDS",
    "OUTCOMES",
    "PROCESSES",
    "ROLES",
    "SCHEMA_VERSION",
    "Arm",
    "CaseRecord",
    "Metric",
    "Record",
    "RecordError",
    "Sitting",
    "is_held",
    "last_sitting",
    "machine_difference",
    "parse_run_name",
    "read",
    "read_arm",
    "read_arms",
    "read_cell",
    "read_json",
    "read_runs",
    "run_name",
    "sitting_path",
    "values_path",
    "write",
    "write_json",
]
