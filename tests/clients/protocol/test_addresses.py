"""Addresses that no server can have are refused where they are written, in one line."""

import time

import pytest

from rollgym.clients.cli.main import main
from rollgym.clients.client.client import EnvClient
from rollgym.clients.protocol.addresses import explain_refusal, server_parts
from rollgym.clients.protocol.errors import ProblemError

WEB = ("http", "https")


@pytest.mark.parametrize(
    "url",
    [
        "localhost:8000",
        "ftp://there",
        "http://",
        "http://[::1",
        "http://h\udcff.example",
        "http://there/\udcff",
        "http://a..b",
        f"http://{'a' * 64}.example",
        "http://a b",
        "http://a\tb",
        "http://a/b\n",
        " http://a",
        "http://a\u00a0b",
        "http://a/\x00",
    ],
)
def test_what_is_no_address_is_refused(url):
    with pytest.raises(ValueError, match="is not the address of a server, such as http://127"):
        server_parts(url, WEB)


@pytest.mark.parametrize("port", ["99999", "0x50", "b", "0", "-1"])
def test_a_port_that_there_is_not_is_refused(port):
    with pytest.raises(ValueError, match="has no port that there is: they go from 1 to 65535"):
        server_parts(f"http://there:{port}", WEB)


@pytest.mark.parametrize(
    ("url", "host", "port"),
    [
        ("http://127.0.0.1:8000", "127.0.0.1", 8000),
        ("https://[fe80::1%25eth0]:1/base", "fe80::1%25eth0", 1),
        ("http://name:word@bücher.example/", "bücher.example", None),
        (f"http://{'a' * 63}.example.", f"{'a' * 63}.example.", None),
    ],
)
def test_addresses_have_a_name_and_maybe_a_port(url, host, port):
    parts = server_parts(url, WEB)
    assert (parts.hostname, parts.port) == (host, port)


@pytest.mark.parametrize(
    "words",
    [
        ["list", "--url", "http://h\udcff.example"],
        ["list", "--url", "http://a..b"],
        ["unregister", "X", "--gateway", "http://a..b"],
        ["unregister", "X", "--gateway", "http://there/\udcff"],
    ],
)
def test_a_command_says_so_in_one_line(words, capsys):
    assert main(words) == 2
    told = capsys.readouterr().err
    assert "is not the address of a server" in told
    assert told.count("\n") == 1


def test_a_client_refuses_it_before_it_is_asked_anything():
    with pytest.raises(ValueError, match="is not the address of a server"):
        EnvClient("http://a..b")


@pytest.mark.parametrize("host", ["\u00e9" * 10**6, "\u00e9." * 10**5, "a." * 10**6, "a:" + "9" * 10**6])
def test_a_megabyte_is_refused_at_once_and_not_shown(host):
    begun = time.process_time()
    with pytest.raises(ValueError, match="http://") as refused:
        server_parts(f"http://{host}", ("http",))
    assert time.process_time() - begun < 1.0
    assert len(str(refused.value)) < 500


def test_a_password_is_not_shown():
    with pytest.raises(ValueError, match=r"@host:99999'") as refused:
        server_parts("https://user:secret@host:99999", ("https",))
    assert "secret" not in str(refused.value)


def test_what_was_noted_of_a_refusal_stays_beside_its_remedy():
    refusal = ProblemError("unauthorized", "the token is not known")
    refusal.add_note("go on from the last checkpoint")
    explained = explain_refusal(refusal, None, "--token")
    assert "pass its token as --token" in str(explained)
    assert explained.__notes__ == ["go on from the last checkpoint"]
