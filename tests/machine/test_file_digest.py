import hashlib
import os
import shutil

import pytest

from labkit.machine import file_digest


@pytest.fixture
def file(tmp_path, no_cache, monkeypatch):
    """A file of 1 MiB whose digest is remembered at once."""
    monkeypatch.setattr(file_digest, "SETTLED_S", -1.0)
    path = tmp_path / "weights"
    path.write_bytes(bytes(file_digest.MIN_CACHED_BYTES))
    return path


def test_a_file_is_read_once_until_it_changes(file, monkeypatch):
    content, reads, plain = file.read_bytes(), [], hashlib.file_digest
    monkeypatch.setattr(hashlib, "file_digest", lambda *args: reads.append(args) or plain(*args))
    assert {file_digest.sha256(file) for _ in range(3)} == {hashlib.sha256(content).hexdigest()}
    assert len(reads) == 1
    before, state = file_digest.sha256(file), file.stat()
    with file.open("r+b") as stream:  # anywhere, in place, and with the old modification time
        stream.seek(len(content) // 3)
        stream.write(b"x")
    os.utime(file, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert file_digest.sha256(file) == hashlib.sha256(file.read_bytes()).hexdigest() != before
    assert len(reads) == 2
    copy = shutil.copy(file, file.with_name("copy"))
    assert file_digest.sha256(copy) == file_digest.sha256(file)


def test_what_may_still_change_unseen_or_is_small_is_not_remembered(file, no_cache, monkeypatch):
    monkeypatch.setattr(file_digest, "SETTLED_S", 60.0)
    file_digest.sha256(file)
    monkeypatch.setattr(file_digest, "SETTLED_S", -1.0)
    file.with_name("small").write_bytes(b"x")
    file_digest.sha256(file.with_name("small"))
    assert not (no_cache / "digests").exists()
    file_digest.sha256(file)
    (entry,) = (no_cache / "digests").iterdir()
    entry.write_bytes(b"cut")
    assert len(file_digest.sha256(file)) == 64
