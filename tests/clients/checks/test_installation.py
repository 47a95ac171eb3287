"""`roll-env doctor` sees what stands in the way of `import rollgym`, and what is wrong with its files."""

import base64
import hashlib
import json
from pathlib import Path

import pytest

from rollgym.clients.checks.installation import HOME, check_imports, check_installation, required
from rollgym.clients.checks.report import Finding, Status

FILES = ("rollgym/__init__.py", "rollgym/version.py", "rollgym/envs/__init__.py")


def installed(
    place: Path,
    name: str = "rollgym",
    files: tuple[str, ...] = FILES,
    origin: str = "",
    *,
    editable: bool = True,
) -> Path:
    """Write a distribution as an installer leaves it, and return the package."""
    rows = []
    for file in files:
        (place / file).parent.mkdir(parents=True, exist_ok=True)
        (place / file).write_text(f"# {file}\n")
        digest = base64.urlsafe_b64encode(hashlib.sha256((place / file).read_bytes()).digest()).rstrip(b"=")
        rows.append(f"{file},sha256={digest.decode()},{(place / file).stat().st_size}")
    info = place / f"{name}-0.1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.4\nName: {name}\nVersion: 0.1.0\n")
    (info / "RECORD").write_text(
        "\n".join([*rows, f"{info.name}/RECORD,,", f"{name}/__pycache__/x.pyc,,"]) + "\n"
    )
    if origin:
        how = {"editable": True} if editable else {}
        (info / "direct_url.json").write_text(json.dumps({"url": origin, "dir_info": how}))
    return place / "rollgym"


def found(home: Path, *path: Path) -> list[tuple[Status, str]]:
    return [(each.status, each.detail) for each in check_installation(home, [str(each) for each in path])]


def test_a_whole_installation_passes(tmp_path: Path) -> None:
    home = installed(tmp_path)
    assert found(home, tmp_path) == [(Status.PASS, f"{tmp_path}, 4 files")]


def test_files_that_are_missing_changed_or_left_by_another_installation_are_named(tmp_path: Path) -> None:
    home = installed(tmp_path)
    (home / "envs" / "__init__.py").unlink()
    (home / "version.py").write_text("")
    (home / "old.py").write_text("")
    assert found(home, tmp_path) == [
        (Status.FAIL, "1 of its files is missing: rollgym/envs/__init__.py"),
        (Status.FAIL, "1 of its files is changed: rollgym/version.py"),
        (Status.FAIL, f"1 of its files is of another installation: {home / 'old.py'}"),
    ]


def test_a_list_with_rows_that_are_no_rows_is_read_as_far_as_it_goes(tmp_path: Path) -> None:
    home = installed(tmp_path)
    record = tmp_path / "rollgym-0.1.0.dist-info" / "RECORD"
    rows = record.read_text().splitlines()
    record.write_text("\n".join([rows[0].split(",")[0], "", rows[1] + ",more", *rows[2:], "gone.py"]))
    assert found(home, tmp_path) == [(Status.FAIL, "1 of its files is missing: gone.py")]


def test_another_distribution_inside_our_package_is_named(tmp_path: Path) -> None:
    home = installed(tmp_path)
    installed(tmp_path, "intruder", ("rollgym/intruder.py", "intruder/__init__.py"))
    installed(tmp_path, "innocent", ("innocent/rollgym/__init__.py",))
    (intruder, *_) = check_installation(home, [str(tmp_path)])
    remedy = "pip uninstall intruder, then install rollgym again"
    assert intruder == Finding("package intruder", Status.FAIL, "has files in rollgym/", remedy)


def test_a_second_installation_is_named(tmp_path: Path) -> None:
    home, other = installed(tmp_path / "first"), installed(tmp_path / "second")
    both = (home.parent, other.parent)
    warning = f"2 are found, and the first is used: {home.parent}; {other.parent}"
    assert found(home, *both)[0] == (Status.WARN, warning)
    assert found(other, *both) == [(Status.FAIL, f"{other} is running, and {home} is installed")]


def test_an_editable_installation_is_of_the_tree_that_it_names(tmp_path: Path) -> None:
    tree = tmp_path / "a tree"
    installed(tmp_path / "site", files=("finder.py",), origin=tree.as_uri())
    assert found(tree / "rollgym", tmp_path / "site") == [
        (Status.PASS, f"editable, {tmp_path / 'site'}, 2 files")
    ]
    assert found(HOME, tmp_path / "site") == [
        (Status.FAIL, f"{HOME} is running, and {tree / 'rollgym'} is installed")
    ]


def test_a_tree_that_is_not_installed_is_said_to_be_so(tmp_path: Path) -> None:
    assert found(HOME, tmp_path) == [(Status.SKIP, f"{HOME} is used as it is, it is not installed")]


def test_what_is_required_is_known_without_an_installation(tmp_path: Path) -> None:
    installed_names = required(HOME)
    assert {"fastapi", "numpy", "pydantic"} <= set(installed_names)
    assert not {"torch", "pytest"} & set(installed_names)
    assert required(HOME, []) == installed_names
    assert required(tmp_path / "rollgym", []) == []


@pytest.mark.parametrize("impostor", ["rollgym.py", "rollgym/__init__.py"])
def test_a_module_of_our_name_in_the_working_directory_is_named(
    impostor: str, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (alone,) = check_imports()
    assert alone == Finding("import rollgym", Status.PASS, str(HOME))
    (tmp_path / impostor).parent.mkdir(exist_ok=True)
    (tmp_path / impostor).write_text("raise SystemExit('imported')")
    (shadowed,) = check_imports()
    assert shadowed.status is Status.FAIL
    assert (
        shadowed.detail == f"a Python that is started in {tmp_path} finds {tmp_path / impostor}, not {HOME}"
    )


def test_a_checkout_of_our_name_in_the_working_directory_hides_an_editable_installation(
    tmp_path: Path, monkeypatch
) -> None:
    # Python asks setuptools' finder last. A package in `site-packages` would come before a folder without `__init__`.
    (tmp_path / "rollgym").mkdir()
    monkeypatch.chdir(tmp_path)
    (finding,) = check_imports()
    assert (
        finding.detail == f"a Python that is started in {tmp_path} finds {tmp_path / 'rollgym'}, not {HOME}"
    )


def test_the_clone_that_was_installed_is_no_impostor(tmp_path: Path, monkeypatch) -> None:
    """Who follows the README installs in a clone, and looks there at what was installed."""
    clone, site = tmp_path / "clone", tmp_path / "site"
    (clone / "rollgym").mkdir(parents=True)
    (clone / "rollgym" / "__init__.py").touch()
    monkeypatch.chdir(clone)
    home = installed(site, origin=clone.as_uri(), editable=False)
    (finding,) = check_imports(home, [str(site)])
    assert finding.status is Status.WARN
    assert "uses this clone, and not what was installed of it" in finding.detail


def test_a_path_in_front_of_the_installation_is_seen(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "path").mkdir()
    (tmp_path / "path" / "rollgym.py").touch()
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "path"))
    assert [each.status for each in check_imports()] == [Status.FAIL]


def test_a_module_that_keeps_python_from_starting_is_seen(tmp_path: Path, monkeypatch) -> None:
    (tmp_path / "json.py").write_text("raise ImportError('mine')")
    monkeypatch.chdir(tmp_path)
    (finding,) = check_imports()
    assert finding.detail == "Python does not start here: ImportError: mine"
