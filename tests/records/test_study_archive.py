"""Archives of studies: what is read back, and what is refused before anything is used."""

import fcntl
import hashlib
import io
import lzma
import os
import random
import shutil
import stat
import tarfile
import zipfile
from contextlib import contextmanager

import pytest

from labkit.records import RecordError, open_study, regular_files, unpack_archive, write_archive
from labkit.records import study_archive as archives

FILES = {"report.md": b"# Study\n", "plots/a.png": b"\x89PNG" * 9, "tables/ä.csv": b"1,2\n"}


@pytest.fixture
def study(tmp_path):
    """Return a folder with two cells and files beside them."""
    folder = tmp_path / "study"
    for cell in ("engine=paged,seed=1", "b" * 120):
        (folder / cell / "runs").mkdir(parents=True)
        (folder / cell / ".hydra").mkdir()
        for number in range(3):
            (folder / cell / "runs" / f"b0{number}-p00-base.json").write_text(f"{cell} {number}")
        (folder / cell / ".hydra" / "config.yaml").write_text("a: 1")
    for name, content in FILES.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def pack(study, path):
    cells = {p.name: p for p in study.iterdir() if (p / "runs").is_dir()}
    return write_archive(path, FILES, cells)


@pytest.fixture
def archive(study, tmp_path):
    """Return the study's archive."""
    path = tmp_path / "study.zip"
    assert pack(study, path) == hashlib.sha256(path.read_bytes()).hexdigest()
    return path


def forge(path, members, comment=None):
    """Write a zip file with a valid digest, whatever its members are."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as file:
        for info, content in members:
            file.writestr(info, content)
        file.comment = b"labkit study 1 sha256 " + b"0" * 64
    body = buffer.getvalue()[: -archives.COMMENT_BYTES]
    digest = hashlib.sha256(body).hexdigest().encode()
    path.write_bytes(body + b"labkit study 1 sha256 " + digest)
    return path


def tarred(*members):
    """Return a cell's pack of ``(TarInfo, content)``."""
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as file:
        for info, content in members:
            info.size = len(content)
            file.addfile(info, io.BytesIO(content))
    return lzma.compress(buffer.getvalue())


def refused(path, match):
    with pytest.raises(RecordError, match=match) as error:
        root = open_study(path)
        for cell in root.archive.cells:
            root.archive.cell(cell)
    assert "\n" not in str(error.value) and str(path) in str(error.value)
    with pytest.raises(RecordError):
        unpack_archive(path, path.parent / "unpacked")
    assert not (path.parent / "unpacked").exists()
    assert not list(path.parent.glob(".unpacked*"))


def test_an_archive_is_read_like_its_folder(study, archive):
    root = open_study(archive)
    assert root.name == "study" and root.is_dir() and not root.is_file()
    assert sorted(p.name for p in root.iterdir()) == sorted(p.name for p in study.iterdir())
    for name, path in regular_files(study):
        inside = root / name
        assert inside.is_file() and not inside.is_dir()
        assert (inside.name, inside.stem, inside.read_bytes()) == (
            path.name, path.stem, path.read_bytes(),
        )  # fmt: skip
        assert inside.parent.is_dir() and inside.with_name("x").parent == inside.parent
    cell = root / "engine=paged,seed=1"
    assert [p.name for p in sorted((cell / "runs").glob("b*.json"))] == [
        f"b0{n}-p00-base.json" for n in range(3)
    ]
    assert not (cell / "none").is_file() and not (root / "none").is_dir()
    with pytest.raises(FileNotFoundError):
        (cell / "runs" / "none").read_text()
    assert open_study(study) == study


def test_hydra_settings_and_logs_stay_out(study, tmp_path):
    """They name folders of the machine."""
    cell = study / ("b" * 120)
    for path in (
        study / "multirun.yaml", cell / ".hydra" / "hydra.yaml", cell / "runs" / "b00-p00-a.log",
    ):  # fmt: skip
        path.write_text("dir: /home/somebody")
    pack(study, tmp_path / "study.zip")
    unpack_archive(tmp_path / "study.zip", tmp_path / "unpacked")
    names = {path.name for path in (tmp_path / "unpacked").rglob("*")}
    assert "config.yaml" in names and not {"multirun.yaml", "hydra.yaml", "b00-p00-a.log"} & names


def test_the_same_study_gives_the_same_bytes_and_unpacks_to_the_same_files(
    study, archive, tmp_path
):
    again, folder = tmp_path / "again.zip", tmp_path / "unpacked" / "deep"
    for path in study.rglob("*"):
        path.touch()
    pack(study, again)
    assert again.read_bytes() == archive.read_bytes()
    unpack_archive(archive, folder)
    contents = [
        {name: path.read_bytes() for name, path in regular_files(one)} for one in (study, folder)
    ]
    assert contents[0] == contents[1]
    with pytest.raises(RecordError, match="exists; choose another folder"):
        unpack_archive(archive, folder)


