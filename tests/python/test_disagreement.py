# SPDX-License-Identifier: Apache-2.0
"""Ranks that make different calls, or do not arrive: all of them raise, and none hangs."""

import re
from collections.abc import Callable

import pytest
import torch
import torch_device
from rank_pool import KERNELS, RankPool, error_of
from torch import distributed

import normscope

# The time limit of groups in which a rank does not arrive, and the time after which the others must
# have raised, even on a busy machine.
LIMIT_SECONDS = 2.0
PATIENCE_SECONDS = 30.0


def named_layer(name: str, channels: int = 3) -> normscope.BatchNorm2d:
    layer = normscope.BatchNorm2d(channels)
    layer.layer_name = name
    return layer


def assert_group_is_usable() -> None:
    layer = named_layer("afterwards")
    layer(torch.randn(4, 3, 2, 2)).sum().backward()
    total = torch.ones(1)
    distributed.all_reduce(total)
    assert total.item() == distributed.get_world_size()


def other_layer() -> str:
    name = f"layer{distributed.get_rank()}"
    return error_of(lambda: named_layer(name)(torch.randn(4, 3, 2, 2)))


def other_channels() -> str:
    channels = 3 + distributed.get_rank()
    return error_of(lambda: named_layer("head", channels)(torch.randn(4, channels, 2, 2)))


def other_channels_without_a_name() -> str:
    channels = 3 + distributed.get_rank()
    return error_of(lambda: normscope.BatchNorm2d(channels)(torch.randn(4, channels, 2, 2)))


def rank_1_leaves_a_layer_out() -> str:
    if distributed.get_rank() == 1:
        normscope.BatchNorm2d(3)  # construction alone does not number layers
    first, second = normscope.BatchNorm2d(3), normscope.BatchNorm2d(3)
    for layer in (first, second):
        layer(torch.randn(4, 3, 2, 2))
    order = (second,) if distributed.get_rank() == 1 else (first, second)

    def step() -> None:
        for layer in order:
            layer(torch.randn(4, 3, 2, 2))

    return error_of(step)


def other_direction() -> str:
    y = named_layer("stem")(torch.randn(4, 3, 2, 2)).sum()
    if distributed.get_rank() == 0:
        return error_of(y.backward)
    return error_of(lambda: named_layer("stem")(torch.randn(4, 3, 2, 2)))


def without_gradient() -> str:
    with torch.set_grad_enabled(distributed.get_rank() == 0):
        return error_of(lambda: named_layer("stem")(torch.randn(4, 3, 2, 2)))


def frozen() -> str:
    layer = named_layer("stem").requires_grad_(distributed.get_rank() == 0)
    return error_of(lambda: layer(torch.randn(4, 3, 2, 2)))


def error_in_a_group_that_stays_usable(name: str) -> str:
    message: str = globals()[name]()
    assert_group_is_usable()
    return message


@pytest.mark.own_kernels
@pytest.mark.parametrize(
    ("function", "of_rank_0", "of_rank_1"),
    [
        (other_layer, "forward of layer0 (3 channels", "forward of layer1 (3 channels"),
        (other_channels, "forward of head (3 channels", "forward of head (4 channels"),
        (other_channels_without_a_name, "layer 1 (3 channels", "layer 1 (4 channels"),
        (rank_1_leaves_a_layer_out, "of unnamed layer 1 (3", "of unnamed layer 2 (3"),
        (other_direction, "backward of stem", "forward of stem"),
        (without_gradient, "forward of stem (3 channels, scope world)", "nothing needs a gradient"),
        (frozen, "forward of stem (3 channels, scope world)", "nothing needs a gradient"),
    ],
)
def test_every_rank_is_told_what_each_was_doing(
    ranks: RankPool,
    environment: dict[str, str],
    function: Callable[[], str],
    of_rank_0: str,
    of_rank_1: str,
) -> None:
    messages = ranks.run(
        2, error_in_a_group_that_stays_usable, function.__name__, environment=environment
    )

    for message in messages:
        _, rank_0, rank_1, _ = message.split("\n")
        assert rank_0.startswith("  rank 0: ")
        assert of_rank_0 in rank_0
        assert rank_1.startswith("  rank 1: ")
        assert of_rank_1 in rank_1


