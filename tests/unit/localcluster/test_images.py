"""What of this machine reaches a RUN step, and under which names."""

from pathlib import Path

import pytest

from localcluster import images


def test_pip_variables_rank_above_the_file(tmp_path: Path) -> None:
    (tmp_path / "pip.conf").write_text("[global]\ntimeout = 5\nindex-url = https://a/%40\n[install]\nuser = no\n")
    settings = images.pip_settings(
        tmp_path / "pip.conf", {"PIP_INDEX_URL": "https://b/100%", "PIP_CONFIG_FILE": "/x", "HOME": "/h"}
    )
    assert dict(settings["global"]) == {"timeout": "5", "index-url": "https://b/100%"}
    assert dict(settings["install"]) == {"user": "no"}


def test_local_folders_are_mounted_under_neutral_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheels, bundle = tmp_path / "wheels", tmp_path / "ca.pem"
    wheels.mkdir()
    bundle.touch()
    monkeypatch.setenv("PIP_FIND_LINKS", f"{wheels} /not/there")
    monkeypatch.setenv("PIP_CERT", str(bundle))
    monkeypatch.setenv("SSL_CERT_FILE", str(bundle))
    mounts = images.machine_settings(tmp_path)
    written = (tmp_path / "pip.conf").read_text()
    assert mounts[str(bundle)] == images.CA_BUNDLE
    assert f"cert = {images.CA_BUNDLE}" in written
    assert mounts[str(wheels)].startswith("/mnt/pip-")
    assert f"find-links = {mounts[str(wheels)]} /not/there" in written
    assert str(tmp_path) not in written
    assert mounts[str(tmp_path / "pip.conf")] == "/etc/pip.conf"


def test_the_base_image_changes_with_its_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "packages").write_text("python3\n")
    monkeypatch.setattr(images, "RECIPES", tmp_path)
    before = images.base_key()
    assert images.base_key() == before
    (tmp_path / "base" / "packages").write_text("python3\nvim\n")
    assert images.base_key() != before


def test_archives_of_two_tags_do_not_share_a_file() -> None:
    assert images._file("localhost/a:1", "0" * 64) != images._file("localhost/a:2", "0" * 64)
    assert images._file("localhost/a:1", "0" * 64).name == "localhost_a_1-000000000000.tar"
