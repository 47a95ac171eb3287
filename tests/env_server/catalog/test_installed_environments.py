"""Environments of other packages: found by entry point, served, and checked by their name."""

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from rollgym.clients.checks.target import CheckTarget, TargetError
from rollgym.clients.process.modules import installed_environments
from rollgym.env_server.catalog.catalog import Catalog
from rollgym.env_server.common.settings import ConfigurationError, ServerSettings
from rollgym.extensions import Extension

MODULE = """
import rollgym

@rollgym.verifier(tasks=[{"question": "1 + 1?", "answer": "2"}])
def sums(response, task):
    "Sums of another package."
    return response == task["answer"]
"""


def install(site: Path, name: str, **entries: str) -> None:
    information = site / f"{name}-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
    lines = [f"{env_id} = {path}" for env_id, path in entries.items()]
    (information / "entry_points.txt").write_text("\n".join(["[rollgym.environments]", *lines, ""]))


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an installed package, as `pip install --target` leaves it."""
    (tmp_path / "other_sums.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("other_sums", None)


def test_it_is_served_beside_ours_unless_only_what_is_named_is(site: Path) -> None:
    install(site, "other", **{"Sums-v0": "other_sums:sums"})
    assert installed_environments() == {"Sums-v0": Extension("other_sums:sums", ("other",), False)}
    assert "other_sums" not in sys.modules, "what is only listed is not imported"
    entry = Catalog.load(ServerSettings()).get("Sums-v0")
    assert entry.describe()["description"] == "Sums of another package."
    assert (entry.isolation, entry.built_in) == ("process", False)
    for settings in (ServerSettings(builtin=False), ServerSettings(gateway=True)):
        assert Catalog.load(settings).find("Sums-v0") is None


@pytest.mark.parametrize(
    ("entries", "reason"),
    [
        ({"FrozenLake-v0": "other_sums:sums"}, "'FrozenLake-v0' of the package other is taken: uninstall it"),
        ({"Sums-v0": "other_sums:nothing"}, r"(?s)the package other is broken: .*nothing.*; uninstall it"),
        ({"Sums-v0": "no_such_module:x"}, r"(?s)the package other is broken: .*no_such_module.*--no-builtin"),
        ({"a/b": "other_sums:sums"}, "'a/b' of the package other is no id"),
    ],
)
def test_what_cannot_be_served_is_told_with_its_package(
    site: Path, entries: dict[str, str], reason: str
) -> None:
    install(site, "other", **entries)
    with pytest.raises(ConfigurationError, match=reason):
        Catalog.load(ServerSettings())
    assert Catalog.load(ServerSettings(builtin=False)) is not None


def test_one_id_in_two_packages_is_refused(site: Path) -> None:
    install(site, "other", **{"Sums-v0": "other_sums:sums"})
    install(site, "another", **{"Sums-v0": "another_sums:sums"})
    with pytest.raises(ConfigurationError, match="of the package another and other means two classes"):
        Catalog.load(ServerSettings())


def test_it_is_checked_by_its_name(site: Path) -> None:
    install(site, "other", **{"Sums-v0": "other_sums:sums"})
    target = CheckTarget("Sums-v0")
    built = target.build()
    assert built.reset(seed=0)[0] == "1 + 1?"
    assert target.server_arguments() == ["--env", "checked=other_sums:sums"]
    assert target.served_id == "checked"
    assert CheckTarget("FrozenLake-v0").server_arguments() == []
    with pytest.raises(TargetError, match="there is no environment 'Sum-v0'; did you mean Sums-v0"):
        CheckTarget("Sum-v0").build()