def test_what_a_killed_process_has_unpacked_is_removed_by_the_next(archive, tmp_path):
    left, live = (tmp_path / f".unpacked.{digit * 8}.tmp" for digit in "0a")
    for folder in (left, live):
        (folder / "cell").mkdir(parents=True)
    with open_locked(live):
        unpack_archive(archive, tmp_path / "unpacked")
    assert live.exists() and not left.exists()


@contextmanager
def open_locked(folder):
    """Lock a folder as a process that unpacks in it does."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    yield
    os.close(descriptor)


@pytest.fixture
def unpack_while(archive, tmp_path, monkeypatch):
    """Return a function that unpacks the archive, and calls another after it wrote a file."""
    write = archives._write_below

    def unpack(interfere):
        def write_and_interfere(place, name, content):
            write(place, name, content)
            if name == "report.md":
                interfere(place)

        monkeypatch.setattr(archives, "_write_below", write_and_interfere)
        unpack_archive(archive, tmp_path / "unpacked")
        return tmp_path / "unpacked"

    return unpack


def test_another_process_removes_no_folder_that_is_being_unpacked(study, unpack_while, tmp_path):
    folder = unpack_while(lambda _: archives._remove_abandoned(tmp_path / "unpacked"))
    assert [name for name, _ in regular_files(folder)] == [name for name, _ in regular_files(study)]


def test_a_folder_that_was_removed_while_it_was_unpacked_is_not_left_short(unpack_while, tmp_path):
    with pytest.raises(RecordError, match="were removed while they were written"):
        unpack_while(shutil.rmtree)
    assert not [path for path in tmp_path.iterdir() if "unpacked" in path.name]


def test_other_tools_unpack_it(archive):
    with zipfile.ZipFile(archive) as file:
        assert file.testzip() is None and file.read("report.md") == FILES["report.md"]
        packed = file.read("engine=paged,seed=1.tar.xz")
    with tarfile.open(fileobj=io.BytesIO(packed), mode="r:xz") as cell:
        assert "engine=paged,seed=1/runs/b02-p00-base.json" in cell.getnames()


def test_every_cut_and_every_changed_byte_is_refused(archive, tmp_path):
    whole, path = archive.read_bytes(), tmp_path / "bad.zip"
    for length in range(0, len(whole), 37):
        path.write_bytes(whole[:length])
        with pytest.raises(RecordError, match=r"bad\.zip") as error:
            open_study(path)
        assert "\n" not in str(error.value)
    for place in range(0, len(whole), 37):
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 1]) + whole[place + 1 :])
        with pytest.raises(RecordError, match=r"bad\.zip"):
            open_study(path)
    path.write_bytes(whole + b"more")
    with pytest.raises(RecordError, match="is not a study archive"):
        open_study(path)


def test_forged_bytes_raise_nothing_else(archive, tmp_path):
    """With a digest that fits, damage reaches the readers of zip, xz and tar."""
    body, path = archive.read_bytes()[: -archives.COMMENT_BYTES], tmp_path / "forged.zip"
    draw, refusals = random.Random(5), 0
    directory = body.index(b"PK\x01\x02")
    for number in range(150):
        forged = bytearray(body)
        for _ in range(draw.choice((1, 3))):
            place = draw.randrange(directory if number % 2 else 0, len(body))
            forged[place] = draw.randrange(256)
        digest = hashlib.sha256(forged).hexdigest().encode()
        path.write_bytes(bytes(forged) + b"labkit study 1 sha256 " + digest)
        try:
            root = open_study(path)
            for cell in root.archive.cells:
                root.archive.cell(cell)
            for name in root.archive.files:
                root.archive.read(name)
        except RecordError as error:
            refusals += 1
            assert "\n" not in str(error)
    assert refusals > 30


def test_foreign_files_are_refused(tmp_path):
    plain = tmp_path / "plain.zip"
    with zipfile.ZipFile(plain, "w") as file:
        file.writestr("report.md", "x")
    (tmp_path / "text.zip").write_text("not a zip")
    (tmp_path / "empty.zip").write_bytes(b"")
    for path in (plain, tmp_path / "text.zip", tmp_path / "empty.zip"):
        with pytest.raises(RecordError, match=r"is not a study archive .python -m labkit\.archive"):
            open_study(path)


@pytest.mark.parametrize(
    "name",
    ["../x", "/x", "a/../../x", "a//b", "./x", "C:/x", "a\\b", "a/", "x" * 1025, "a\nb"],
)
def test_names_that_leave_the_folder_are_refused(tmp_path, name):
    info = zipfile.ZipInfo("x")
    info.filename = name
    refused(forge(tmp_path / "a.zip", [(info, b"x")]), "is not a study archive|not a valid zip")


def test_links_doubled_names_and_other_compressions_are_refused(tmp_path):
    link = zipfile.ZipInfo("link")
    link.create_system, link.external_attr = 3, (stat.S_IFLNK | 0o777) << 16
    refused(forge(tmp_path / "a.zip", [(link, b"/etc/passwd")]), "'link' must be a regular file")
    twice = [(zipfile.ZipInfo("A"), b"1"), (zipfile.ZipInfo("a"), b"2")]
    refused(forge(tmp_path / "b.zip", twice), "two files have the same name")
    other = zipfile.ZipInfo("x")
    other.compress_type = zipfile.ZIP_BZIP2
    refused(forge(tmp_path / "c.zip", [(other, b"1")]), "stored or deflated")


def of_type(kind, name="cell/link", target=""):
    info = tarfile.TarInfo(name)
    info.type, info.linkname = kind, target
    return info


@pytest.mark.parametrize(
    ("info", "match"),
    [
        (of_type(tarfile.SYMTYPE, target="/etc/passwd"), "is a link or a special file"),
        (of_type(tarfile.LNKTYPE, target="cell/x"), "is a link or a special file"),
        (of_type(tarfile.CHRTYPE), "is a link or a special file"),
        (of_type(tarfile.FIFOTYPE), "is a link or a special file"),
        (of_type(tarfile.REGTYPE, "cell/../../x"), "it has a file named"),
        (of_type(tarfile.REGTYPE, "/x"), "it has a file named"),
        (of_type(tarfile.REGTYPE, "other/x"), "'other/x' lies outside the cell's folder"),
        (of_type(tarfile.REGTYPE, "cell"), "'cell' lies outside the cell's folder"),
    ],
)
def test_what_a_cell_must_not_hold_is_refused(tmp_path, info, match):
    members = [(zipfile.ZipInfo("cell.tar.xz"), tarred((info, b"")))]
    refused(forge(tmp_path / "a.zip", members), match)


def test_bombs_are_refused_before_they_fill_the_memory(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_CELL_BYTES", 1 << 20)
    bomb = lzma.compress(b"\0" * (64 << 20))
    assert len(bomb) < 1 << 15
    path = forge(tmp_path / "a.zip", [(zipfile.ZipInfo("cell.tar.xz"), bomb)])
    refused(path, "is truncated, or has more than 1 MiB")
    deflated = zipfile.ZipInfo("cell.tar.xz")
    deflated.compress_type = zipfile.ZIP_DEFLATED
    refused(
        forge(tmp_path / "d.zip", [(deflated, b"\0" * (2 << 20))]), "is deflated, or has over 1"
    )
    monkeypatch.setattr(archives, "MAX_TOTAL_BYTES", 1 << 20)
    zeros = zipfile.ZipInfo("zeros")
    zeros.compress_type = zipfile.ZIP_DEFLATED
    refused(forge(tmp_path / "b.zip", [(zeros, b"\0" * (2 << 20))]), "its files hold more than")
    monkeypatch.setattr(archives, "MAX_FILES", 1)
    many = [(zipfile.ZipInfo(name), b"") for name in "ab"]
    refused(forge(tmp_path / "c.zip", many), "it has 2 files")
    monkeypatch.setattr(archives, "MAX_ARCHIVE_BYTES", 10)
    refused(path, "an archive must have at most 10")


def test_cells_that_are_large_together_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(archives, "MAX_TOTAL_BYTES", 150_000)
    packs = [
        (zipfile.ZipInfo(f"{name}.tar.xz"), tarred((tarfile.TarInfo(f"{name}/x"), b"\0" * 100_000)))
        for name in ("a", "b")
    ]
    refused(forge(tmp_path / "a.zip", packs), "its cells have 2")


@pytest.mark.parametrize("content", [b"", b"no xz", lzma.compress(b"no tar" * 99)[:-9]])
def test_damaged_packs_are_refused(tmp_path, content):
    path = forge(tmp_path / "a.zip", [(zipfile.ZipInfo("cell.tar.xz"), content)])
    refused(path, "is damaged|is truncated")


def test_a_link_in_the_folder_is_not_followed(study, tmp_path):
    (study / "engine=paged,seed=1" / "runs" / "x").symlink_to("/etc/passwd")
    with pytest.raises(RecordError, match="x is a link or a special file"):
        pack(study, tmp_path / "a.zip")
    assert not (tmp_path / "a.zip").exists()


def test_what_no_reader_accepts_is_not_written(study, tmp_path, monkeypatch):
    """It was written, with its SHA-256, for somebody who may then delete the folder."""
    path = tmp_path / "a.zip"
    with pytest.raises(RecordError, match=r"not written: .*a\.zip .* two files have the same name"):
        write_archive(path, {"README.md": b"", "readme.md": b""}, {})
    for limit in ("MAX_CELL_BYTES", "MAX_FILES", "MAX_ARCHIVE_BYTES"):
        with monkeypatch.context() as patch, pytest.raises(RecordError, match="not written: "):
            patch.setattr(archives, limit, 2)
            pack(study, path)
    assert {one.name for one in tmp_path.iterdir()} == {"study"}
