"""Records of runs: schema, JSON codec, files and the registry of counters.

The experiment writes records and the analysis reads them; both import this package. It uses only
the standard library.
"""

from labkit.records.cell_session_file import (
    SESSION_DONE,
    CellSession,
    describe_last_session,
    is_locked,
    session_path,
)
from labkit.records.record_codec import read_json, write_json
from labkit.records.record_schema import (
    BETTER,
    MACHINE_FIELDS,
    OUTCOMES,
    PROCESSES_SUFFIX,
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
    output_values_path,
    read_arm,
    read_arms,
    read_cell,
    read_record,
    read_runs,
    write_record,
)

__all__ = [
    "BETTER",
    "MACHINE_FIELDS",
    "OUTCOMES",
    "PROCESSES_SUFFIX",
    "ROLES",
    "SCHEMA_VERSION",
    "SESSION_DONE",
    "Arm",
    "CaseRecord",
    "CellSession",
    "Metric",
    "Record",
    "RecordError",
    "describe_last_session",
    "is_locked",
    "machine_difference",
    "output_values_path",
    "parse_run_name",
    "read_arm",
    "read_arms",
    "read_cell",
    "read_json",
    "read_record",
    "read_runs",
    "run_name",
    "session_path",
    "write_json",
    "write_record",
]