def other_dtypes(device: str, compiled: bool) -> str:  # noqa: FBT001
    if device == torch_device.NAME:
        torch_device.load()
    group = distributed.new_group(backend=torch_device.BACKENDS if device != "cpu" else "gloo")
    layer = normscope.BatchNorm1d(3, process_group=group).to(device)
    dtype = (torch.float32, torch.float64)[distributed.get_rank()]
    call = torch.compile(layer, backend="aot_eager") if compiled else layer

    def step() -> None:
        x = torch.randn(4, 3, dtype=dtype).to(device).requires_grad_()
        call(x).sum().backward()

    message = error_of(step)
    if compiled:
        torch.compiler.reset()
    for x in (torch.randn(4, 3), torch.randn(4, 3, dtype=torch.float64)):
        layer(x.to(device)).sum().backward()  # the group stays usable
    return message


@pytest.mark.parametrize("kernels", [*KERNELS, "device"])
@pytest.mark.parametrize("compiled", [False, True])
def test_another_dtype_is_told_to_every_rank(
    pools: dict[str, RankPool],
    devices: RankPool,
    kernels: str,
    compiled: bool,  # noqa: FBT001
) -> None:
    on_device = kernels == "device"
    pool, device = (devices, torch_device.NAME) if on_device else (pools[kernels], "cpu")

    for message in pool.run(2, other_dtypes, device, compiled):
        _, rank_0, rank_1, _ = message.split("\n")
        assert rank_0.startswith("  rank 0: ")
        assert rank_0.endswith(" with float32 input")
        assert rank_1.startswith("  rank 1: ")
        assert rank_1.endswith(" with float64 input")


def other_dtypes_later(dtypes: tuple[torch.dtype, ...]) -> str:
    torch_device.load()
    group = distributed.new_group(backend=torch_device.BACKENDS)
    layer = normscope.BatchNorm1d(3, process_group=group).to(torch_device.NAME)
    for dtype in dtypes:
        layer(torch.randn(4, 3, dtype=dtype).to(torch_device.NAME))
    own = (torch.float32, torch.float64)[distributed.get_rank()]
    return error_of(lambda: layer(torch.randn(4, 3, dtype=own).to(torch_device.NAME)))


@pytest.mark.parametrize("dtypes", [(torch.float32,), (torch.float32, torch.float64)])
def test_a_later_dtype_on_a_device_is_told_if_every_call_is_checked(
    devices: RankPool, dtypes: tuple[torch.dtype, ...]
) -> None:
    environment = {"NORMSCOPE_CHECK": "1"}

    for message in devices.run(2, other_dtypes_later, dtypes, environment=environment):
        assert " with float32 input\n" in message
        assert " with float64 input\n" in message


def other_settings(settings: tuple[dict[str, float | None], ...], compiled: bool) -> str:  # noqa: FBT001
    layer = normscope.BatchNorm1d(3, **settings[distributed.get_rank()])  # type: ignore[arg-type]
    call = torch.compile(layer, backend="aot_eager") if compiled else layer
    message = error_of(lambda: call(torch.randn(4, 3)))
    if compiled:
        torch.compiler.reset()
    assert layer.running_mean is not None
    assert layer.running_mean.tolist() == [0, 0, 0]
    assert_group_is_usable()
    return message


@pytest.mark.parametrize("kernels", KERNELS)
@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    ("settings", "of_ranks"),
    [
        (({"eps": 0.5}, {"eps": 0.25}), ["eps 0.5 and momentum 0.1", "eps 0.25 and momentum 0.1"]),
        (({}, {"momentum": 0.3}), ["momentum 0.1", "momentum 0.3"]),
        (({"momentum": None}, {"momentum": 0.0}), ["momentum None", "momentum 0"]),
    ],
)
def test_another_eps_or_momentum_is_told_to_every_rank(
    pools: dict[str, RankPool],
    kernels: str,
    settings: tuple[dict[str, float | None], ...],
    of_ranks: list[str],
    *,
    compiled: bool,
) -> None:
    for message in pools[kernels].run(2, other_settings, settings, compiled):
        lines = message.split("\n")[1:3]
        assert all(line.endswith(text) for line, text in zip(lines, of_ranks, strict=True))


