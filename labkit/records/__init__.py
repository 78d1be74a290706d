"""Records of runs: schema, JSON codec, files and the registry of counters.

The experiment writes records and the analysis reads them; both import this package. It uses only
the standard library.
"""

from labkit.records.cell_work_session import (
    SESSION_DONE,
    CellSession,
    describe_last_session,
    is_locked,
    session_path,
)
from labkit.records.record_codec import read_json, write_json
from labkit.records.record_digests import DIGESTS_FILE, read_digests
from labkit.records.record_store import (
    DESIGN_FILE,
    check_digests,
    name_order,
    output_values_path,
    publish_arm,
    publish_design,
    publish_records,
    read_arm,
    read_arms,
    read_cell,
    read_output_values,
    read_record,
    read_runs,
    record_paths,
    unlisted_records,
    write_record,
)
from labkit.records.run_record import (
    BETTER,
    MACHINE_FIELDS,
    OLDER_VERDICTS,
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
from labkit.records.step_trace_file import read_step_trace, step_counts, write_step_trace
from labkit.records.study_archive import (
    ARCHIVE_SUFFIX,
    ArchivePath,
    StudyPath,
    open_study,
    regular_files,
    unpack_archive,
    write_archive,
)
