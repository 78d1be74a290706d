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
from labkit.records.record_digests import DIGESTS_FILE, read_digests
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
    check_digests,
    output_values_path,
    publish_arm,
    publish_record,
    read_arm,
    read_arms,
    read_cell,
    read_record,
    read_runs,
    record_paths,
    unlisted_records,
    write_record,
)

__all__ = [
    "BETTER",
    "DIGESTS_FILE",
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
    "check_digests",
    "describe_last_session",
    "is_locked",
    "machine_difference",
    "output_values_path",
    "parse_run_name",
    "publish_arm",
    "publish_record",
    "read_arm",
    "read_arms",
    "read_cell",
    "read_digests",
    "read_json",
    "read_record",
    "read_runs",
    "record_paths",
    "run_name",
    "session_path",
    "unlisted_records",
    "write_json",
    "write_record",
]
