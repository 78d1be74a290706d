import hashlib

import gguf_files
import pytest

from labkit.config import ConfigError, Model, PackagedFile
from labkit.models import resolve


@pytest.fixture
def shipped(tmp_path, monkeypatch):
    """A package that ships a small model; importing the package fails."""
    folder = tmp_path / "site" / "some_model"
    folder.mkdir(parents=True)
    (folder / "__init__.py").write_text("raise RuntimeError('imported')")
    path = gguf_files.model(folder / "some.gguf")
    monkeypatch.syspath_prepend(str(folder.parent))
    return path


def model(path, **changes):
    sha256 = hashlib.sha256(path.read_bytes()).hexdigest()
    facts = {"module": "some_model", "file": path.name, "sha256": sha256, "install": "some-model"}
    return Model(name="some", packaged=PackagedFile(**(facts | changes)))


def test_a_file_in_a_package_is_converted(shipped, no_cache):
    model_config = model(shipped)
    model_dir = resolve(model_config)
    assert model_dir.name == "some"
    assert model_dir.path.is_relative_to(no_cache)
    shipped.unlink()
    assert resolve(model_config) == model_dir  # the cache is enough


def test_a_missing_package_is_one_line_that_says_what_to_install(shipped, no_cache):
    for changes in ({"module": "some_other"}, {"file": "other.gguf"}):
        with pytest.raises(ConfigError) as error:
            resolve(model(shipped, **changes))
        assert str(error.value) == (
            "model=some: its package is not installed; run: pip install some-model"
        )


def test_another_version_of_the_file_is_refused(shipped, no_cache):
    model_config = model(shipped)
    shipped.write_bytes(shipped.read_bytes() + b"\0")
    with pytest.raises(ConfigError, match=r"is another version of the file \(SHA-256 "):
        resolve(model_config)
    assert not no_cache.exists()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"module": "some model"}, "must be the name of a Python package"),
        ({"file": "../etc/some.gguf"}, "must be the name of a file in the package's folder"),
        ({"file": ""}, "must be the name of a file in the package's folder"),
        ({"sha256": "abc"}, "64 hex digits"),
        ({"install": ""}, "must name a package for pip install"),
    ],
)
def test_invalid_packaged_files_are_refused(changes, message):
    facts = {"module": "m", "file": "m.gguf", "sha256": "0" * 64, "install": "m"}
    with pytest.raises(ConfigError, match=message):
        PackagedFile(**(facts | changes))


def test_a_model_has_one_source_of_weights():
    packaged = PackagedFile("m", "m.gguf", "0" * 64, "m")
    with pytest.raises(ConfigError, match="model=some comes in a package; use model=local"):
        Model(name="some", packaged=packaged, path="/here")
