"""What registered servers say as JSON: exact, and never nested deeper than an answer may be."""

import pytest

from rollgym.env_server.gateway.upstream.base import UpstreamError, as_text, read_foreign_info, read_json


@pytest.mark.parametrize("number", [2**53, 2**64 - 1, 2**64, -(2**70), 10**40])
def test_integers_of_any_size_are_exact_as_text(number):
    content = f'{{"observation":{{"left":[{number},"é"]}},"info":{{"at":{number}}}}}'.encode()
    reply = read_json(content)
    assert as_text(reply["observation"]) == f'{{"left":[{number},"é"]}}'
    assert read_foreign_info(reply["info"]) == {"at": str(number)}


def test_what_is_nested_too_deeply_is_refused_whatever_stands_in_it():
    for inner in (b"", b"1" * 30):
        assert read_json(b"[" * 250 + inner + b"]" * 250)
        with pytest.raises(UpstreamError, match="nested too deeply"):
            read_json(b"[" * 300 + inner + b"]" * 300)