def python_runs_while_ops_wait() -> bool:
    """Make rank 0 wait in a forward for rank 1, which waits for another thread of rank 0."""
    import threading

    store = distributed.distributed_c10d._get_default_store()
    layer = named_layer("stem")
    layer(torch.randn(4, 3, 2, 2))
    if distributed.get_rank() == 0:
        release = threading.Timer(0.2, lambda: store.set("go", ""))
        release.start()
    else:
        store.wait(["go"])
    layer(torch.randn(4, 3, 2, 2))
    return True


def test_an_op_that_waits_does_not_hold_python_s_lock(
    ranks: RankPool, environment: dict[str, str]
) -> None:
    assert ranks.run(
        2,
        python_runs_while_ops_wait,
        hang_seconds=PATIENCE_SECONDS,
        environment=environment,
    ) == [True, True]


def scoped_layer(scope: str) -> normscope.BatchNorm2d:
    layer = named_layer("stem")
    layer.scope = normscope.Scope(scope)
    return layer


def rank_0_first_uses(scope: str, others: str) -> str:
    layer = scoped_layer(scope if distributed.get_rank() == 0 else others)
    message = error_of(lambda: layer(torch.randn(4, 3, 2, 2)))
    assert_group_is_usable()
    return message


@pytest.mark.own_kernels
@pytest.mark.parametrize(
    ("scope", "others", "of_rank_0", "of_others"),
    [
        (
            "group:2",
            "world",
            "first use of scope group:2 by stem",
            "forward of stem (3 channels, scope world)",
        ),
        (
            "world",
            "group:2",
            "forward of stem (3 channels, scope world)",
            "first use of scope group:2 by stem",
        ),
        (
            "group:2",
            "ranks:0,2",
            "first use of scope group:2 by stem",
            "first use of scope ranks:0,2 by stem",
        ),
    ],
)
def test_ranks_that_first_use_different_scopes_are_all_told(
    ranks: RankPool,
    environment: dict[str, str],
    scope: str,
    others: str,
    of_rank_0: str,
    of_others: str,
) -> None:
    messages = ranks.run(3, rank_0_first_uses, scope, others, environment=environment)

    for message in messages:
        _, *of_ranks, _ = message.split("\n")
        expected = [of_rank_0, of_others, of_others]
        assert of_ranks == [f"  rank {rank}: {text}" for rank, text in enumerate(expected)]


def rank_0_changes_to_the_world() -> str:
    """Let rank 0 change its scope in a network whose second layer synchronizes all ranks."""
    stem, head = scoped_layer("group:2"), named_layer("head")

    def forward() -> None:
        head(stem(torch.randn(4, 3, 2, 2)))

    distributed.barrier()  # starting processes must not count towards the time limit
    forward()
    if distributed.get_rank() == 0:
        stem.scope = normscope.Scope("world")
    message = error_of(forward)
    # Destroying the group while others still wait in it would end their wait.
    store = distributed.distributed_c10d._get_default_store()
    store.set(f"done{distributed.get_rank()}", "")
    store.wait([f"done{rank}" for rank in range(4)])
    return message


@pytest.mark.own_kernels
def test_a_rank_that_changes_its_scope_alone_ends_the_wait_of_all(ranks: RankPool) -> None:
    messages = ranks.run(
        4,
        rank_0_changes_to_the_world,
        group_seconds=PATIENCE_SECONDS,
        environment={"NORMSCOPE_TIMEOUT": str(2 * LIMIT_SECONDS)},
    )

    # Rank 0 waits in the world. Rank 1 waits in {0, 1}, where rank 0 does not arrive. The others
    # pass {2, 3} and wait for rank 1 in the world.
    of_0, of_1, of_2, of_3 = messages
    assert of_0.startswith("forward of stem (3 channels, scope world): shared memory: ")
    assert of_1.startswith(
        "forward of stem (3 channels, scope group:2) among ranks 0, 1 (here 0 to 1): shared memory"
    )
    assert re.search(r"rank 1 of 2 waited \d\.\d s for rank 0", of_1)
    for message in (of_2, of_3):
        assert message.startswith("forward of head (3 channels, scope world): shared memory: ")
    for message in (of_0, of_2, of_3):
        assert re.search(r"waited \d\.\d s for ranks? 1", message)
