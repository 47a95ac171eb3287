"""Where a gateway connects to, and where never."""

import ipaddress

import pytest

from rollgym.clients.protocol.errors import ProblemError
from rollgym.env_server.common.settings import ConfigurationError
from rollgym.env_server.gateway.upstream.targets import TargetRules

NEVER = (
    *("169.254.169.254", "169.254.0.1", "fe80::1", "224.0.0.1", "ff02::1", "0.0.0.0", "::"),
    # The same in disguise.
    *("::ffff:169.254.169.254", "2002:a9fe:a9fe::1", "64:ff9b::a9fe:a9fe"),
    # As translators with prefixes of 96, 64, 56 and 48 bits read it.
    *("64:ff9b:1::a9fe:a9fe", "64:ff9b:1:7:a9:fea9:fe08:808", "64:ff9b:1:a9:fe:a9fe:808:808"),
    *("64:ff9b:1:a9fe:a9:fe00::", "64:ff9b:1:a9fe:a9:fe00:808:808", "64:ff9b:1::"),
)
LOOPBACK = ("127.0.0.1", "127.9.9.9", "::1", "::ffff:127.0.0.1", "64:ff9b::7f00:1")
PRIVATE = (
    "10.1.2.3",
    "172.16.0.1",
    "172.31.255.255",
    "192.168.1.1",
    "100.64.0.1",
    "fd00::1",
    "::ffff:10.1.2.3",
)
PUBLIC = ("8.8.8.8", "172.32.0.1", "2606:4700:4700::1111", "::ffff:8.8.8.8", "64:ff9b:1::8.8.8.8")
NOBODYS = ("192.0.2.1", "240.0.0.1", "255.255.255.255", "198.18.0.1", "2001:db8::1")


def allowed(rules: TargetRules, *addresses: str) -> list[bool]:
    return [rules.refusal(ipaddress.ip_address(address)) is None for address in addresses]


@pytest.mark.parametrize(
    ("settings", "yes", "no"),
    [
        ((), PUBLIC, (*LOOPBACK, *PRIVATE, *NOBODYS)),
        (("loopback",), (*PUBLIC, *LOOPBACK), (*PRIVATE, *NOBODYS)),
        (("private",), (*PUBLIC, *PRIVATE), (*LOOPBACK, *NOBODYS)),
        (("10.1.0.0/16", "fd00::/64"), ("10.1.2.3", "fd00::1", "::ffff:10.1.2.3"), ("10.2.0.1", "fd00:1::1")),
        (("0.0.0.0/0", "::/0"), (*PUBLIC, *LOOPBACK, *PRIVATE), ()),
    ],
)
def test_networks(settings: tuple[str, ...], yes: tuple[str, ...], no: tuple[str, ...]) -> None:
    rules = TargetRules(settings)
    assert all(allowed(rules, *yes))
    assert not any(allowed(rules, *no, *NEVER))


@pytest.mark.parametrize(
    "url", ["http://ⓛocalhost", "http://①②⑦.0.0.1:8000", "http://a..b", "http://ex ample.org"]
)
async def test_a_host_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ProblemError) as refused:
        await TargetRules(("loopback",)).check(url)
    assert refused.value.code == "invalid_request"


def test_a_refusal_names_the_remedy() -> None:
    refusal = TargetRules(()).refusal(ipaddress.ip_address("127.0.0.1"))
    assert refusal is not None
    assert "allow_network (loopback" in refusal


@pytest.mark.parametrize("text", ["localhost", "10.0.0.1/8", "", "ten"])
def test_an_operator_is_told_what_is_no_network(text: str) -> None:
    with pytest.raises(ConfigurationError, match="neither loopback, private nor a network"):
        TargetRules([text])


async def test_targets() -> None:
    rules = TargetRules(["loopback"])
    target = await rules.check("http://localhost:81/base/")
    assert (target.url, target.host, target.port, target.secure) == (
        *("http://localhost:81/base", "localhost", 81),
        False,
    )
    assert ipaddress.ip_address(target.address).is_loopback
    assert (await rules.check("https://127.0.0.1")).port == 443
    assert (await rules.check("http://[::1]:9")).address == "::1"
    # Other ways to write an address lead to the same answer.
    for url in ("http://127.1/", "http://2130706433", "http://0x7f000001"):
        assert (await rules.check(url)).address == "127.0.0.1"


@pytest.mark.parametrize(
    ("url", "detail"),
    [
        ("", "base URL"),
        ("127.0.0.1:8000", "base URL"),
        ("ftp://127.0.0.1", "base URL"),
        ("file:///etc/passwd", "base URL"),
        ("http://", "base URL"),
        ("http://127.0.0.1:99999", "ort"),
        ("http://127.0.0.1/?a=b", "query"),
        ("http://127.0.0.1/#a", "fragment"),
        ("http://user:pw@127.0.0.1", "password"),
        ("http://user@127.0.0.1", "name"),
        ("http://no-such-host.invalid", "cannot be found"),
        ("http://" + "a" * 70 + ".org", "cannot be found"),
        ("http://[::1", "URL"),
    ],
)
async def test_what_is_no_base_url(url: str, detail: str) -> None:
    with pytest.raises(ProblemError) as caught:
        await TargetRules(["loopback"]).check(url)
    assert caught.value.code == "invalid_request"
    assert detail in caught.value.extra["errors"][0]["reason"]


@pytest.mark.parametrize(
    "url", ["http://127.0.0.1:1", "http://localhost:1", "http://169.254.169.254", "http://127.1"]
)
async def test_refused_targets(url: str) -> None:
    with pytest.raises(ProblemError) as caught:
        await TargetRules(()).check(url)
    assert caught.value.code == "forbidden"
