from labkit.machine.cgroups import cgroup_folders


def test_the_process_is_in_its_own_cgroup_and_in_all_above(tmp_path):
    root, membership = tmp_path / "cgroup", tmp_path / "membership"
    (root / "a.slice" / "b.scope").mkdir(parents=True)
    membership.write_text("0::/a.slice/b.scope\n")
    assert cgroup_folders(root, membership) == [
        root / "a.slice" / "b.scope",
        root / "a.slice",
        root,
    ]
    membership.write_text("0::/the/hosts/path\n")  # seen from inside a container
    assert cgroup_folders(root, membership) == [root]
    assert cgroup_folders(root, tmp_path / "none") == [root]


def test_each_controller_of_v1_has_a_hierarchy_of_its_own(tmp_path):
    membership = tmp_path / "membership"
    membership.write_text("5:memory:/m\n4:cpu,cpuacct:/a/b\n1:name=cpu:/named\n0::/unified\n")
    for folder in ("cpu/a/b", "memory/m", "unified"):
        (tmp_path / folder).mkdir(parents=True)
    cpu = tmp_path / "cpu"
    assert cgroup_folders(tmp_path, membership, "cpu") == [cpu / "a" / "b", cpu / "a", cpu]
    assert cgroup_folders(tmp_path, membership) == [tmp_path / "unified", tmp_path]
    assert cgroup_folders(tmp_path, membership, "pids") == [tmp_path / "pids"]
