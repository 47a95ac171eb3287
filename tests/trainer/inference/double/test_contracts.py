"""What is taken for granted of servers is looked up in sources: what is otherwise there is said, a line each."""

import json
import zipfile

import pytest

from tests.support.inference_server.contract import (
    FOLDER,
    USES,
    Uses,
    contract_of,
    differences,
    routes_used,
    sources_of,
)

SOURCE = """
@app.post("/generate")
@app.put("/generate2")
async def generate(obj): ...

@router.api_route("/weights", methods=["GET"])
def weights(): ...

class Asked:
    rid: str
    limit: int = 128
    def other(self): ...

SWITCH = os.environ.get("A_VARIABLE")
"""
USED = Uses(
    "nobody",
    "pkg",
    {"Asked": ("rid", "limit", "gone")},
    ("limit", "off"),
    ("A_VARIABLE", "NONE_SUCH"),
    ("rid",),
)


def test_routes_fields_defaults_and_names_are_found():
    found = contract_of(USED, ["/generate", "/weights", "/nowhere"], [SOURCE])
    assert found == {
        "routes": {"/generate": True, "/nowhere": False, "/weights": True},
        "fields": {"Asked.rid": "required", "Asked.limit": "128", "Asked.gone": "missing"},
        "switches": {"limit": True, "off": False},
        "variables": {"A_VARIABLE": True, "NONE_SUCH": False},
        "keys": {"rid": True},
    }


def test_a_changed_default_and_a_route_that_went_are_said():
    before = contract_of(USED, ["/generate"], [SOURCE])
    after = contract_of(
        USED, ["/generate"], [SOURCE.replace("128", "16").replace('post("/generate")', 'post("/g")')]
    )
    assert differences(before, after) == [
        "routes: /generate: True before, False now",
        "fields: Asked.limit: 128 before, 16 now",
    ]
    assert differences(before, before) == []


def test_a_wheel_is_read_below_its_folder(tmp_path):
    wheel = tmp_path / "pkg-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr("pkg/a.py", "one = 1")
        archive.writestr("pkg/b.txt", "no")
        archive.writestr("other/c.py", "no")
    assert list(sources_of(wheel, "pkg")) == ["one = 1"]


@pytest.mark.parametrize("dialect", sorted(USES))
def test_all_that_is_used_was_found_in_the_recorded_release(dialect):
    """The double has no route, and the client sends no field, that the real server's sources lack."""
    recorded = json.loads((FOLDER / f"{dialect}.json").read_text())
    assert set(recorded["routes"]) == set(routes_used(dialect))
    assert set(recorded["fields"]) == {
        f"{owner}.{name}" for owner, names in USES[dialect].fields.items() for name in names
    }
    for kind in ("routes", "switches", "variables", "keys"):
        assert [name for name, there in recorded[kind].items() if not there] == []
    assert "missing" not in recorded["fields"].values()
