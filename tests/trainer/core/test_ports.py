import pytest

from rollgym.trainer.core.ports import OWN_RANGE, free_ports, quiet_ports


@pytest.mark.parametrize("host", ["", "127.0.0.1"])
def test_ports_are_free_and_differ(host):
    assert len(set(free_ports(host, 5))) == 5


@pytest.mark.parametrize(
    ("own_range", "first", "last"),
    [("32768\t60999\n", 20_000, 29_999), ("22000 65535", 20_000, 21_999), ("1024 50000", 50_001, 65_535)],
)
def test_nobody_who_asks_for_any_port_is_given_that_of_a_server_which_is_still_starting(
    own_range, first, last
):
    quiet = quiet_ports(own_range)
    assert (quiet[0], quiet[-1]) == (first, last)


def test_ports_are_chosen_even_where_the_system_gives_all_of_them():
    assert not quiet_ports("1024 65535")
    assert quiet_ports("") == range(20_000, 30_000)


def test_ports_are_none_that_the_system_gives():
    quiet = quiet_ports(OWN_RANGE.read_text() if OWN_RANGE.exists() else "")
    assert set(free_ports("127.0.0.1", 50)) <= set(quiet or range(65_536))
