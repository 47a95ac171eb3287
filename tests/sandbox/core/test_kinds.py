"""How an operator names a sandbox."""

import pytest

from rollgym.sandbox.core.kinds import SANDBOXES, VARIABLE, kind_named, parse_sandbox_name
from tests.support.processes import ROOT


def test_the_page_of_the_sandbox_names_each_and_the_order_in_which_they_are_tried() -> None:
    page = (ROOT / "docs" / "sandbox.md").read_text(encoding="utf-8")
    assert [each.name for each in SANDBOXES if f"`{each.name}`" not in page] == []
    automatic = ", ".join(f"`{each.name}`" for each in SANDBOXES if each.automatic)
    assert f'`open_sandbox("auto")` takes the first of {automatic} that works.' in page


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("namespaces", ("namespaces", {})),
        ("docker", ("docker", {})),
        ("docker:registry:5000/image:tag", ("docker", {"image": "registry:5000/image:tag"})),
        ("remote:http://sandbox:8000", ("remote", {"url": "http://sandbox:8000"})),
        (
            "remote:https://a.example/b?token_file=/t",
            ("remote", {"url": "https://a.example/b", "token_file": "/t"}),
        ),
    ],
)
def test_a_name_and_what_belongs_to_it(text: str, expected: tuple[str, dict[str, str]]) -> None:
    assert parse_sandbox_name(text) == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("remote", "address of a server"),
        ("remote:sandbox:8000", "address of a server"),
        ("remote:http://a?token=1", "no option 'token'"),
        ("namespaces:4", "nothing after a colon"),
    ],
)
def test_what_is_none_is_refused_with_the_reason(text: str, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_sandbox_name(text)


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("docker", "docker"),
        ("docker:python:3.12", "docker"),
        ("remote:http://a", "remote"),
        *((each, None) for each in ("docker:", "remote", "landlock:4", "auto", "none", "")),
    ],
)
def test_a_text_names_a_kind_or_none(text: str, name: str | None) -> None:
    kind = kind_named(text)
    assert (None if kind is None else kind.name) == name


def test_each_is_named_as_it_says() -> None:
    assert [name for each in SANDBOXES for name in each.names if not each.is_named_by(name)] == []


def test_without_a_name_the_environment_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert parse_sandbox_name(None) == ("auto", {})
    monkeypatch.setenv(VARIABLE, "remote:http://sandbox:8000")
    assert parse_sandbox_name(None)[0] == "remote"
    assert parse_sandbox_name("landlock")[0] == "landlock"
