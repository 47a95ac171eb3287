"""Which role has which devices: what can be shared, what is refused with its remedy, and the picture of it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rollgym.trainer.cluster.placement import Placement, Role, check_placement, picture, place_roles
from rollgym.trainer.config.cluster import parse_devices
from rollgym.trainer.config.load import load_settings
from rollgym.trainer.core.errors import ConfigError

MINIMAL = ["tasks=[{env_id: FrozenLake-v0}]"]
RAY = "cluster.kind=ray"
FSDP = "backend.kind=fsdp2"
TRAINS = "cluster.roles.actor_train.devices"
SAMPLES = "cluster.roles.actor_inference.devices"
JUDGE = "cluster.roles.judges.Math={model: m, command: [serve], devices: %s}"


def placed(*words):
    return place_roles(load_settings(None, [*MINIMAL, *([FSDP] if RAY in words else []), *words]))


def servers(count=1, tensor_parallel=1, more=""):
    launch = f"{{count: {count}, tensor_parallel: {tensor_parallel}}}"
    return f"inference={{kind: vllm, launch: {launch}{more}}}"


@pytest.mark.parametrize(
    ("written", "devices"),
    [
        (5, [5]),
        ("5", [5]),
        ("0-3", [0, 1, 2, 3]),
        ("0-1,6, 3 - 4", [0, 1, 6, 3, 4]),
        ([0, "2-3", "7"], [0, 2, 3, 7]),
        ([], []),
    ],
)
def test_devices_are_numbers_and_ranges(written, devices):
    assert parse_devices(written) == devices


@pytest.mark.parametrize(
    "written",
    [
        "list(range(0,8))",
        "0-",
        "-1",
        "",
        "3-1",
        "0..3",
        [1.0],
        [None],
        ["0-1-2"],
        True,
        [True],
        -1,
        99999,
        "1" * 10**6,
    ],
)
def test_what_is_no_device_is_refused(written):
    with pytest.raises(ConfigError, match=r"cluster\.roles\.actor_train\.devices"):
        load_settings(None, [*MINIMAL, f"{TRAINS}={written!r}"])


@pytest.mark.parametrize(
    "address", ["ray://head:10001", "head", "head:", ":6379", "head:port", "head:99999", "http://h:1"]
)
def test_what_is_no_address_of_a_cluster_is_refused(address):
    with pytest.raises(ConfigError, match=r"cluster\.address: .*is neither auto nor HOST:PORT"):
        load_settings(None, [*MINIMAL, f"cluster.address='{address}'"])


def test_a_device_of_a_role_is_named_once():
    with pytest.raises(ConfigError, match="devices names 2 twice"):
        placed(f"{SAMPLES}=[0-2, 2]")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["cluster.nodes=2"],
            "kind 'local' is this machine, and nodes is 2: set kind to ray, or leave nodes out",
        ),
        ([RAY, "backend={}"], "trains in actors, and backend.kind 'torch' in the process of the driver"),
        ([f"{TRAINS}=0-1"], "names 2 devices, and backend.ranks is 1: each rank has one device"),
        ([RAY, f"{SAMPLES}=0-1", "deterministic=true"], "names 2 devices with an engine each: name one"),
        (
            ["cluster.roles.critic.devices=3"],
            "the algorithm has no critic, so nothing would be there: leave it out",
        ),
        (["cluster.roles.reference.devices=3"], "the algorithm has no KL penalty"),
        ([f"{SAMPLES}=1"], "cluster.kind is left out, and the engine is in the run's own process"),
        (
            [
                RAY,
                "algorithm=ppo",
                "backend={kind: fsdp2, ranks: 2, mesh: {tensor: 2}}",
                "cluster.roles.critic.devices=2-4",
            ],
            r"names 3 devices, and its layers are divided over 2 \(backend.mesh\): name a multiple of 2",
        ),
        (
            ["algorithm=ppo", "cluster.roles.critic.devices=2"],
            "backend.kind 'torch' computes the critic where it trains the policy: leave it out, or set",
        ),
        (
            [RAY, "algorithm=ppo", "cluster.roles.critic.devices=2-3", "cluster.offload_models=true"],
            "has models of ranks that share devices be there by turns, and no two of this run's do",
        ),
        (["inference={kind: vllm, urls: ['http://a:1']}", f"{SAMPLES}=0"], "names servers that run already"),
        (
            ["inference={kind: vllm, urls_file: servers}", f"{SAMPLES}=0"],
            "urls_file names servers that run already",
        ),
        (
            [RAY, servers()],
            "nothing says on which devices of the cluster: set cluster.roles.actor_inference.devices",
        ),
        (
            [RAY, servers(), f"{SAMPLES}=1-4"],
            "names 4 devices, and 1 server of 1 device each need 1: set inference.launch.count to 4",
        ),
        (
            [RAY, servers(2, 2), f"{SAMPLES}=1-3"],
            "3 cannot be divided into servers of 2: name a multiple of it, or change inference.launch.tensor_parallel",
        ),
        (
            [RAY, servers(), f"{SAMPLES}=1", "inference.launch.devices=['1']"],
            "both say where servers are: leave inference.launch.devices out",
        ),
        (
            [RAY, f"{SAMPLES}=4", "cluster.devices_per_node=4"],
            "names device 4, and 1 node of 4 devices has devices 0 to 3: raise cluster.nodes or",
        ),
        (
            [
                RAY,
                servers(1, 2),
                f"{SAMPLES}=3-4",
                "cluster={nodes: 2, devices_per_node: 4, kind: ray}",
                f"{SAMPLES}=3-4",
            ],
            r"server 0 would have devices of nodes 0 and 1 \(3, 4\), and its devices must be in one machine",
        ),
        (
            [RAY, servers(), f"{SAMPLES}=0"],
            "share device 0, and its servers would keep all of its memory: set inference.sleep_level to 1 or 2",
        ),
        (
            [RAY, "model.device=cuda:1"],
            "names a device of one machine, and with cluster.kind 'ray' each process",
        ),
        (
            ["cluster.offload=true"],
            "moves the models of ranks, and backend.kind 'torch' has none: leave it out",
        ),
        ([RAY, f"{SAMPLES}=1", "cluster.offload=true"], "who has devices of its own: leave it out, or give"),
        (
            [RAY, "cluster.offload=true", "rollout.max_staleness=1"],
            "take turns, and rollout.max_staleness 1 has them",
        ),
        ([RAY, JUDGE % "[]"], "names no devices: a judge has devices of its own"),
        ([RAY, JUDGE % "0"], "judges.Math.devices shares device 0 with cluster.roles.actor_train.devices"),
    ],
)
def test_what_cannot_be_is_refused_with_its_remedy(words, message):
    with pytest.raises(ConfigError, match=message):
        placed(*words)


@pytest.mark.parametrize("name", ["actor_train", "critic", "environment"])
def test_a_judge_is_not_named_as_another_role(name):
    with pytest.raises(
        ConfigError, match=f"judges: '{name}' is a role of its own: serve the judge by another"
    ):
        placed(RAY, (JUDGE % "1").replace("Math", name))


def test_servers_that_sleep_or_are_bounded_share_devices():
    sleeps = placed(RAY, servers(more=", sleep_level: 1"), f"{SAMPLES}=0")
    assert sleeps.role("actor_inference").processes == ((0,),)
    bounded = placed(RAY, servers(), "inference.launch.memory_fraction=0.4", f"{SAMPLES}=0")
    assert bounded.role("actor_inference").processes == ((0,),)


def test_the_settings_of_a_cluster_are_those_of_one_machine_by_one_word():
    words = ["backend={kind: fsdp2, ranks: 2}", f"{SAMPLES}=2-3", "cluster.roles.environment={actors: 4}"]
    words += ["cluster.address=auto", "cluster.working_dir=here"]
    afar, here = placed(RAY, *words), placed("cluster.kind=local", *words)
    assert [role.processes for role in afar.roles] == [((0,), (1,)), ((2,), (3,))]
    assert [role.processes for role in here.roles] == [((0,), (1,)), ((0,),)]
    assert here.environment == "processes beside the driver"


def test_without_a_word_everything_is_on_the_first_device():
    roles = {role.name: role.processes for role in placed("algorithm=ppo").roles}
    assert roles == {"actor_train": ((0,),), "actor_inference": ((0,),), "critic": ((0,),)}


def test_groups_of_servers_lie_in_the_order_of_the_list():
    words = [RAY, servers(2, 2), "cluster.nodes=2", "cluster.devices_per_node=4", f"{SAMPLES}=[1, 2, 4, 5]"]
    role = placed(*words).role("actor_inference")
    assert role.processes == ((1, 2), (4, 5))


def placements():
    """Any roles on any devices, most of them impossible."""
    processes = st.lists(
        st.lists(st.integers(0, 20), min_size=1, max_size=3, unique=True).map(tuple), min_size=1, max_size=4
    ).map(tuple)
    role = st.builds(
        Role,
        st.text("abcdefghij_", min_size=1, max_size=40),
        processes,
        st.sampled_from(["rank", "engine", "server", "judge"]),
        st.booleans(),
    )
    roles = st.lists(role, min_size=1, max_size=5, unique_by=lambda role: role.name).map(tuple)
    return st.builds(Placement, st.just("ray"), st.integers(1, 3), st.integers(1, 40), roles)


@given(placements())
def test_what_is_let_through_can_be(placement):
    """Devices are there, a process is on one node, judges are alone, and who shares gives way; all else is refused."""
    there = placement.nodes * placement.devices_per_node
    fits = all(device < there for role in placement.roles for device in role.devices)
    one_node = all(
        len({placement.node_of(device) for device in process}) == 1
        for role in placement.roles
        for process in role.processes
    )
    sharing = [
        (one, other)
        for number, one in enumerate(placement.roles)
        for other in placement.roles[number + 1 :]
        if set(one.devices) & set(other.devices)
    ]
    may_share = all(role.gives_way and role.does != "judge" for pair in sharing for role in pair)
    if fits and one_node and may_share:
        check_placement(placement)
    else:
        with pytest.raises(ConfigError, match=r"cluster\.roles"):
            check_placement(placement)


@given(placements())
def test_the_picture_fits_a_terminal_and_shows_every_process(placement):
    lines = picture(placement).splitlines()
    assert all(len(line) <= 78 for line in lines)
    for role in placement.roles:
        for device in role.devices:
            assert any(str(device) in line.split() for line in lines), "the device has a column"


def test_the_picture():
    words = [RAY, servers(2, 2, ", sleep_level: 1"), "cluster.devices_per_node=8", f"{SAMPLES}=[0, 1, 2, 3]"]
    words += ["cluster.roles.environment={actors: 4}", JUDGE % "[6, 7]", "algorithm=ppo"]
    assert picture(placed(*words)) == "\n".join(
        [
            "cluster: ray, 1 node of 8 devices",
            "",
            "node 0            0   1   2   3   4   5   6   7",
            "actor_train       0   .   .   .   .   .   .   .",
            "actor_inference   0   0   1   1   .   .   .   .",
            "critic            0   .   .   .   .   .   .   .",
            "Math              .   .   .   .   .   .   0   0",
            "",
            "actor_train      1 rank",
            "actor_inference  2 servers of 2 devices",
            "critic           1 rank",
            "Math             1 judge of 2 devices",
            "environment      up to 4 actors of 1 CPU",
            "actor_train and actor_inference share 1 of their devices",
            "actor_train and critic share all of their devices",
            "actor_inference and critic share 1 of their devices",
        ]
    )


def test_a_critic_and_a_reference_have_as_many_ranks_as_devices():
    words = [RAY, "algorithm={preset: ppo, kl: {coefficient: 0.1}}", "backend={kind: fsdp2, ranks: 2}"]
    words += ["cluster.roles.critic.devices=1-3", "cluster.roles.reference.devices=4"]
    roles = {role.name: role.processes for role in placed(*words, "cluster.offload_models=true").roles}
    assert roles["critic"] == ((1,), (2,), (3,))
    assert roles["reference"] == ((4,),)
