"""Control groups: their folders and limits."""

import pytest

from labkit.machine.facts import cgroups, memory_capacity


def write(folder, **files):
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        (folder / name.replace("__", ".")).write_text(text)


def test_folders_are_the_own_cgroup_and_its_ancestors(tmp_path):
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    (root / "a.slice" / "b.scope").mkdir(parents=True)
    membership.write_text("0::/a.slice/b.scope\n")
    assert cgroups.folders(root=root, membership=membership) == [
        root / "a.slice" / "b.scope",
        root / "a.slice",
        root,
    ]
    membership.write_text("0::/the/hosts/path\n")  # seen from inside a container
    assert cgroups.folders(root=root, membership=membership) == [root]
    assert cgroups.folders(root=root, membership=tmp_path / "none") == [root]


def test_each_controller_of_v1_has_a_hierarchy_of_its_own(tmp_path):
    membership = tmp_path / "membership"
    membership.write_text("5:memory:/m\n4:cpu,cpuacct:/a/b\n1:name=cpu:/named\n0::/unified\n")
    for folder in ("cpu/a/b", "memory/m", "unified"):
        (tmp_path / folder).mkdir(parents=True)
    cpu = tmp_path / "cpu"
    assert cgroups.folders("cpu", tmp_path, membership) == [cpu / "a" / "b", cpu / "a", cpu]
    assert cgroups.folders("", tmp_path, membership) == [tmp_path / "unified", tmp_path]
    assert cgroups.folders("pids", tmp_path, membership) == [tmp_path / "pids"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Return this process's only cgroup."""
    monkeypatch.setattr(cgroups, "folders", lambda controller="": [tmp_path])
    return tmp_path


@pytest.mark.parametrize(
    ("name", "text", "limit"),
    [
        ("memory.max", "max\n", None),
        ("memory.max", "2147483648\n", 1 << 31),
        ("memory.limit_in_bytes", "9223372036854771712\n", None),
        ("memory.limit_in_bytes", "1048576\n", 1 << 20),
    ],
)
def test_cgroup_limit(folder, name, text, limit):
    assert cgroups.memory_limit() is None
    (folder / name).write_text(text)
    assert cgroups.memory_limit() == limit


def test_headroom_is_the_limit_minus_usage_without_page_cache(folder):
    stat = "anon 700\ninactive_file 40\nactive_file 9\n"
    write(folder, memory__max="1000\n", memory__current="800\n", memory__stat=stat)
    assert cgroups.memory_headroom() == 240
    write(folder, memory__current="1200\n")
    assert cgroups.memory_headroom() == 0
    write(folder, memory__max="max\n")
    assert cgroups.memory_headroom() is None


def test_cgroup_v1_is_read_too(folder):
    write(
        folder,
        memory__limit_in_bytes="1000",
        memory__usage_in_bytes="300",
        memory__stat="cache 5\ntotal_inactive_file 50\n",
    )
    assert cgroups.memory_headroom() == 750


@pytest.mark.parametrize(
    ("controller", "files"),
    [
        ("", {"memory__max": "5000000\n", "memory__current": "4000000\n"}),
        (
            "memory",
            {"memory__limit_in_bytes": "5000000\n", "memory__usage_in_bytes": "4000000\n"},
        ),
    ],
)
def test_an_ancestors_limit_counts(controller, files, tmp_path, monkeypatch):
    own, above = tmp_path / "own", tmp_path / "above"
    write(own, memory__max="max\n")
    write(above, **files)
    folders = {controller: [own, above]}
    monkeypatch.setattr(cgroups, "folders", lambda controller="": folders.get(controller, []))
    assert cgroups.memory_limit() == 5_000_000
    assert cgroups.memory_headroom() == 1_000_000
    machine = memory_capacity.this_machine()
    assert (machine.total, machine.available) == (5_000_000, 1_000_000)


V2, V1 = "0::/a.slice/b.scope\n", "7:memory:/\n4:cpu,cpuacct:/a/b\n"


@pytest.mark.parametrize(
    ("membership", "quotas", "cores"),
    [
        (V2, {"": "max"}, None),
        (V2, {"": "150000"}, 1.5),
        (V2, {"": "max", "a.slice": "max", "a.slice/b.scope": "50000"}, 0.5),
        (V2, {"a.slice": "150000", "a.slice/b.scope": "400000"}, 1.5),
        (V2, {"c.slice": "100000"}, None),
        (V2, {}, None),
        (V1, {"cpu": "-1"}, None),
        (V1, {"cpu": "400000"}, 4.0),
        (V1, {"cpu": "-1", "cpu/a": "150000", "cpu/a/b": "300000"}, 1.5),
        (V1, {"memory": "100000", "cpu/c": "100000"}, None),
    ],
)
def test_the_quota_is_the_smallest_of_all_ancestors(tmp_path, membership, quotas, cores):
    root = tmp_path / "cgroup"
    for folder, quota in quotas.items():
        (root / folder).mkdir(parents=True, exist_ok=True)
        if membership == V2:
            (root / folder / "cpu.max").write_text(f"{quota} 100000\n")
        else:
            (root / folder / "cpu.cfs_quota_us").write_text(f"{quota}\n")
            (root / folder / "cpu.cfs_period_us").write_text("100000\n")
    (tmp_path / "membership").write_text(membership)
    assert cgroups.cpu_quota(root, tmp_path / "membership") == cores
